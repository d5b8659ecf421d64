// Convolutions and what is fused behind them, computed plainly.
#pragma once
#include "stand_in.h"

enum { MAX_RANK = 6, MAX_STEPS = 16 };
typedef struct {
  int64_t id;
  bool is_virtual;          // exists only between two steps; kept as floats
  int type, rank;           // N, C, and spatial axes
  int64_t size[MAX_RANK], stride[MAX_RANK];
  char* at;                 // of one that is not virtual
} Tensor;
int64_t tensor_bytes(const Tensor* t);

typedef enum { FORWARD, BACKWARD_DATA, BACKWARD_FILTER } Direction;
typedef struct {
  bool is_pointwise;
  Tensor x, w, y;           // pointwise: y = mode(alpha1 x, alpha2 w); w.at and w.is_virtual unset: no second operand
  bool has_second;
  Direction direction;
  bool reversed;            // the filter, along all its spatial axes
  int64_t padding[MAX_RANK], step[MAX_RANK], dilation[MAX_RANK];
  double alpha, beta;       // pointwise: alpha of x and of w
  int mode;
  double lower, upper;      // of relu
} Step;
typedef struct {
  Work work;
  int count;
  bool is_slow;             // takes 20 ms more
  Step steps[MAX_STEPS];
} Chain;
void run_chain(Work* work);
