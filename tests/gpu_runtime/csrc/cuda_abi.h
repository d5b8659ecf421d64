// The types and numbers of CUDA's binary interface that XLA's calls really use: facts of the interface, declared anew.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
};

typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct Context* CUcontext;
typedef struct Stream* CUstream;
typedef struct Event* CUevent;
typedef struct Module* CUmodule;
typedef struct Function* CUfunction;
typedef struct Graph* CUgraph;
typedef struct Graph* CUgraphExec;
typedef struct Node* CUgraphNode;
typedef void (*CUhostFn)(void*);

#define CU_STREAM_LEGACY ((CUstream)1)
#define CU_STREAM_PER_THREAD ((CUstream)2)
enum { CU_STREAM_NON_BLOCKING = 1 };

// cuDeviceGetAttribute
enum {
  MAX_THREADS_PER_BLOCK = 1,
  MAX_BLOCK_DIM_X = 2,
  MAX_BLOCK_DIM_Y = 3,
  MAX_BLOCK_DIM_Z = 4,
  MAX_GRID_DIM_X = 5,
  MAX_GRID_DIM_Y = 6,
  MAX_GRID_DIM_Z = 7,
  MAX_SHARED_MEMORY_PER_BLOCK = 8,
  TOTAL_CONSTANT_MEMORY = 9,
  WARP_SIZE = 10,
  MAX_REGISTERS_PER_BLOCK = 12,
  CLOCK_RATE = 13,
  GPU_OVERLAP = 15,
  MULTIPROCESSOR_COUNT = 16,
  CAN_MAP_HOST_MEMORY = 19,
  CONCURRENT_KERNELS = 31,
  MEMORY_CLOCK_RATE = 36,
  GLOBAL_MEMORY_BUS_WIDTH = 37,
  L2_CACHE_SIZE = 38,
  MAX_THREADS_PER_MULTIPROCESSOR = 39,
  ASYNC_ENGINE_COUNT = 40,
  UNIFIED_ADDRESSING = 41,
  COMPUTE_CAPABILITY_MAJOR = 75,
  COMPUTE_CAPABILITY_MINOR = 76,
  STREAM_PRIORITIES_SUPPORTED = 78,
  MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
  MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
  CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
  COOPERATIVE_LAUNCH = 95,
  MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
  MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
  RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
};

// cuPointerGetAttribute
enum {
  POINTER_CONTEXT = 1,
  POINTER_MEMORY_TYPE = 2,
  POINTER_DEVICE_POINTER = 3,
  POINTER_IS_MANAGED = 8,
  POINTER_DEVICE_ORDINAL = 9,
  POINTER_RANGE_START = 11,
  POINTER_RANGE_SIZE = 12,
  POINTER_ALLOWED_HANDLE_TYPES = 14,
};
enum { MEMORY_TYPE_HOST = 1, MEMORY_TYPE_DEVICE = 2 };

// cuFuncGetAttribute
enum { FUNCTION_MAX_THREADS_PER_BLOCK = 0, FUNCTION_NUM_REGS = 4 };

// The list `extra` of a launch: pairs of a tag and a value.
#define LAUNCH_PARAM_END ((void*)0)
#define LAUNCH_PARAM_BUFFER_POINTER ((void*)1)

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  CUstream stream;
  void* attributes;
  unsigned attribute_count;
} CUlaunchConfig;

typedef struct {
  CUfunction function;
  unsigned grid[3], block[3], shared_bytes;
  void** params;
  void** extra;
  void* kernel;
  CUcontext context;
} KernelNodeParams;

typedef struct {
  size_t x_bytes, y, z, lod;
  int memory_type;
  void* host;
  CUdeviceptr device;
  void* array;
  void* reserved;
  size_t pitch, height;
} Copy3DSide;
typedef struct {
  Copy3DSide source, destination;
  size_t width_bytes, height, depth;
} Copy3D;

typedef struct {
  CUdeviceptr destination;
  size_t pitch;
  unsigned value, element_bytes;
  size_t width, height;
  CUcontext context;
} MemsetNodeParams;

enum {
  NODE_KERNEL = 0,
  NODE_MEMCPY = 1,
  NODE_MEMSET = 2,
  NODE_GRAPH = 4,
  NODE_EMPTY = 5,
};
typedef struct {
  int type, reserved0[3];
  union {
    long long reserved1[29];
    KernelNodeParams kernel;
    struct {
      int flags, reserved;
      CUcontext context;
      Copy3D copy;
    } memcpy;
    MemsetNodeParams memset;
    CUgraph child;
  };
  long long reserved2;
} CUgraphNodeParams;

// Types of elements: cuBLAS's cudaDataType, and cuDNN's cudnnDataType_t below.
enum { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_8I = 3, CUDA_R_32I = 10, CUDA_R_16BF = 14 };
