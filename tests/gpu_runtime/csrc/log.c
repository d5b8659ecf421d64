// The log, one line per event (README.md has the format), and what is refused.
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "stand_in.h"

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static FILE* file;
static uint64_t lines;

// Lock held. A process that STAND_IN_LOG does not name leaves no log; so does a child that is forked.
static void open_once(void) {
  static bool tried;
  if (tried) return;
  tried = true;
  const char* path = getenv("STAND_IN_LOG");
  if (path && *path) file = fopen(path, "w");
  if (!file) return;
  setvbuf(file, NULL, _IOLBF, 1 << 16);  // a process that dies leaves its log
  const Options* o = options();
  fprintf(file, "%lu %ld START card=%s device=%zu host=%zu schedule=%s seed=%lu execute=%d\n", ++lines,
          (long)syscall(SYS_gettid), o->card->key, o->device_bytes, o->host_bytes, o->schedule_name, o->seed, o->execute);
}

static void write_line(const char* format, va_list values) {
  pthread_mutex_lock(&log_lock);
  open_once();
  if (file) {
    fprintf(file, "%lu %ld ", ++lines, (long)syscall(SYS_gettid));
    vfprintf(file, format, values);
    fputc('\n', file);
  }
  pthread_mutex_unlock(&log_lock);
}

void log_line(const char* format, ...) {
  va_list values;
  va_start(values, format);
  write_line(format, values);
  va_end(values);
}


static __thread char refusal[512];

const char* last_refusal(void) { return *refusal ? refusal : NULL; }
const char* status_text(int status) { return !status ? "success" : *refusal ? refusal : "not supported by the stand-in"; }

int refuse(int status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(refusal, sizeof refusal, format, values);
  va_end(values);
  log_line("REFUSED %s", refusal);
  fprintf(stderr, "stand-in: refused: %s\n", refusal);
  return status;
}

int unimplemented(const char* name, int status) {
  log_line("STUB %s", name);
  return status;
}

void log_first(const char* name, bool* seen) {
  if (__atomic_exchange_n(seen, true, __ATOMIC_RELAXED)) return;
  log_line("FIRST %s", name);
}

void text_add(Text* text, const char* format, ...) {
  va_list values;
  va_start(values, format);
  size_t need = (size_t)vsnprintf(NULL, 0, format, values) + 1;
  va_end(values);
  if (text->length + need > text->room) {
    text->room = 2 * (text->length + need);
    text->at = realloc(text->at, text->room);
  }
  va_start(values, format);
  vsnprintf(text->at + text->length, need, format, values);
  va_end(values);
  text->length += need - 1;
}
