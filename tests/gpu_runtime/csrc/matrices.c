#include "matrices.h"

#include "numbers.h"

bool is_known_type(int type) { return type == CUDA_R_32F || type == CUDA_R_64F || type == CUDA_R_16F || type == CUDA_R_16BF; }

int64_t type_bytes(int type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_16F || type == CUDA_R_16BF ? 2 : type == CUDA_R_8I ? 1 : 4; }

double element(const char* at, int type, int64_t i) {
  switch (type) {
    case CUDA_R_64F: return ((const double*)at)[i];
    case CUDA_R_16F: return (double)from_f16(((const uint16_t*)at)[i]);
    case CUDA_R_16BF: return (double)from_bf16(((const uint16_t*)at)[i]);
    default: return (double)((const float*)at)[i];
  }
}
void set_element(char* at, int type, int64_t i, double value) {
  switch (type) {
    case CUDA_R_64F: ((double*)at)[i] = value; break;
    case CUDA_R_16F: ((uint16_t*)at)[i] = to_f16((float)value); break;
    case CUDA_R_16BF: ((uint16_t*)at)[i] = to_bf16((float)value); break;
    default: ((float*)at)[i] = (float)value;
  }
}

// One matrix of a batch as floats, densely; products of doubles go another way.
static float* dense(const Matrix* m, int64_t n, int64_t rows, int64_t columns) {
  float* out = malloc(sizeof(float) * (size_t)(rows * columns));
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++)
      out[i * columns + j] = (float)element(m->at, m->type, n * m->batch + i * m->row + j * m->column);
  return out;
}

// cuBLASLt's is the approximation by a hyperbolic tangent.
static double gelu(double v) { return 0.5 * v * (1 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))); }

static void finish(const Product* p, int64_t n, int64_t i, int64_t j, double sum) {
  double v = p->alpha * sum;
  if (p->beta != 0) v += p->beta * element(p->c.at, p->c.type, n * p->c.batch + i * p->c.row + j * p->c.column);
  if (p->bias) v += element(p->bias, p->bias_type, i);
  if (p->before.at) set_element((char*)p->before.at, p->before.type, n * p->before.batch + i * p->before.row + j * p->before.column, v);
  if (p->relu && v < 0) v = 0;
  if (p->gelu) v = gelu(v);
  set_element((char*)p->d.at, p->d.type, n * p->d.batch + i * p->d.row + j * p->d.column, v);
}

static void multiply_floats(const Product* p, int64_t n) {
  float *a = dense(&p->a, n, p->rows, p->depth), *b = dense(&p->b, n, p->depth, p->columns);
  float* sums = malloc(sizeof(float) * (size_t)p->columns);
  for (int64_t i = 0; i < p->rows; i++) {
    memset(sums, 0, sizeof(float) * (size_t)p->columns);
    for (int64_t k = 0; k < p->depth; k++)
      for (int64_t j = 0; j < p->columns; j++) sums[j] += a[i * p->depth + k] * b[k * p->columns + j];
    for (int64_t j = 0; j < p->columns; j++) finish(p, n, i, j, (double)sums[j]);
  }
  free(a);
  free(b);
  free(sums);
}

static void multiply_doubles(const Product* p, int64_t n) {
  for (int64_t i = 0; i < p->rows; i++)
    for (int64_t j = 0; j < p->columns; j++) {
      double sum = 0;
      for (int64_t k = 0; k < p->depth; k++)
        sum += element(p->a.at, p->a.type, n * p->a.batch + i * p->a.row + k * p->a.column) *
               element(p->b.at, p->b.type, n * p->b.batch + k * p->b.row + j * p->b.column);
      finish(p, n, i, j, sum);
    }
}

void run_product(Work* work) {
  const Product* p = (const Product*)work;
  for (int64_t n = 0; n < p->batches; n++) {
    if (p->a.type == CUDA_R_64F) multiply_doubles(p, n);
    else multiply_floats(p, n);
  }
}
