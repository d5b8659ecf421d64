// cuBLAS: products of matrices, one or many at a stride.
#include "matrices.h"

typedef struct {
  CUstream stream;
  void* workspace;
  size_t workspace_bytes;
  int pointer_mode, math_mode, atomics_mode;
} Handle;
enum { NOT_SUPPORTED = 15 };

EXPORT const char* cublasGetStatusString(int status) { return status_text(status); }
EXPORT const char* cublasLtGetStatusString(int status) { return status_text(status); }
HANDLE_WITH_STREAM(cublas, _v2)

EXPORT int cublasSetWorkspace_v2(Handle* h, void* workspace, size_t bytes) {
  CALLED;
  h->workspace = workspace;
  h->workspace_bytes = bytes;
  return 0;
}
#define MODE(Name, field)                           \
  EXPORT int cublasSet##Name(Handle* h, int mode) { \
    CALLED;                                         \
    h->field = mode;                                \
    return 0;                                       \
  }                                                 \
  EXPORT int cublasGet##Name(Handle* h, int* out) { \
    CALLED;                                         \
    *out = h->field;                                \
    return 0;                                       \
  }
MODE(PointerMode_v2, pointer_mode)
MODE(MathMode, math_mode)
MODE(AtomicsMode, atomics_mode)

// A matrix in columns of `leading` elements, transposed or not.
static Matrix matrix(const void* at, int type, int transposed, int64_t leading, int64_t stride) {
  return transposed ? (Matrix){at, type, leading, 1, stride} : (Matrix){at, type, 1, leading, stride};
}

typedef struct {
  const char* name;
  int ta, tb;
  int64_t m, n, k, count;
  const void *alpha, *beta;
  bool double_scalars;
} Shape;

static int gemm(Handle* h, const Shape* s, Matrix a, Matrix b, Matrix c) {
  bool known = is_known_type(a.type) && is_known_type(b.type) && is_known_type(c.type);
  if (h->pointer_mode) return refuse(NOT_SUPPORTED, "%s with scalars on the device", s->name);
  if (!known) return refuse(NOT_SUPPORTED, "%s of types %d, %d, %d", s->name, a.type, b.type, c.type);
  Product* p = new_work(sizeof *p, "LIBCALL", run_product, NULL);
  p->a = a;
  p->b = b;
  p->c = p->d = c;
  p->rows = s->m;
  p->columns = s->n;
  p->depth = s->k;
  p->batches = s->count;
  p->alpha = s->double_scalars ? *(const double*)s->alpha : (double)*(const float*)s->alpha;
  p->beta = s->double_scalars ? *(const double*)s->beta : (double)*(const float*)s->beta;
  const void* pointers[] = {a.at, b.at, c.at, c.at, h->workspace};
#define EXTENT(x, rows, columns) ((((rows) - 1) * (x).row + ((columns) - 1) * (x).column + (s->count - 1) * (x).batch + 1) * type_bytes((x).type))
  int64_t bytes[] = {EXTENT(a, s->m, s->k), EXTENT(b, s->k, s->n), EXTENT(c, s->m, s->n), EXTENT(c, s->m, s->n), (int64_t)h->workspace_bytes};
  bool reads_c = p->beta != 0;
  int skip = reads_c ? 0 : 1;  // the third range is what c is read for
  if (skip) {
    pointers[2] = pointers[3], bytes[2] = bytes[3];
    pointers[3] = pointers[4], bytes[3] = bytes[4];
  }
  int count = (h->workspace ? 5 : 4) - skip;
  return library_call(h->stream, &p->work, s->name, count, pointers, bytes, reads_c ? "rrrww" : "rrww");
}

// 64: CUBLAS_COMPUTE_16F; 70: CUBLAS_COMPUTE_64F. Scalars have the type of the computation.
static bool known_compute(int compute) { return compute >= 66 && compute <= 77; }

EXPORT int cublasSgemm_v2(Handle* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int lda, const void* b, int ldb,
                          const void* beta, void* c, int ldc) {
  CALLED;
  Shape s = {"cublasSgemm", ta, tb, m, n, k, 1, alpha, beta, false};
  return gemm(h, &s, matrix(a, CUDA_R_32F, ta, lda, 0), matrix(b, CUDA_R_32F, tb, ldb, 0), matrix(c, CUDA_R_32F, 0, ldc, 0));
}
EXPORT int cublasDgemm_v2(Handle* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int lda, const void* b, int ldb,
                          const void* beta, void* c, int ldc) {
  CALLED;
  Shape s = {"cublasDgemm", ta, tb, m, n, k, 1, alpha, beta, true};
  return gemm(h, &s, matrix(a, CUDA_R_64F, ta, lda, 0), matrix(b, CUDA_R_64F, tb, ldb, 0), matrix(c, CUDA_R_64F, 0, ldc, 0));
}
EXPORT int cublasGemmEx(Handle* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at, int lda, const void* b,
                        int bt, int ldb, const void* beta, void* c, int ct, int ldc, int compute, UNUSED int algorithm) {
  CALLED;
  if (!known_compute(compute)) return refuse(NOT_SUPPORTED, "cublasGemmEx computing in type %d", compute);
  Shape s = {"cublasGemmEx", ta, tb, m, n, k, 1, alpha, beta, compute == 70};
  return gemm(h, &s, matrix(a, at, ta, lda, 0), matrix(b, bt, tb, ldb, 0), matrix(c, ct, 0, ldc, 0));
}
EXPORT int cublasSgemmStridedBatched(Handle* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int lda,
                                     long long sa, const void* b, int ldb, long long sb, const void* beta, void* c, int ldc,
                                     long long sc, int count) {
  CALLED;
  Shape s = {"cublasSgemmStridedBatched", ta, tb, m, n, k, count, alpha, beta, false};
  return gemm(h, &s, matrix(a, CUDA_R_32F, ta, lda, sa), matrix(b, CUDA_R_32F, tb, ldb, sb), matrix(c, CUDA_R_32F, 0, ldc, sc));
}
EXPORT int cublasGemmStridedBatchedEx(Handle* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at, int lda,
                                      long long sa, const void* b, int bt, int ldb, long long sb, const void* beta, void* c, int ct,
                                      int ldc, long long sc, int count, int compute, UNUSED int algorithm) {
  CALLED;
  if (!known_compute(compute)) return refuse(NOT_SUPPORTED, "cublasGemmStridedBatchedEx computing in type %d", compute);
  Shape s = {"cublasGemmStridedBatchedEx", ta, tb, m, n, k, count, alpha, beta, compute == 70};
  return gemm(h, &s, matrix(a, at, ta, lda, sa), matrix(b, bt, tb, ldb, sb), matrix(c, ct, 0, ldc, sc));
}
