// The device and its context, as far as they are asked about.
#include "stand_in.h"

char the_context;
#define CONTEXT ((CUcontext) & the_context)
static const int DRIVER_VERSION = 12090;  // CUDA 12.9, the release of the assembler that the extra gpu-aot brings

static __thread CUcontext current, stacked[64];
static __thread int stack_height;

EXPORT CUresult cuInit(UNUSED unsigned flags) {
  CALLED;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDriverGetVersion(int* out) {
  CALLED;
  *out = DRIVER_VERSION;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* out) {
  CALLED;
  *out = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* out, int ordinal) {
  CALLED;
  *out = ordinal;
  return ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* out, int room, UNUSED CUdevice device) {
  CALLED;
  snprintf(out, (size_t)room, "%s", options()->card->name);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t* out, UNUSED CUdevice device) {
  CALLED;
  *out = options()->device_bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid_v2(void* out, UNUSED CUdevice device) {
  CALLED;
  memset(out, 7, 16);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetPCIBusId(char* out, int room, UNUSED CUdevice device) {
  CALLED;
  snprintf(out, (size_t)room, "0000:00:1e.0");
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceCanAccessPeer(int* out, CUdevice a, CUdevice b) {
  CALLED;
  *out = a == b;
  return CUDA_SUCCESS;
}

static int attribute(int which) {
  const Card* c = options()->card;
  switch (which) {
    case COMPUTE_CAPABILITY_MAJOR: return c->major;
    case COMPUTE_CAPABILITY_MINOR: return c->minor;
    case MULTIPROCESSOR_COUNT: return c->cores;
    case MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return c->shared_block;
    case MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return c->shared_core;
    case RESERVED_SHARED_MEMORY_PER_BLOCK: return c->shared_core - c->shared_block;
    case L2_CACHE_SIZE: return c->l2_bytes;
    case CLOCK_RATE: return c->clock_khz;
    case MEMORY_CLOCK_RATE: return c->memory_khz;
    case GLOBAL_MEMORY_BUS_WIDTH: return c->bus_bits;
    case MAX_THREADS_PER_BLOCK:
    case MAX_BLOCK_DIM_X:
    case MAX_BLOCK_DIM_Y: return 1024;
    case MAX_BLOCK_DIM_Z: return 64;
    case MAX_GRID_DIM_X: return 2147483647;
    case MAX_GRID_DIM_Y:
    case MAX_GRID_DIM_Z: return 65535;
    case MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case TOTAL_CONSTANT_MEMORY:
    case MAX_REGISTERS_PER_BLOCK:
    case MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case WARP_SIZE:
    case MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case ASYNC_ENGINE_COUNT: return 3;
    case CONCURRENT_KERNELS:
    case UNIFIED_ADDRESSING:
    case CAN_MAP_HOST_MEMORY:
    case GPU_OVERLAP:
    case COOPERATIVE_LAUNCH:
    case STREAM_PRIORITIES_SUPPORTED:
    case VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: return 1;
    default: return 0;  // features that this device does not have
  }
}
EXPORT CUresult cuDeviceGetAttribute(int* out, int which, UNUSED CUdevice device) {
  CALLED;
  *out = attribute(which);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(UNUSED CUdevice device, UNUSED unsigned flags) {
  CALLED;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* out, UNUSED CUdevice device) {
  CALLED;
  *out = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(UNUSED CUdevice device) {
  CALLED;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(UNUSED CUdevice device, unsigned* flags, int* active) {
  CALLED;
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* out) {
  CALLED;
  *out = current;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  CALLED;
  current = context;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  CALLED;
  stacked[stack_height++ % 64] = current;
  current = context;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* out) {
  CALLED;
  if (!stack_height) return CUDA_ERROR_INVALID_VALUE;
  if (out) *out = current;
  current = stacked[--stack_height % 64];
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice* out) {
  CALLED;
  *out = 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  CALLED;
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxEnablePeerAccess(UNUSED CUcontext context, UNUSED unsigned flags) {
  CALLED;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetApiVersion(UNUSED CUcontext context, unsigned* out) {
  CALLED;
  *out = (unsigned)DRIVER_VERSION;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGraphMemTrim(UNUSED CUdevice device) {
  CALLED;
  return CUDA_SUCCESS;
}

static const char* error_name(CUresult error) {
  switch (error) {
    case CUDA_SUCCESS: return "CUDA_SUCCESS";
    case CUDA_ERROR_INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case CUDA_ERROR_OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case CUDA_ERROR_NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case CUDA_ERROR_NOT_READY: return "CUDA_ERROR_NOT_READY";
    case CUDA_ERROR_NOT_SUPPORTED: return "CUDA_ERROR_NOT_SUPPORTED";
    default: return "CUDA_ERROR";
  }
}
EXPORT CUresult cuGetErrorName(CUresult error, const char** out) {
  CALLED;
  *out = error_name(error);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char** out) {
  CALLED;
  const char* refused = last_refusal();
  *out = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : error && refused ? refused : error_name(error);
  return CUDA_SUCCESS;
}
