#include <unistd.h>

#include "convolution.h"

#include "cudnn_abi.h"
#include "matrices.h"

static int element_type(int type) {
  return type == DNN_DOUBLE ? CUDA_R_64F : type == DNN_HALF ? CUDA_R_16F : type == DNN_BFLOAT16 ? CUDA_R_16BF : CUDA_R_32F;
}
static int64_t count_of(const Tensor* t) {
  int64_t n = 1;
  for (int i = 0; i < t->rank; i++) n *= t->size[i];
  return n;
}
static int64_t positions_of(const Tensor* t) { return count_of(t) / t->size[0] / t->size[1]; }
int64_t tensor_bytes(const Tensor* t) {
  int64_t last = 0;
  for (int i = 0; i < t->rank; i++) last += (t->size[i] - 1) * t->stride[i];
  return (last + 1) * type_bytes(element_type(t->type));
}

// ---- between a tensor and floats in the order [first axis][space][second axis], or with the first and second exchanged
typedef struct {
  Tensor tensor;
  float* values;
} Kept;
typedef struct {
  int count;
  Kept kept[MAX_STEPS];
} Virtuals;  // values of virtual tensors, in the order [N][space][C]

static int64_t place_in_tensor(const Tensor* t, int64_t n, int64_t position, int64_t c) {
  int64_t at = n * t->stride[0] + c * t->stride[1];
  for (int i = t->rank - 1; i >= 2; i--) {
    at += position % t->size[i] * t->stride[i];
    position /= t->size[i];
  }
  return at;
}
static float* find_virtual(const Virtuals* v, const Tensor* t) {
  for (int i = 0; i < v->count; i++)
    if (v->kept[i].tensor.id == t->id) return v->kept[i].values;
  return NULL;
}
static float* read_tensor(const Virtuals* v, const Tensor* t, bool exchanged) {
  int64_t total = count_of(t), positions = positions_of(t), n = t->size[0], c = t->size[1];
  float* out = malloc(sizeof(float) * (size_t)total);
  if (t->is_virtual) return memcpy(out, find_virtual(v, t), sizeof(float) * (size_t)total);
  for (int64_t i = 0; i < n; i++)
    for (int64_t p = 0; p < positions; p++)
      for (int64_t k = 0; k < c; k++) {
        int64_t to = exchanged ? (k * positions + p) * n + i : (i * positions + p) * c + k;
        out[to] = (float)element(t->at, element_type(t->type), place_in_tensor(t, i, p, k));
      }
  return out;
}
// alpha values + beta what is there; `values` is freed or kept.
static void write_tensor(Virtuals* v, const Tensor* t, float* values, bool exchanged, double alpha, double beta) {
  int64_t positions = positions_of(t), n = t->size[0], c = t->size[1];
  if (t->is_virtual) {
    for (int64_t i = 0; i < count_of(t); i++) values[i] *= (float)alpha;
    v->kept[v->count++] = (Kept){*t, values};
    return;
  }
  for (int64_t i = 0; i < n; i++)
    for (int64_t p = 0; p < positions; p++)
      for (int64_t k = 0; k < c; k++) {
        int64_t from = exchanged ? (k * positions + p) * n + i : (i * positions + p) * c + k, to = place_in_tensor(t, i, p, k);
        double old = beta != 0 ? beta * element(t->at, element_type(t->type), to) : 0;
        set_element(t->at, element_type(t->type), to, alpha * (double)values[from] + old);
      }
  free(values);
}

// ---- one convolution. x is [n][position][channel], y [n][position][out]; w is [channel][tap][out] for FORWARD and BACKWARD_FILTER
// and [out][tap][channel] for BACKWARD_DATA, so that the innermost loop runs along memory.
static int64_t input_position(const Step* s, int64_t y_position, int64_t tap) {  // -1: in the padding
  int64_t at = 0, scale = 1;
  for (int i = s->x.rank - 1; i >= 2; i--) {
    int64_t y = y_position % s->y.size[i], k = tap % s->w.size[i];
    int64_t x = y * s->step[i - 2] + k * s->dilation[i - 2] - s->padding[i - 2];
    if (x < 0 || x >= s->x.size[i]) return -1;
    at += x * scale;
    scale *= s->x.size[i];
    y_position /= s->y.size[i];
    tap /= s->w.size[i];
  }
  return at;
}

// The part of one group at one place of y and one tap.
static void multiply_tap(const Step* s, int64_t group, int64_t tap, float* x, float* y, float* w) {
  int64_t channels = s->w.size[1], groups = s->x.size[1] / channels, outs_all = s->y.size[1], outs = outs_all / groups;
  int64_t taps = positions_of(&s->w);
  if (s->reversed) tap = taps - 1 - tap;
  x += group * channels;
  y += group * outs;
  if (s->direction == BACKWARD_DATA) {
    for (int64_t o = 0; o < outs; o++) {
      const float* row = w + ((group * outs + o) * taps + tap) * channels;
      for (int64_t i = 0; i < channels; i++) x[i] += y[o] * row[i];
    }
    return;
  }
  for (int64_t i = 0; i < channels; i++) {
    float* row = w + (i * taps + tap) * outs_all + group * outs;
    if (s->direction == FORWARD)
      for (int64_t o = 0; o < outs; o++) y[o] += x[i] * row[o];
    else
      for (int64_t o = 0; o < outs; o++) row[o] += x[i] * y[o];
  }
}

static void run_convolution(Virtuals* v, const Step* s) {
  const Tensor* target = s->direction == FORWARD ? &s->y : s->direction == BACKWARD_DATA ? &s->x : &s->w;
  bool exchanged = s->direction != BACKWARD_DATA;  // of w
  float* x = target == &s->x ? calloc((size_t)count_of(&s->x), sizeof(float)) : read_tensor(v, &s->x, false);
  float* y = target == &s->y ? calloc((size_t)count_of(&s->y), sizeof(float)) : read_tensor(v, &s->y, false);
  float* w = target == &s->w ? calloc((size_t)count_of(&s->w), sizeof(float)) : read_tensor(v, &s->w, exchanged);
  int64_t x_positions = positions_of(&s->x), y_positions = positions_of(&s->y), taps = positions_of(&s->w);
  int64_t groups = s->x.size[1] / s->w.size[1];
  for (int64_t n = 0; n < s->x.size[0]; n++)
    for (int64_t p = 0; p < y_positions; p++)
      for (int64_t tap = 0; tap < taps; tap++) {
        int64_t from = input_position(s, p, tap);
        for (int64_t g = 0; from >= 0 && g < groups; g++)
          multiply_tap(s, g, tap, x + (n * x_positions + from) * s->x.size[1], y + (n * y_positions + p) * s->y.size[1], w);
      }
  float* result = target == &s->y ? y : target == &s->x ? x : w;
  write_tensor(v, target, result, target == &s->w && exchanged, s->alpha, s->beta);
  if (result != x) free(x);
  if (result != y) free(y);
  if (result != w) free(w);
}

// ---- pointwise operations, with operands of size 1 along some axes
static float operated(const Step* s, float a, float b) {
  switch (s->mode) {
    case MODE_ADD: return a + b;
    case MODE_SUB: return a - b;
    case MODE_MUL: return a * b;
    case MODE_DIV: return a / b;
    case MODE_MIN: return a < b ? a : b;
    case MODE_MAX: return a > b ? a : b;
    case MODE_RELU: return a < (float)s->lower ? (float)s->lower : a > (float)s->upper ? (float)s->upper : a;
    default: return a;  // MODE_IDENTITY; others were refused
  }
}
static int64_t place_of_broadcast(const Tensor* small, const Tensor* large, int64_t n, int64_t position, int64_t c) {
  int64_t at = 0, scale = 1, channels = small->size[1];
  for (int i = large->rank - 1; i >= 2; i--) {
    at += (small->size[i] == 1 ? 0 : position % large->size[i]) * scale;
    scale *= small->size[i];
    position /= large->size[i];
  }
  return ((small->size[0] == 1 ? 0 : n) * positions_of(small) + at) * channels + (channels == 1 ? 0 : c);
}
static void run_pointwise(Virtuals* v, const Step* s) {
  const Tensor* y = &s->y;
  int64_t positions = positions_of(y), channels = y->size[1];
  float *a = read_tensor(v, &s->x, false), *b = s->has_second ? read_tensor(v, &s->w, false) : NULL;
  float* out = malloc(sizeof(float) * (size_t)count_of(y));
  for (int64_t n = 0; n < y->size[0]; n++)
    for (int64_t p = 0; p < positions; p++)
      for (int64_t c = 0; c < channels; c++) {
        float left = (float)s->alpha * a[place_of_broadcast(&s->x, y, n, p, c)];
        float right = b ? (float)s->beta * b[place_of_broadcast(&s->w, y, n, p, c)] : 0;
        out[(n * positions + p) * channels + c] = operated(s, left, right);
      }
  write_tensor(v, y, out, false, 1, 0);
  free(a);
  free(b);
}

void run_chain(Work* work) {
  Chain* chain = (Chain*)work;
  Virtuals v = {0};
  if (chain->is_slow) usleep(20000);
  for (int i = 0; i < chain->count; i++) {
    if (chain->steps[i].is_pointwise) run_pointwise(&v, &chain->steps[i]);
    else run_convolution(&v, &chain->steps[i]);
  }
  for (int i = 0; i < v.count; i++) free(v.kept[i].values);
}
