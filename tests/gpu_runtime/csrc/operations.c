// Streams, events, and the device: one thread that runs operations whose dependencies have ended, in the order of a schedule.
//
// An operation depends on the one before it in its stream, on recordings of events that the stream waits for, and in a graph on
// its node's dependencies. Which of those that could run does run is the schedule's choice:
//   eager   the one that was submitted first
//   late    copies between host and device only when nothing else could run
//   early   such copies before everything else
//   random  by a number drawn for each operation from the seed; half of all operations are held as copies are in `late`
// What is held runs only when the host has been quiet for a while: else a device that is faster than its host would have run
// everything in the order of submission, whatever the schedule.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "stand_in.h"

static const double QUIET_S = 0.004;    // between two submissions of one step XLA's host thread takes well below a millisecond
static const double RUNNING_S = 0.4;    // a thread that runs that long does something else, or polls

pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_arrived = PTHREAD_COND_INITIALIZER, work_ended = PTHREAD_COND_INITIALIZER;
__thread const char* running_kernel;
__thread uint64_t running_operation;

struct Operation {
  int references;
  uint64_t number, rank;  // rank: the schedule's order, least first
  bool held, ended;
  double ended_at_s;
  Work* work;
  CUstream stream;        // whose count of unfinished operations it is in; NULL: a node of a graph
  int waits_for;          // operations that have not ended
  int follower_count;
  Operation** followers;
  Operation* next_ready;
};

struct Stream {
  int id, priority;
  unsigned flags;
  uint64_t submitted, ended;
  Operation* last;
  Capture capture;        // capture.graph: what is captured into, or NULL
  struct Stream* next;
};
struct Event {
  int id, mark;
  Operation* recorded;
};

static struct Stream null_stream, *streams = &null_stream;
static int stream_count, event_count, mark_count;
static uint64_t operation_count, operations_ended;
static double last_submission_s;
static pid_t last_submitter;
static int waiting_hosts;  // host threads that wait for the device: nothing more comes from them
static Operation* ready;   // unordered

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- works
void* new_work(size_t size, const char* word, void (*run)(Work*), void (*clear)(Work*)) {
  Work* work = calloc(1, size);
  *work = (Work){.references = 1, .word = word, .run = run, .clear = clear};
  return work;
}

void drop_work(Work* work) {
  if (__atomic_sub_fetch(&work->references, 1, __ATOMIC_ACQ_REL)) return;
  if (work->clear) work->clear(work);
  free(work->text);
  free(work);
}

// ---- operations; the lock is held
static void drop(Operation* o) {
  if (!o || --o->references) return;
  free(o->followers);
  free(o);
}

static uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

static void rank_by_schedule(Operation* o) {
  bool copy = o->work->host_copy;
  o->rank = o->number;
  switch (options()->schedule) {
    case EAGER: break;
    case LATE: o->held = copy; break;
    case EARLY: o->held = !copy; break;
    case RANDOM:
      o->rank = mixed(options()->seed << 32 ^ o->number);
      o->held = o->rank & 1;
      break;
  }
  if (!o->work->run) o->held = false;  // marks, waits and ends of graphs hold nothing up by themselves
}

static void make_ready(Operation* o) {
  o->next_ready = ready;
  ready = o;
  pthread_cond_signal(&work_arrived);
}

static void follow(Operation* o, Operation* before) {
  if (!before || before->ended) return;
  before->followers = realloc(before->followers, sizeof(Operation*) * (size_t)(before->follower_count + 1));
  before->followers[before->follower_count++] = o;
  o->references++;
  o->waits_for++;
}

static void start_device(void);

static Operation* begin(Work* work, CUstream stream, Operation* const* after, int count) {
  start_device();
  Operation* o = calloc(1, sizeof *o);
  *o = (Operation){.references = 1, .number = ++operation_count, .work = work, .stream = stream};
  rank_by_schedule(o);
  for (int i = 0; i < count; i++) follow(o, after[i]);
  if (stream) {
    follow(o, stream->last);
    drop(stream->last);
    stream->last = o;
    o->references++;
    stream->submitted++;
  }
  last_submission_s = now_s();
  last_submitter = (pid_t)syscall(SYS_gettid);
  o->references++;  // until it has ended
  if (!o->waits_for) make_ready(o);
  return o;         // the caller's reference
}

Operation* begin_node(Work* work, Operation* const* after, int count) { return begin(work, NULL, after, count); }

// The null stream and streams that block wait for each other; CUDA's other streams know nothing of it.
static Operation* append_in_order(CUstream s, Work* work, Operation* const* after, int count, Text* order) {
  Operation** all = malloc(sizeof *all * (size_t)(count + stream_count + 1));
  int n = 0;
  for (; n < count; n++) all[n] = after[n];
  for (struct Stream* other = streams; other; other = other->next) {
    bool mutual = other != s && !((s->flags | other->flags) & CU_STREAM_NON_BLOCKING) && (s == &null_stream || other == &null_stream);
    if (!mutual || !other->last || other->last->ended) continue;
    text_add(order, order->length ? ",q%lu" : "q%lu", other->last->number);
    all[n++] = other->last;
  }
  Operation* o = begin(work, s, all, n);
  free(all);
  return o;
}

Operation* append(CUstream s, Work* work, Operation* const* after, int count) {
  Text order = {0};
  Operation* o = append_in_order(s, work, after, count, &order);
  if (order.length) log_line("ORDER q%lu after %s", o->number, order.at);
  free(order.at);
  return o;
}

bool submit(CUstream stream, Work* work) {
  pthread_mutex_lock(&device_lock);
  if (stream->capture.graph) {
    capture_work(&stream->capture, work);
    pthread_mutex_unlock(&device_lock);
    return false;
  }
  Operation* o = append(stream, work, NULL, 0);
  log_line("%s q%lu s%d%s%s", work->word, o->number, stream->id, work->text ? " " : "", work->text ? work->text : "");
  drop(o);
  pthread_mutex_unlock(&device_lock);
  return true;
}

uint64_t number_of(const Operation* operation) { return operation->number; }
void drop_operation(Operation* operation) { drop(operation); }
int id_of(CUstream stream) { return stream->id; }

// ---- the device's thread
//
// The host is quiet if the thread that submitted last sleeps: one that merely waits for a core of a busy machine is not.
static bool sleeps(pid_t thread) {
  char path[64], text[256] = "";
  snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
  FILE* file = fopen(path, "r");
  if (!file) return true;  // it has ended
  size_t n = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  const char* name_end = n ? strrchr(text, ')') : NULL;
  return !name_end || name_end[2] != 'R';
}
static bool host_is_quiet(void) {
  double since_s = now_s() - last_submission_s;
  return waiting_hosts || since_s > RUNNING_S || (since_s > QUIET_S && sleeps(last_submitter));
}

static Operation** best_of(bool held) {
  Operation** best = NULL;
  for (Operation** link = &ready; *link; link = &(*link)->next_ready)
    if ((*link)->held == held && (!best || (*link)->rank < (*best)->rank)) best = link;
  return best;
}
static Operation* take_best(void) {
  Operation** best = best_of(false);
  if (!best && ready && host_is_quiet()) best = best_of(true);
  if (!best) return NULL;
  Operation* o = *best;
  *best = o->next_ready;
  return o;
}

static void wait_for_work(void) {
  if (!ready) {
    pthread_cond_wait(&work_arrived, &device_lock);
    return;
  }
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += (long)(QUIET_S * 1e9) / 2;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  pthread_cond_timedwait(&work_arrived, &device_lock, &until);
}

static void end_operation(Operation* o) {
  o->ended = true;
  o->ended_at_s = now_s();
  operations_ended++;
  if (o->stream) o->stream->ended++;
  for (int i = 0; i < o->follower_count; i++) {
    Operation* f = o->followers[i];
    if (!--f->waits_for) make_ready(f);
    drop(f);
  }
  o->follower_count = 0;
  pthread_cond_broadcast(&work_ended);
}

static void* device(UNUSED void* nothing) {
  pthread_mutex_lock(&device_lock);
  for (;;) {
    Operation* o = take_best();
    if (!o) {
      wait_for_work();
      continue;
    }
    Work* work = o->work;
    if (work->run) {
      running_operation = o->number;
      log_line("BEGIN q%lu", o->number);
      pthread_mutex_unlock(&device_lock);
      work->run(work);
      pthread_mutex_lock(&device_lock);
      log_line("END q%lu", o->number);
    }
    end_operation(o);
    drop(o);
    pthread_mutex_unlock(&device_lock);
    drop_work(work);  // may free much: not under the lock
    pthread_mutex_lock(&device_lock);
  }
  return NULL;
}

static void start_device(void) {
  static bool started;
  if (started) return;
  started = true;
  pthread_t thread;
  pthread_create(&thread, NULL, device, NULL);
  pthread_detach(thread);
}

// ---- waiting, on a host thread; the lock is held
static void wait_until_ended(Operation* o) {
  waiting_hosts++;
  pthread_cond_signal(&work_arrived);
  while (!o->ended) pthread_cond_wait(&work_ended, &device_lock);
  waiting_hosts--;
}

void wait_for_stream(CUstream s) {
  Operation* last = s->last;
  if (!last) return;
  last->references++;
  wait_until_ended(last);
  log_line("SYNC s%d q%lu", s->id, last->number);
  drop(last);
}

// ---- streams
CUstream stream_of(CUstream handle) {
  return !handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD ? &null_stream : handle;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  CALLED;
  struct Stream* s = calloc(1, sizeof *s);
  pthread_mutex_lock(&device_lock);
  *s = (struct Stream){.id = ++stream_count, .flags = flags, .priority = priority, .next = streams};
  *out = streams = s;
  log_line("STREAM s%d flags=%u priority=%d", s->id, flags, priority);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamCreate(CUstream* out, unsigned flags) {
  CALLED;
  return cuStreamCreateWithPriority(out, flags, 0);
}
EXPORT CUresult cuStreamDestroy_v2(CUstream s) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  wait_for_stream(s);  // CUDA would let it run out by itself; XLA has waited already
  for (struct Stream** link = &streams; *link; link = &(*link)->next)
    if (*link == s) {
      *link = s->next;
      break;
    }
  log_line("STREAMDESTROY s%d", s->id);
  drop(s->last);
  free(s);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  wait_for_stream(stream_of(handle));
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamQuery(CUstream handle) {
  CALLED;
  CUstream s = stream_of(handle);
  pthread_mutex_lock(&device_lock);
  bool done = s->ended == s->submitted;
  if (done && s->last) log_line("SYNC s%d q%lu", s->id, s->last->number);
  pthread_mutex_unlock(&device_lock);
  return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
EXPORT CUresult cuStreamGetPriority(CUstream handle, int* out) {
  CALLED;
  *out = stream_of(handle)->priority;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamGetCtx(UNUSED CUstream handle, CUcontext* out) {
  CALLED;
  extern char the_context;
  *out = (CUcontext)&the_context;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSynchronize(void) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  uint64_t upto = operation_count;
  waiting_hosts++;
  pthread_cond_signal(&work_arrived);
  while (operations_ended < upto) pthread_cond_wait(&work_ended, &device_lock);
  waiting_hosts--;
  log_line("SYNCALL");
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}

// ---- captures: what is submitted to the stream becomes nodes of a graph
EXPORT CUresult cuStreamIsCapturing(CUstream handle, int* out) {
  CALLED;
  *out = stream_of(handle)->capture.graph != NULL;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph, CUgraphNode const* after, UNUSED const void* edges,
                                            size_t count, UNUSED int mode) {
  CALLED;
  Capture* capture = &stream_of(handle)->capture;
  pthread_mutex_lock(&device_lock);
  capture->last = realloc(capture->last, sizeof(CUgraphNode) * (count + 1));
  if (count) memcpy(capture->last, after, sizeof(CUgraphNode) * count);
  capture->count = (int)count;
  capture->graph = graph;
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph* out) {
  CALLED;
  Capture* capture = &stream_of(handle)->capture;
  pthread_mutex_lock(&device_lock);
  *out = capture->graph;
  capture->graph = NULL;
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}

// ---- events
EXPORT CUresult cuEventCreate(CUevent* out, UNUSED unsigned flags) {
  CALLED;
  struct Event* e = calloc(1, sizeof *e);
  e->id = __atomic_add_fetch(&event_count, 1, __ATOMIC_RELAXED);
  *out = e;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventDestroy_v2(CUevent e) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  drop(e->recorded);
  free(e);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventRecord(CUevent e, CUstream handle) {
  CALLED;
  CUstream s = stream_of(handle);
  if (s->capture.graph) return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "cuEventRecord on a stream that is captured");
  Work* work = new_work(sizeof *work, "RECORD", NULL, NULL);
  pthread_mutex_lock(&device_lock);
  Operation* o = append(s, work, NULL, 0);
  drop(e->recorded);
  e->recorded = o;
  e->mark = ++mark_count;
  log_line("RECORD q%lu s%d m%d e%d", o->number, s->id, e->mark, e->id);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}

// A control for tests: with STAND_IN_DROP_WAITS=N every N-th wait of a stream for an event is forgotten (read at each wait, so that
// a program may set it for a while).
static bool dropped(void) {
  static long count;
  const char* value = getenv("STAND_IN_DROP_WAITS");
  long every = value ? strtol(value, NULL, 10) : 0;
  return every > 0 && ++count % every == 0;
}

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent e, UNUSED unsigned flags) {
  CALLED;
  CUstream s = stream_of(handle);
  if (s->capture.graph) return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "cuStreamWaitEvent on a stream that is captured");
  pthread_mutex_lock(&device_lock);
  if (!e->recorded) {
    log_line("WAITNONE s%d e%d", s->id, e->id);
  } else {
    bool drop_it = dropped();
    Operation* o = append(s, new_work(sizeof(Work), "WAIT", NULL, NULL), &e->recorded, drop_it ? 0 : 1);
    log_line("%s q%lu s%d m%d e%d", drop_it ? "DROPPED" : "WAIT", o->number, s->id, e->mark, e->id);
    drop(o);
  }
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventQuery(CUevent e) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  bool done = !e->recorded || e->recorded->ended;
  if (done && e->recorded) log_line("SEEN m%d", e->mark);
  pthread_mutex_unlock(&device_lock);
  return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
EXPORT CUresult cuEventSynchronize(CUevent e) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  Operation* o = e->recorded;
  if (o) {
    int mark = e->mark;  // another thread may record the event again meanwhile
    o->references++;
    wait_until_ended(o);
    log_line("SEEN m%d", mark);
    drop(o);
  }
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventElapsedTime(float* out_ms, CUevent from, CUevent to) {
  CALLED;
  if (!from->recorded || !to->recorded) return CUDA_ERROR_INVALID_VALUE;
  double ms = 1e3 * (to->recorded->ended_at_s - from->recorded->ended_at_s);
  *out_ms = ms > 1e-3 ? (float)ms : 1e-3F;  // XLA's autotuner divides by it
  return CUDA_SUCCESS;
}

// ---- host functions
typedef struct {
  Work work;
  CUhostFn function;
  void* argument;
} HostFunction;
static void run_host_function(Work* work) {
  HostFunction* h = (HostFunction*)work;
  h->function(h->argument);
}
EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* argument) {
  CALLED;
  HostFunction* h = new_work(sizeof *h, "HOSTFN", run_host_function, NULL);
  h->function = function;
  h->argument = argument;
  submit(stream_of(handle), &h->work);
  return CUDA_SUCCESS;
}

// ---- the end of the process
void log_kernels_and_end(void);
__attribute__((destructor)) static void last_lines(void) {
  pthread_mutex_lock(&device_lock);  // for good: the device's thread must not go on while the process is taken down
  if (operations_ended < operation_count) log_line("LEAK operations %lu", operation_count - operations_ended);
  log_leaks();
  log_kernels_and_end();
}
