// Launches of kernels, and calls into libraries, which are logged alike.
#include <time.h>

#include "ptx.h"

typedef struct {
  Work work;
  Function* function;
  unsigned grid[3], block[3], shared_bytes;
  char* parameters;  // packed
} KernelWork;

static uint64_t kernels_run;
static double kernels_s;  // of the device's thread, on a core

static double core_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run_kernel(Work* work) {
  KernelWork* k = (KernelWork*)work;
  running_kernel = k->function->name;
  double start_s = core_s();
  Touched* touched = run_grid(k->function->program, k->grid, k->block, k->shared_bytes, k->parameters);
  char* ranges = end_touched(touched);
  log_line("TOUCH q%lu%s", running_operation, ranges);
  free(ranges);
  running_kernel = NULL;
  kernels_run++;
  kernels_s += core_s() - start_s;
}
static void clear_kernel(Work* work) { free(((KernelWork*)work)->parameters); }

void log_kernels_and_end(void) {
  extern size_t peak_bytes(Kind);
  log_line("END device_peak=%zu host_peak=%zu kernels=%lu instructions=%lu seconds=%.3f", peak_bytes(DEVICE), peak_bytes(PINNED),
           kernels_run, instructions_run, kernels_s);
}

// Arguments come as pointers to values, or packed in a buffer that the list `extra` names.
static const char* argument(const Launch* l, int i) {
  for (void** e = l->extra; e && e[0] != LAUNCH_PARAM_END; e += 2)
    if (e[0] == LAUNCH_PARAM_BUFFER_POINTER) return (const char*)e[1] + l->function->parameters[i].offset;
  return l->params[i];
}

static void describe(Text* text, const Launch* l) {
  Function* f = l->function;
  text_add(text, "M%d %s grid=%u,%u,%u block=%u,%u,%u smem=%u args:", f->module->id, f->name, l->grid[0], l->grid[1], l->grid[2],
           l->block[0], l->block[1], l->block[2], l->shared_bytes);
  for (int i = 0; i < f->parameter_count; i++) {
    const char* value = argument(l, i);
    int bytes = f->parameters[i].bytes;
    uint64_t number = 0;
    if (bytes <= 8) memcpy(&number, value, (size_t)bytes);
    if (bytes == 8) text_add(text, " 0x%lx", number);
    else if (bytes == 4) text_add(text, " i%lu", number);
    else {
      text_add(text, " b%d:", bytes);
      for (int k = 0; k < bytes; k++) text_add(text, "%02x", (uint8_t)value[k]);
    }
  }
}

// The program of a function is decoded once, at its first launch. A refusal is said once and holds for all launches.
static CUresult prepare(Function* f) {
  static pthread_mutex_t decoding = PTHREAD_MUTEX_INITIALIZER;
  char error[400] = "";
  pthread_mutex_lock(&decoding);
  if (!f->program) f->program = decode(f->module, f, error, sizeof error);
  pthread_mutex_unlock(&decoding);
  return f->program ? CUDA_SUCCESS : refuse(CUDA_ERROR_NOT_SUPPORTED, "kernel %s: %s", f->name, error);
}

CUresult kernel_work(const Launch* l, Work** out) {
  Function* f = l->function;
  CUresult status = options()->execute ? prepare(f) : CUDA_SUCCESS;
  if (status) return status;
  KernelWork* k = new_work(sizeof *k, "KERNEL", options()->execute ? run_kernel : NULL, clear_kernel);
  k->function = f;
  memcpy(k->grid, l->grid, sizeof k->grid);
  memcpy(k->block, l->block, sizeof k->block);
  k->shared_bytes = l->shared_bytes;
  Parameter* last = f->parameter_count ? &f->parameters[f->parameter_count - 1] : NULL;
  k->parameters = calloc(1, last ? (size_t)(last->offset + last->bytes) : 1);
  for (int i = 0; i < f->parameter_count; i++)
    memcpy(k->parameters + f->parameters[i].offset, argument(l, i), (size_t)f->parameters[i].bytes);
  Text text = {0};
  describe(&text, l);
  k->work.text = text.at;
  *out = &k->work;
  return CUDA_SUCCESS;
}

static CUresult launch(const Launch* l, CUstream stream) {
  Work* work = NULL;
  CUresult status = kernel_work(l, &work);
  if (!status) submit(stream_of(stream), work);
  return status;
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared_bytes, CUstream stream, void** params, void** extra) {
  CALLED;
  Launch l = {(Function*)function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared_bytes, params, extra};
  return launch(&l, stream);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** params, void** extra) {
  CALLED;
  Launch l = {(Function*)function, c->grid, c->block, c->shared_bytes, params, extra};
  return launch(&l, c->stream);
}

CUresult library_call(CUstream stream, Work* work, const char* name, int count, const void* const* pointers, const int64_t* bytes,
                      const char* access) {
  Text text = {0};
  text_add(&text, "%s args:", name);
  for (int i = 0; i < count; i++) text_add(&text, " %c:0x%lx+%ld", access[i], (uintptr_t)pointers[i], bytes[i]);
  work->text = text.at;
  if (!options()->execute) work->run = NULL;
  submit(stream_of(stream), work);
  return CUDA_SUCCESS;
}
