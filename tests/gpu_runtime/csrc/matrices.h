// Products of matrices, computed plainly, for cuBLAS and cuBLASLt.
#pragma once
#include "stand_in.h"

typedef struct {
  const char* at;
  int type;                        // CUDA_R_...
  int64_t row, column, batch;      // strides, in elements
} Matrix;
typedef struct {
  Work work;
  Matrix a, b, c, d;               // d = activation(alpha a b + beta c + bias)
  Matrix before;                   // takes what the activation is applied to; at NULL: nothing does
  int64_t rows, columns, depth, batches;
  double alpha, beta;
  const char* bias;                // one per row of d; NULL: none
  int bias_type;
  bool relu, gelu;
} Product;

bool is_known_type(int type);
int64_t type_bytes(int type);
double element(const char* at, int type, int64_t i);
void set_element(char* at, int type, int64_t i, double value);
void run_product(Work* work);
