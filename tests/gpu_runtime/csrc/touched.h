// Which bytes a kernel reads and writes. The log says it of each that has run, so that nobody need guess.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { READ = 1, WRITE = 2 };

typedef struct Touched Touched;

Touched* new_touched(void);
void touch(Touched* touched, uintptr_t address, size_t bytes, int how);  // aligned to `bytes`, which are 16 at most
void touch_range(Touched* touched, uintptr_t address, size_t bytes, int how);  // of any length, at any place
char* end_touched(Touched* touched);  // " r:0xADDRESS+BYTES w:0xADDRESS+BYTES ...", disjoint of each kind; the caller frees it
