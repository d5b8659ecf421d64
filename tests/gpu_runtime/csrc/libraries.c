// The small libraries beside the driver: CUDA's runtime, NVML, and the versions of the others. XLA asks little of them.
#include "stand_in.h"

// ---- CUDA's runtime: versions, errors, and the kernels that are compiled into the plugin, which are known by name only
#define ANSWER(name, value, ...)        \
  EXPORT int name(__VA_ARGS__) {        \
    CALLED;                             \
    return value;                       \
  }
#define TELL(name, number)              \
  EXPORT int name(int* out) {           \
    CALLED;                             \
    *out = number;                      \
    return 0;                           \
  }
#define TELL_OF(name, number)                  \
  EXPORT int name(UNUSED void* of, int* out) { \
    CALLED;                                    \
    *out = number;                             \
    return 0;                                  \
  }
TELL(cudaGetDeviceCount, 1)
TELL(cudaGetDevice, 0)
TELL(cudaRuntimeGetVersion, 12090)
TELL(cudaDriverGetVersion, 12090)
ANSWER(cudaSetDevice, 0, UNUSED int device)
ANSWER(cudaGetLastError, 0, void)
ANSWER(cudaPeekAtLastError, 0, void)
EXPORT const char* cudaGetErrorName(int error) { return error ? "cudaErrorNotSupported" : "cudaSuccess"; }
EXPORT const char* cudaGetErrorString(int error) { return status_text(error); }
EXPORT void** __cudaRegisterFatBinary(void* image) {
  CALLED;
  void** handle = malloc(sizeof *handle);
  *handle = image;
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(UNUSED void** handle) { CALLED; }
EXPORT void __cudaUnregisterFatBinary(void** handle) { free(handle); }
EXPORT void __cudaRegisterVar(void) { CALLED; }
EXPORT char __cudaInitModule(UNUSED void** handle) { return 1; }

// A kernel of the plugin has no PTX here: it can be asked for and launched, and the launch is refused by name.
typedef struct Registered {
  const void* host;
  Function function;
  struct Registered* next;
} Registered;
static Registered* registered;
static Module no_module = {.ptx = ""};

// XLA's autotuner launches one that holds the stream until all work to be timed is submitted. Here it does nothing.
static Module* module_of_a_delay(const char* name) {
  Module* module = calloc(1, sizeof *module);
  char* ptx = NULL;
  if (asprintf(&ptx, ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry %s()\n{\n\tret;\n}\n", name) < 0) abort();
  module->ptx = ptx;
  return module;
}

EXPORT void __cudaRegisterFunction(UNUSED void** handle, const char* host, UNUSED char* device, const char* name) {
  CALLED;
  Registered* r = calloc(1, sizeof *r);
  Module* module = strstr(name, "DelayKernel") ? module_of_a_delay(name) : &no_module;
  *r = (Registered){.host = host, .function = {.name = strdup(name), .module = module}, .next = registered};
  registered = r;
}
EXPORT int cudaGetFuncBySymbol(void** out, const void* symbol) {
  CALLED;
  for (Registered* r = registered; r; r = r->next)
    if (r->host == symbol) {
      *out = &r->function;
      return 0;
    }
  return 98;  // cudaErrorInvalidDeviceFunction
}
EXPORT int cudaFuncGetAttributes(void* out, UNUSED const void* function) {
  CALLED;
  memset(out, 0, 64);
  return 0;
}
ANSWER(cudaFuncSetAttribute, 0, UNUSED const void* function, UNUSED int which, UNUSED int value)

// ---- versions: those of CUDA 12.9
static int property(int which, int* out, int major, int minor, int patch) {
  *out = which == 0 ? major : which == 1 ? minor : patch;
  return 0;
}
#define PROPERTY(name, major, minor, patch) \
  EXPORT int name(int which, int* out) {    \
    CALLED;                                 \
    return property(which, out, major, minor, patch); \
  }
PROPERTY(cublasGetProperty, 12, 9, 1)
PROPERTY(cublasLtGetProperty, 12, 9, 1)
PROPERTY(cufftGetProperty, 11, 4, 1)
PROPERTY(cusolverGetProperty, 11, 7, 5)
PROPERTY(cusparseGetProperty, 12, 5, 10)
PROPERTY(cudnnGetProperty, 9, 11, 0)
TELL(cufftGetVersion, 11401)
TELL(cusolverGetVersion, 11705)
TELL(cuptiGetVersion, 28)
TELL(ncclGetVersion, 22703)
EXPORT size_t cublasLtGetVersion(void) { return 120901; }
EXPORT size_t cudnnGetVersion(void) { return 91100; }
EXPORT size_t cudnnGetMaxDeviceVersion(void) { return 91100; }
EXPORT size_t cudnnGetCudartVersion(void) { return 12090; }
TELL_OF(cublasGetVersion_v2, 120901)
TELL_OF(cusparseGetVersion, 12510)

// ---- NVML: the plugin wants to know the bus of the card
ANSWER(nvmlInit_v2, 0, void)
ANSWER(nvmlShutdown, 0, void)
EXPORT const char* nvmlErrorString(int error) { return status_text(error); }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(UNUSED const char* id, void** out) {
  CALLED;
  *out = &registered;
  return 0;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(UNUSED unsigned index, void** out) {
  CALLED;
  *out = &registered;
  return 0;
}
TELL(nvmlDeviceGetCount_v2, 1)
TELL_OF(nvmlDeviceGetCurrPcieLinkGeneration, options()->card->major - 4)  // V100: 3, A100: 4, H100: 5
TELL_OF(nvmlDeviceGetCurrPcieLinkWidth, 16)
EXPORT int nvmlSystemGetDriverVersion(char* out, unsigned room) {
  CALLED;
  snprintf(out, room, "575.57.08");
  return 0;
}
EXPORT int nvmlDeviceGetGpuFabricInfoV(UNUSED void* device, UNUSED void* out) {
  CALLED;
  return 0;
}
EXPORT int nvmlDeviceGetMigMode(UNUSED void* device, unsigned* now, unsigned* pending) {
  CALLED;
  *now = *pending = 0;
  return 0;
}
EXPORT int nvmlDeviceGetNvLinkState(UNUSED void* device, UNUSED unsigned link, unsigned* out) {
  CALLED;
  *out = 0;
  return 0;
}

// Every field is 0: no links between devices.
typedef struct {
  unsigned field, scope;
  long long time, latency;
  int type, status;
  uint64_t value;
} FieldValue;
EXPORT int nvmlDeviceGetFieldValues(UNUSED void* device, int count, FieldValue* values) {
  CALLED;
  for (int i = 0; i < count; i++) {
    values[i].type = 1;  // unsigned int
    values[i].status = 0;
    values[i].value = 0;
  }
  return 0;
}
