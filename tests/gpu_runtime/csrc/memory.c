// Device memory, pinned host memory, and the limits of both. Fresh memory reads as NaN; freed memory is unmapped and its
// addresses never come back, so that whoever touches it faults and is named.
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stand_in.h"

enum { PAGE = 4096 };
static const size_t GRANULE = 2 << 20;        // of the driver's own allocations: what its virtual memory calls ask for
static const size_t CONTEXT_BYTES = 300 << 20;  // about what a CUDA context takes of a card

typedef struct Block {
  uintptr_t start;
  size_t bytes, counted;  // counted: against the limit of its kind
  Kind kind;
  struct Block* next;
} Block;
static Block* blocks;
static size_t in_use[4], peak[4];  // by kind

// Where addresses are taken from. Far from what the kernel and the C library use, and apart, so that a report can tell them.
static uintptr_t next_address[] = {[DEVICE] = 0x200000000000, [PINNED] = 0x300000000000};
static const uintptr_t LAST_ADDRESS = 0x400000000000;

static size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

static size_t limit_of(Kind kind) { return kind == DEVICE ? options()->device_bytes - CONTEXT_BYTES : options()->host_bytes; }

// ---- fresh memory reads as NaN: private mappings of one file of bytes 0xff, which take no memory until they are written
static const size_t POISON_BYTES = 16 << 20;

static int poison_file(void) {
  static int file = -1;
  if (file >= 0) return file;
  file = memfd_create("stand-in poison", MFD_CLOEXEC);
  void* at = file < 0 || ftruncate(file, (off_t)POISON_BYTES)
                 ? MAP_FAILED
                 : mmap(NULL, POISON_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) {
    perror("stand-in: memory for poison");
    exit(70);
  }
  memset(at, 0xff, POISON_BYTES);
  munmap(at, POISON_BYTES);
  return file;
}

static bool map_poison(uintptr_t start, size_t bytes, int protection) {
  for (size_t done = 0; done < bytes; done += POISON_BYTES) {
    size_t piece = bytes - done < POISON_BYTES ? bytes - done : POISON_BYTES;
    void* at = mmap((void*)(start + done), piece, protection, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, poison_file(), 0);
    if (at == MAP_FAILED) return false;
  }
  return true;
}

// ---- blocks; the lock is held
static Block* find(uintptr_t address) {
  for (Block* b = blocks; b; b = b->next)
    if (address >= b->start && address < b->start + b->bytes) return b;
  return NULL;
}

Kind kind_of(uintptr_t address) {
  Block* b = find(address);
  return b ? b->kind : PAGEABLE;
}

static bool charge(Kind kind, size_t bytes) {
  if (kind != REGISTERED && in_use[kind] + bytes > limit_of(kind)) {
    log_line("OOM %s %zu", kind == DEVICE ? "device" : "host", bytes);
    return false;
  }
  in_use[kind] += bytes;
  if (in_use[kind] > peak[kind]) peak[kind] = in_use[kind];
  return true;
}

static void track(uintptr_t start, size_t bytes, size_t counted, Kind kind) {
  Block* b = malloc(sizeof *b);
  *b = (Block){start, bytes, counted, kind, blocks};
  blocks = b;
  static const char* const words[] = {[DEVICE] = "ALLOC", [PINNED] = "HOSTALLOC", [REGISTERED] = "HOSTREGISTER"};
  log_line("%s 0x%lx %zu", words[kind], start, bytes);
}

static bool untrack(uintptr_t start, Kind kind, Block* out) {
  for (Block** link = &blocks; *link; link = &(*link)->next) {
    Block* b = *link;
    if (b->start != start || b->kind != kind) continue;
    *link = b->next;
    *out = *b;
    in_use[kind] -= b->counted;
    free(b);
    static const char* const words[] = {[DEVICE] = "FREE", [PINNED] = "HOSTFREE", [REGISTERED] = "HOSTUNREGISTER"};
    log_line("%s 0x%lx %zu", words[kind], start, out->bytes);
    return true;
  }
  return false;
}

static uintptr_t take_addresses(Kind kind, size_t bytes, size_t alignment) {
  uintptr_t start = rounded(next_address[kind], alignment);
  next_address[kind] = start + rounded(bytes, PAGE) + PAGE;  // a page between blocks, so that running over one faults
  return start;
}

static CUresult allocate(uintptr_t* out, size_t bytes, Kind kind, size_t granule) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  size_t mapped = rounded(bytes, PAGE), counted = rounded(bytes, granule);
  pthread_mutex_lock(&device_lock);
  bool fits = charge(kind, counted);
  if (fits) {
    *out = take_addresses(kind, mapped, granule < PAGE ? PAGE : granule);
    fits = map_poison(*out, mapped, PROT_READ | PROT_WRITE);
    if (fits) track(*out, mapped, counted, kind);
  }
  pthread_mutex_unlock(&device_lock);
  return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult release(uintptr_t start, Kind kind) {
  Block block;
  pthread_mutex_lock(&device_lock);
  bool known = untrack(start, kind, &block);
  pthread_mutex_unlock(&device_lock);
  if (!known) return CUDA_ERROR_INVALID_VALUE;
  if (kind != REGISTERED) munmap((void*)start, block.bytes);
  return CUDA_SUCCESS;
}

CUresult device_allocate(CUdeviceptr* out, size_t bytes) {
  return allocate(out, bytes, DEVICE, bytes >= 1 << 20 ? GRANULE : 512);  // 512: cuMemAlloc's alignment of small blocks
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
  CALLED;
  return device_allocate(out, bytes);
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr start) {
  CALLED;
  return start ? release(start, DEVICE) : CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostAlloc(void** out, size_t bytes, UNUSED unsigned flags) {
  CALLED;
  return allocate((uintptr_t*)out, bytes ? bytes : 1, PINNED, PAGE);
}
EXPORT CUresult cuMemFreeHost(void* start) {
  CALLED;
  return release((uintptr_t)start, PINNED);
}
EXPORT CUresult cuMemHostRegister_v2(void* start, size_t bytes, UNUSED unsigned flags) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  charge(REGISTERED, bytes);
  track((uintptr_t)start, bytes, bytes, REGISTERED);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostUnregister(void* start) {
  CALLED;
  return release((uintptr_t)start, REGISTERED);
}
EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* host, UNUSED unsigned flags) {
  CALLED;
  *out = (CUdeviceptr)host;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  *total_bytes = options()->device_bytes;
  *free_bytes = limit_of(DEVICE) - in_use[DEVICE];
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  Block* b = find(address);
  if (b && start) *start = b->start;
  if (b && bytes) *bytes = b->bytes;
  pthread_mutex_unlock(&device_lock);
  return b ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static CUresult pointer_attribute(void* out, int attribute, CUdeviceptr address) {
  pthread_mutex_lock(&device_lock);
  Block* found = find(address);
  Block b = found ? *found : (Block){0};
  pthread_mutex_unlock(&device_lock);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case POINTER_CONTEXT: *(CUcontext*)out = NULL; break;
    case POINTER_MEMORY_TYPE: *(unsigned*)out = b.kind == DEVICE ? MEMORY_TYPE_DEVICE : MEMORY_TYPE_HOST; break;
    case POINTER_DEVICE_POINTER: *(CUdeviceptr*)out = address; break;
    case POINTER_IS_MANAGED: *(unsigned*)out = 0; break;
    case POINTER_DEVICE_ORDINAL: *(int*)out = 0; break;
    case POINTER_RANGE_START: *(CUdeviceptr*)out = b.start; break;
    case POINTER_RANGE_SIZE: *(size_t*)out = b.bytes; break;
    case POINTER_ALLOWED_HANDLE_TYPES: *(uint64_t*)out = 0; break;
    default: return refuse(CUDA_ERROR_NOT_SUPPORTED, "cuPointerGetAttribute %d", attribute);
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void* out, int attribute, CUdeviceptr address) {
  CALLED;
  return pointer_attribute(out, attribute, address);
}
EXPORT CUresult cuPointerGetAttributes(unsigned count, int* attributes, void** out, CUdeviceptr address) {
  CALLED;
  for (unsigned i = 0; i < count; i++) pointer_attribute(out[i], attributes[i], address);
  return CUDA_SUCCESS;
}

// ---- virtual memory management: addresses and bytes apart. A piece of physical memory may be mapped once.
typedef struct Piece {
  size_t bytes;
  int references;
  uintptr_t mapped_at;  // 0: nowhere
  struct Piece* next;
} Piece;
static Piece* pieces;

static void drop_if_unused(Piece* piece) {
  if (piece->references || piece->mapped_at) return;
  in_use[DEVICE] -= piece->bytes;
  for (Piece** link = &pieces; *link; link = &(*link)->next)
    if (*link == piece) {
      *link = piece->next;
      break;
    }
  free(piece);
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t* out, UNUSED const void* properties, UNUSED int option) {
  CALLED;
  *out = GRANULE;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(Piece** out, size_t bytes, UNUSED const void* properties, UNUSED unsigned long long flags) {
  CALLED;
  if (bytes % GRANULE) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&device_lock);
  bool fits = charge(DEVICE, bytes);
  if (fits) {
    Piece* piece = malloc(sizeof *piece);
    *piece = (Piece){bytes, 1, 0, pieces};
    *out = pieces = piece;
  }
  pthread_mutex_unlock(&device_lock);
  return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemRelease(Piece* piece) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  piece->references--;
  drop_if_unused(piece);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRetainAllocationHandle(Piece** out, void* address) {
  CALLED;
  uintptr_t at = (uintptr_t)address;
  pthread_mutex_lock(&device_lock);
  Piece* piece = pieces;
  while (piece && !(piece->mapped_at && at >= piece->mapped_at && at < piece->mapped_at + piece->bytes)) piece = piece->next;
  if (piece) piece->references++;
  pthread_mutex_unlock(&device_lock);
  *out = piece;
  return piece ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t alignment, UNUSED CUdeviceptr hint,
                                    UNUSED unsigned long long flags) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  *out = take_addresses(DEVICE, bytes, alignment < GRANULE ? GRANULE : alignment);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(UNUSED CUdeviceptr start, UNUSED size_t bytes) {
  CALLED;
  return CUDA_SUCCESS;  // addresses never come back
}
EXPORT CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, Piece* piece, UNUSED unsigned long long flags) {
  CALLED;
  if (offset || bytes != piece->bytes || piece->mapped_at)
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "cuMemMap of a part of an allocation, or of one that is mapped already");
  if (!map_poison(start, bytes, PROT_NONE)) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&device_lock);
  piece->mapped_at = start;
  track(start, bytes, 0, DEVICE);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
typedef struct {
  struct {
    int type, id;
  } location;
  int flags;  // 0: none, 1: read, 3: read and write
} AccessDescription;
EXPORT CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const AccessDescription* access, UNUSED size_t count) {
  CALLED;
  static const int protections[] = {PROT_NONE, PROT_READ, PROT_NONE, PROT_READ | PROT_WRITE};
  return mprotect((void*)start, bytes, protections[access->flags & 3]) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetAccess(unsigned long long* out, UNUSED const void* location, UNUSED CUdeviceptr address) {
  CALLED;
  *out = 3;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  for (Piece *piece = pieces, *next; piece; piece = next) {
    next = piece->next;
    if (piece->mapped_at < start || piece->mapped_at >= start + bytes) continue;
    Block block;
    untrack(piece->mapped_at, DEVICE, &block);
    munmap((void*)piece->mapped_at, piece->bytes);
    piece->mapped_at = 0;
    drop_if_unused(piece);
  }
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}

// ---- the end: what is still held, and who touched what was freed
void log_leaks(void) {
  static const char* const words[] = {[DEVICE] = "device", [PINNED] = "host", [REGISTERED] = "registered"};
  for (Kind kind = DEVICE; kind <= REGISTERED; kind++) {
    int count = 0;
    for (Block* b = blocks; b; b = b->next) count += b->kind == kind;
    if (count || in_use[kind]) log_line("LEAK %s %zu bytes in %d blocks", words[kind], in_use[kind], count);
  }
}

size_t peak_bytes(Kind kind) { return peak[kind]; }

static struct sigaction otherwise;

static void on_fault(int signal, siginfo_t* information, void* context) {
  uintptr_t at = (uintptr_t)information->si_addr;
  if (at >= 0x200000000000 && at < LAST_ADDRESS) {
    const char* who = running_kernel ? running_kernel : "the host";
    log_line("REFUSED access of %s to 0x%lx, which is freed or was never allocated", who, at);
    fprintf(stderr, "stand-in: access of %s to 0x%lx, which is freed or was never allocated\n", who, at);
    _exit(71);
  }
  if (otherwise.sa_flags & SA_SIGINFO && otherwise.sa_sigaction) otherwise.sa_sigaction(signal, information, context);
  sigaction(signal, &otherwise, NULL);  // else the fault comes again and ends the process as it would have
}

__attribute__((constructor)) static void watch_faults(void) {
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGSEGV, &action, &otherwise);
}
