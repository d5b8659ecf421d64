// What the parts of the stand-in share. One lock (`device_lock`) guards everything that more than one thread touches.
#pragma once
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))

extern pthread_mutex_t device_lock;

// ---- options.c: the environment, read once
typedef enum { EAGER, LATE, EARLY, RANDOM } Schedule;
typedef struct {
  const char *key, *name;
  int major, minor, cores, shared_block, shared_core, l2_bytes, clock_khz, memory_khz, bus_bits;
  size_t memory_bytes;
} Card;
typedef struct {
  const Card* card;
  size_t device_bytes, host_bytes;
  Schedule schedule;
  const char* schedule_name;
  uint64_t seed;
  bool execute;
} Options;
const Options* options(void);

// ---- log.c: the log (README.md has its format), and refusals
void log_line(const char* format, ...) __attribute__((format(printf, 1, 2)));
int refuse(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));  // returns status
const char* last_refusal(void);                                                         // of this thread, or NULL
const char* status_text(int status);                                                    // of any library
int unimplemented(const char* name, int status);                                        // what a generated stub does
void log_first(const char* name, bool* seen);
#define CALLED                  \
  do {                          \
    static bool seen;           \
    log_first(__func__, &seen); \
  } while (0)

typedef struct {
  char* at;
  size_t length, room;
} Text;
void text_add(Text* text, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- memory.c
typedef enum { PAGEABLE, DEVICE, PINNED, REGISTERED } Kind;
Kind kind_of(uintptr_t address);
CUresult device_allocate(CUdeviceptr* out, size_t bytes);
void log_leaks(void);

// ---- operations.c: what the device does, in which order
//
// A Work is what is to be done; an Operation is one doing of it, at a place in a stream or in a launched graph.
typedef struct Work {
  int references;
  bool host_copy;                // the schedules treat copies between host and device apart
  const char* word;              // the log's: KERNEL, COPY, ...
  char* text;                    // and what follows the operation and stream there
  void (*run)(struct Work*);     // NULL: nothing to do
  void (*clear)(struct Work*);   // frees what the work holds beside itself; NULL: nothing
} Work;
void* new_work(size_t size, const char* word, void (*run)(Work*), void (*clear)(Work*));
void drop_work(Work* work);

typedef struct Operation Operation;
bool submit(CUstream stream, Work* work);  // takes over the reference; false: it became a node of a graph
// With the lock held; `work` is taken over, the operation that is returned is dropped by the caller. In a stream, or of a graph alone.
Operation* append(CUstream stream, Work* work, Operation* const* after, int count);
Operation* begin_node(Work* work, Operation* const* after, int count);
void drop_operation(Operation* operation);
uint64_t number_of(const Operation* operation);
void wait_for_stream(CUstream stream);           // lock held
CUstream stream_of(CUstream handle);             // the null stream for its several names
int id_of(CUstream stream);
extern __thread const char* running_kernel;      // for reports of faults
extern __thread uint64_t running_operation;      // its number, on the device's thread

// ---- modules.c
typedef struct {
  char* name;
  int offset, bytes;
} Parameter;
typedef struct Function {
  char* name;
  struct Module* module;
  int parameter_count;
  Parameter* parameters;
  struct Program* program;  // decoded at its first launch
  bool refused;
} Function;
typedef struct {
  char* name;
  size_t bytes;
  CUdeviceptr address;
} Global;
typedef struct Module {
  int id, function_count, global_count;
  char* ptx;
  Function* functions;
  Global* globals;
} Module;

// ---- launch.c
typedef struct {
  Function* function;
  const unsigned *grid, *block;
  unsigned shared_bytes;
  void **params, **extra;
} Launch;
CUresult kernel_work(const Launch* launch, Work** out);
CUresult library_call(CUstream stream, Work* work, const char* name, int count, const void* const* pointers,
                      const int64_t* bytes, const char* access);

// ---- what libraries have in common: a `Handle` is made and goes; one with a `stream` is told and asks it
#define HANDLE(library, suffix)                                  \
  EXPORT int library##Create##suffix(Handle** out) {             \
    CALLED;                                                      \
    *out = calloc(1, sizeof **out);                              \
    return 0;                                                    \
  }                                                              \
  EXPORT int library##Destroy##suffix(Handle* h) {               \
    CALLED;                                                      \
    free(h);                                                     \
    return 0;                                                    \
  }
#define HANDLE_WITH_STREAM(library, suffix)                      \
  HANDLE(library, suffix)                                        \
  EXPORT int library##SetStream##suffix(Handle* h, CUstream s) { \
    CALLED;                                                      \
    h->stream = s;                                               \
    return 0;                                                    \
  }                                                              \
  EXPORT int library##GetStream##suffix(Handle* h, CUstream* s) {\
    CALLED;                                                      \
    *s = h->stream;                                              \
    return 0;                                                    \
  }

// ---- copies.c
Work* copy_work(uintptr_t destination, uintptr_t source, size_t bytes);
Work* set_work(CUdeviceptr destination, uint32_t value, int width, size_t count);

// ---- graphs.c
typedef struct Capture {
  struct Graph* graph;
  struct Node** last;
  int count;
} Capture;
void capture_work(Capture* capture, Work* work);  // lock held; takes over the reference
