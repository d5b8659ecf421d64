// A hash table from lines of 64 bytes to the bits of those that were read and of those that were written.
#include "touched.h"

#include "stand_in.h"

enum { LINE = 64 };

typedef struct {
  uintptr_t number;  // address / LINE; 0: free
  uint64_t bits[2];  // read, written
} Line;

struct Touched {
  Line *lines, *latest;
  size_t room, used;
};

Touched* new_touched(void) {
  Touched* t = calloc(1, sizeof *t);
  t->room = 256;
  t->lines = calloc(t->room, sizeof *t->lines);
  return t;
}

static Line* line_of(Touched* t, uintptr_t number) {
  size_t at = number * 0x9e3779b97f4a7c15 >> 20;
  while (t->lines[at % t->room].number && t->lines[at % t->room].number != number) at++;
  return &t->lines[at % t->room];
}

static void grow(Touched* t) {
  Line* old = t->lines;
  size_t room = t->room;
  t->room *= 4;
  t->lines = calloc(t->room, sizeof *t->lines);
  for (size_t i = 0; i < room; i++)
    if (old[i].number) *line_of(t, old[i].number) = old[i];
  free(old);
}

void touch(Touched* t, uintptr_t address, size_t bytes, int how) {
  uintptr_t number = address / LINE;
  if (!t->latest || t->latest->number != number) {
    if (2 * t->used > t->room) grow(t);
    t->latest = line_of(t, number);
    if (!t->latest->number) t->used++;
    t->latest->number = number;
  }
  uint64_t bits = (bytes == LINE ? ~(uint64_t)0 : ((uint64_t)1 << bytes) - 1) << address % LINE;
  if (how & READ) t->latest->bits[0] |= bits;
  if (how & WRITE) t->latest->bits[1] |= bits;
}

void touch_range(Touched* t, uintptr_t address, size_t bytes, int how) {
  while (bytes) {
    size_t piece = LINE - address % LINE;
    if (piece > bytes) piece = bytes;
    touch(t, address, piece, how);
    address += piece;
    bytes -= piece;
  }
}

static int by_number(const void* a, const void* b) {
  uintptr_t x = ((const Line*)a)->number, y = ((const Line*)b)->number;
  return (x > y) - (x < y);
}

static void add_ranges(Text* text, const Line* lines, size_t count, bool write) {
  uintptr_t start = 0, stop = 0;  // of the range that grows
  for (size_t i = 0; i < count; i++) {
    uint64_t bits = lines[i].bits[write];
    while (bits) {
      int first = __builtin_ctzll(bits);
      uint64_t rest = ~(bits >> first);
      int length = rest ? __builtin_ctzll(rest) : LINE;
      uintptr_t at = lines[i].number * LINE + (uintptr_t)first;
      if (at != stop) {
        if (stop) text_add(text, " %c:0x%lx+%lu", write ? 'w' : 'r', start, stop - start);
        start = at;
      }
      stop = at + (uintptr_t)length;
      bits = first + length < LINE ? bits >> (first + length) << (first + length) : 0;
    }
  }
  if (stop) text_add(text, " %c:0x%lx+%lu", write ? 'w' : 'r', start, stop - start);
}

char* end_touched(Touched* t) {
  size_t count = 0;
  for (size_t i = 0; i < t->room; i++)
    if (t->lines[i].number) t->lines[count++] = t->lines[i];
  qsort(t->lines, count, sizeof *t->lines, by_number);
  Text text = {0};
  text_add(&text, "%s", "");
  add_ranges(&text, t->lines, count, false);
  add_ranges(&text, t->lines, count, true);
  free(t->lines);
  free(t);
  return text.at;
}
