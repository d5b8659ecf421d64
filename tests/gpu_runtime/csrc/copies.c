// Copies and fills.
#include "stand_in.h"

typedef struct {
  Work work;
  uintptr_t destination, source;
  size_t bytes;
  void* staged;  // a copy of pageable memory, as it was when the call was made
} CopyWork;

static void run_copy(Work* work) {
  CopyWork* c = (CopyWork*)work;
  memmove((void*)c->destination, c->staged ? c->staged : (void*)c->source, c->bytes);
}
static void clear_copy(Work* work) { free(((CopyWork*)work)->staged); }

Work* copy_work(uintptr_t destination, uintptr_t source, size_t bytes) {
  CopyWork* c = new_work(sizeof *c, "COPY", run_copy, clear_copy);
  c->destination = destination;
  c->source = source;
  c->bytes = bytes;
  pthread_mutex_lock(&device_lock);
  Kind from = kind_of(source), to = kind_of(destination);
  pthread_mutex_unlock(&device_lock);
  c->work.host_copy = from != DEVICE || to != DEVICE;
  Text text = {0};
  text_add(&text, "dst=0x%lx src=0x%lx n=%zu kinds=%d%d", destination, source, bytes, from, to);
  c->work.text = text.at;
  return &c->work;
}

// The driver stages pageable memory: a copy from it has read its source when the call returns, a copy to it has ended.
static CUresult copy(uintptr_t destination, uintptr_t source, size_t bytes, CUstream handle, bool wait) {
  if (!bytes) return CUDA_SUCCESS;
  CUstream stream = stream_of(handle);
  pthread_mutex_lock(&device_lock);
  Kind from = kind_of(source), to = kind_of(destination);
  pthread_mutex_unlock(&device_lock);
  CopyWork* c = (CopyWork*)copy_work(destination, source, bytes);
  if (from == PAGEABLE && to != PAGEABLE) {
    c->staged = malloc(bytes);
    memcpy(c->staged, (void*)source, bytes);
  }
  bool submitted = submit(stream, &c->work);
  if (submitted && (wait || to == PAGEABLE)) {
    pthread_mutex_lock(&device_lock);
    wait_for_stream(stream);
    pthread_mutex_unlock(&device_lock);
  }
  return CUDA_SUCCESS;
}

#define COPY(name, Destination, Source, wait)                                                 \
  EXPORT CUresult name(Destination destination, Source source, size_t bytes) {                \
    CALLED;                                                                                   \
    return copy((uintptr_t)destination, (uintptr_t)source, bytes, NULL, wait);                \
  }
#define COPY_ASYNC(name, Destination, Source)                                                 \
  EXPORT CUresult name(Destination destination, Source source, size_t bytes, CUstream stream) { \
    CALLED;                                                                                   \
    return copy((uintptr_t)destination, (uintptr_t)source, bytes, stream, false);             \
  }
COPY(cuMemcpyHtoD_v2, CUdeviceptr, const void*, true)
COPY(cuMemcpyDtoH_v2, void*, CUdeviceptr, true)
COPY(cuMemcpyDtoD_v2, CUdeviceptr, CUdeviceptr, false)
COPY(cuMemcpy, CUdeviceptr, CUdeviceptr, true)
COPY_ASYNC(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void*)
COPY_ASYNC(cuMemcpyDtoHAsync_v2, void*, CUdeviceptr)
COPY_ASYNC(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr)
COPY_ASYNC(cuMemcpyAsync, CUdeviceptr, CUdeviceptr)

typedef struct {
  Work work;
  CUdeviceptr destination;
  uint32_t value;
  int width;
  size_t count;
} SetWork;

static void run_set(Work* work) {
  SetWork* s = (SetWork*)work;
  if (s->width == 1) memset((void*)s->destination, (int)s->value, s->count);
  for (size_t i = 0; s->width == 2 && i < s->count; i++) ((uint16_t*)s->destination)[i] = (uint16_t)s->value;
  for (size_t i = 0; s->width == 4 && i < s->count; i++) ((uint32_t*)s->destination)[i] = s->value;
}

Work* set_work(CUdeviceptr destination, uint32_t value, int width, size_t count) {
  SetWork* s = new_work(sizeof *s, "SET", run_set, NULL);
  s->destination = destination;
  s->value = value;
  s->width = width;
  s->count = count;
  Text text = {0};
  text_add(&text, "dst=0x%lx n=%zu", destination, count * (size_t)width);
  s->work.text = text.at;
  return &s->work;
}

static CUresult set(CUdeviceptr destination, uint32_t value, int width, size_t count, CUstream stream) {
  submit(stream_of(stream), set_work(destination, value, width, count));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr destination, unsigned char value, size_t count, CUstream stream) {
  CALLED;
  return set(destination, value, 1, count, stream);
}
EXPORT CUresult cuMemsetD16Async(CUdeviceptr destination, unsigned short value, size_t count, CUstream stream) {
  CALLED;
  return set(destination, value, 2, count, stream);
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr destination, unsigned value, size_t count, CUstream stream) {
  CALLED;
  return set(destination, value, 4, count, stream);
}
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr destination, unsigned char value, size_t count) {
  CALLED;
  return set(destination, value, 1, count, NULL);
}
EXPORT CUresult cuMemsetD32_v2(CUdeviceptr destination, unsigned value, size_t count) {
  CALLED;
  return set(destination, value, 4, count, NULL);
}
