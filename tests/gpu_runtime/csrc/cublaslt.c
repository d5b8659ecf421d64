// cuBLASLt: descriptors that keep their attributes, one algorithm, one product.
#include "matrices.h"

typedef struct {
  uint64_t value[64];  // by the attribute's number, as bytes
} Descriptor;
enum { INVALID_VALUE = 7, NOT_SUPPORTED = 15 };

// Attributes of a product and of a matrix's layout.
enum { COMPUTE = 0, SCALE_TYPE = 1, POINTER_MODE = 2, TRANSPOSE_A = 3, TRANSPOSE_B = 4, EPILOGUE = 7, BIAS = 8, AUX = 11, AUX_LEADING = 12, AUX_STRIDE = 13, BIAS_TYPE = 26 };
enum { TYPE = 0, ORDER = 1, ROWS = 2, COLUMNS = 3, LEADING = 4, COUNT = 5, STRIDE = 6 };
enum { ORDER_ROW = 1 };
enum { EPILOGUE_DEFAULT = 1, EPILOGUE_RELU = 2, EPILOGUE_BIAS = 4, EPILOGUE_GELU = 32, EPILOGUE_AUX = 128 };

static int get(const Descriptor* d, int which, void* out, size_t bytes, size_t* written) {
  if (which < 0 || which >= 64 || bytes > 8) return INVALID_VALUE;
  memcpy(out, &d->value[which], bytes);
  if (written) *written = bytes;
  return 0;
}
static int set(Descriptor* d, int which, const void* value, size_t bytes) {
  if (which < 0 || which >= 64 || bytes > 8) return INVALID_VALUE;
  d->value[which] = 0;
  memcpy(&d->value[which], value, bytes);
  return 0;
}
#define DESCRIPTOR(Name)                                                                                     \
  EXPORT int cublasLt##Name##Destroy(Descriptor* d) {                                                        \
    CALLED;                                                                                                  \
    free(d);                                                                                                 \
    return 0;                                                                                                \
  }                                                                                                          \
  EXPORT int cublasLt##Name##SetAttribute(Descriptor* d, int which, const void* value, size_t bytes) {       \
    CALLED;                                                                                                  \
    return set(d, which, value, bytes);                                                                      \
  }                                                                                                          \
  EXPORT int cublasLt##Name##GetAttribute(const Descriptor* d, int which, void* out, size_t bytes, size_t* written) { \
    CALLED;                                                                                                  \
    return get(d, which, out, bytes, written);                                                               \
  }
DESCRIPTOR(MatmulDesc)
DESCRIPTOR(MatrixLayout)
DESCRIPTOR(MatmulPreference)

typedef struct {
  int nothing;
} Handle;
HANDLE(cublasLt, )

EXPORT int cublasLtMatmulDescCreate(Descriptor** out, int compute, int scale_type) {
  CALLED;
  *out = calloc(1, sizeof **out);
  (*out)->value[COMPUTE] = (uint64_t)compute;
  (*out)->value[SCALE_TYPE] = (uint64_t)scale_type;
  (*out)->value[EPILOGUE] = EPILOGUE_DEFAULT;
  (*out)->value[BIAS_TYPE] = (uint32_t)-1;  // the result's
  return 0;
}
EXPORT int cublasLtMatrixLayoutCreate(Descriptor** out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  CALLED;
  *out = calloc(1, sizeof **out);
  **out = (Descriptor){{[TYPE] = (uint64_t)type, [ROWS] = rows, [COLUMNS] = columns, [LEADING] = (uint64_t)leading, [COUNT] = 1}};
  return 0;
}
EXPORT int cublasLtMatmulPreferenceCreate(Descriptor** out) {
  CALLED;
  *out = calloc(1, sizeof **out);
  return 0;
}
typedef struct {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
} Heuristic;
EXPORT int cublasLtMatmulAlgoGetHeuristic(UNUSED void* handle, UNUSED Descriptor* product, UNUSED Descriptor* a, UNUSED Descriptor* b,
                                          UNUSED Descriptor* c, UNUSED Descriptor* d, UNUSED Descriptor* preference, int wanted,
                                          Heuristic* out, int* count) {
  CALLED;
  *count = wanted > 0;
  if (*count) *out = (Heuristic){.algorithm = {1}, .waves = 1};
  return 0;
}

static Matrix matrix(const Descriptor* d, const void* at, bool transposed) {
  int64_t leading = (int64_t)d->value[LEADING], stride = (int64_t)d->value[STRIDE];
  bool by_rows = ((int32_t)d->value[ORDER] == ORDER_ROW) != transposed;
  return by_rows ? (Matrix){at, (int)d->value[TYPE], leading, 1, stride} : (Matrix){at, (int)d->value[TYPE], 1, leading, stride};
}
static int64_t extent_bytes(const Descriptor* d) {
  int64_t leading = (int64_t)d->value[LEADING], batches = (int32_t)d->value[COUNT];
  bool by_rows = (int32_t)d->value[ORDER] == ORDER_ROW;
  int64_t outer = (int64_t)d->value[by_rows ? ROWS : COLUMNS], inner = (int64_t)d->value[by_rows ? COLUMNS : ROWS];
  return ((batches - 1) * (int64_t)d->value[STRIDE] + (outer - 1) * leading + inner) * type_bytes((int)d->value[TYPE]);
}

EXPORT int cublasLtMatmul(UNUSED void* handle, const Descriptor* product, const void* alpha, const void* a, const Descriptor* ad,
                          const void* b, const Descriptor* bd, const void* beta, const void* c, const Descriptor* cd, void* out,
                          const Descriptor* dd, UNUSED const void* algorithm, void* workspace, size_t workspace_bytes, CUstream stream) {
  CALLED;
  const Descriptor* all[] = {ad, bd, cd, dd};
  for (int i = 0; i < 4; i++)
    if (!is_known_type((int)all[i]->value[TYPE]) || all[i]->value[ORDER] > ORDER_ROW)
      return refuse(NOT_SUPPORTED, "cublasLtMatmul of type %d, order %d", (int)all[i]->value[TYPE], (int)all[i]->value[ORDER]);
  uint32_t epilogue = (uint32_t)product->value[EPILOGUE];
  uint32_t known = EPILOGUE_DEFAULT | EPILOGUE_RELU | EPILOGUE_BIAS | EPILOGUE_GELU | EPILOGUE_AUX;
  bool relu_mask = epilogue & EPILOGUE_AUX && !(epilogue & EPILOGUE_GELU);  // a bit per element, for relu
  if (epilogue & ~known || relu_mask) return refuse(NOT_SUPPORTED, "cublasLtMatmul with epilogue %u", epilogue);
  if (product->value[POINTER_MODE]) return refuse(NOT_SUPPORTED, "cublasLtMatmul with pointer mode %d", (int)product->value[POINTER_MODE]);
  bool doubles = (int)product->value[SCALE_TYPE] == CUDA_R_64F;
  if (!doubles && (int)product->value[SCALE_TYPE] != CUDA_R_32F)
    return refuse(NOT_SUPPORTED, "cublasLtMatmul with scalars of type %d", (int)product->value[SCALE_TYPE]);
  Product* p = new_work(sizeof *p, "LIBCALL", run_product, NULL);
  bool ta = product->value[TRANSPOSE_A], tb = product->value[TRANSPOSE_B];
  p->a = matrix(ad, a, ta);
  p->b = matrix(bd, b, tb);
  p->c = matrix(cd, c, false);
  p->d = matrix(dd, out, false);
  p->rows = (int64_t)dd->value[ROWS];
  p->columns = (int64_t)dd->value[COLUMNS];
  p->depth = (int64_t)ad->value[ta ? ROWS : COLUMNS];
  p->batches = (int32_t)dd->value[COUNT];
  p->alpha = doubles ? *(const double*)alpha : (double)*(const float*)alpha;
  p->beta = doubles ? *(const double*)beta : (double)*(const float*)beta;
  p->relu = epilogue & EPILOGUE_RELU;
  p->gelu = epilogue & EPILOGUE_GELU;
  if (epilogue & EPILOGUE_AUX)
    p->before = (Matrix){(const char*)product->value[AUX], p->d.type, 1, (int64_t)product->value[AUX_LEADING], (int64_t)product->value[AUX_STRIDE]};
  p->bias = epilogue & EPILOGUE_BIAS ? (const char*)product->value[BIAS] : NULL;
  p->bias_type = (int32_t)product->value[BIAS_TYPE] < 0 ? p->d.type : (int)product->value[BIAS_TYPE];

  const void* pointers[7];
  int64_t bytes[7];
  char access[8] = {0};
  int count = 0;
#define RANGE(how, at, size) (pointers[count] = (at), bytes[count] = (size), access[count++] = (how))
  RANGE('r', a, extent_bytes(ad));
  RANGE('r', b, extent_bytes(bd));
  if (p->beta != 0) RANGE('r', c, extent_bytes(cd));
  if (p->bias) RANGE('r', p->bias, p->rows * type_bytes(p->bias_type));
  RANGE('w', out, extent_bytes(dd));
  if (p->before.at) {
    int64_t last = (p->batches - 1) * p->before.batch + (p->columns - 1) * p->before.column + p->rows;
    RANGE('w', p->before.at, last * type_bytes(p->before.type));
  }
  if (workspace_bytes) RANGE('w', workspace, (int64_t)workspace_bytes);
  return library_call(stream, &p->work, "cublasLtMatmul", count, pointers, bytes, access);
}
