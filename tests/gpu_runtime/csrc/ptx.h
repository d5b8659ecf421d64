// The interpreter of PTX, as the rest sees it.
#pragma once
#include "stand_in.h"
#include "touched.h"

typedef struct Program Program;

int ptx_type_bytes(const char* word);  // of `.u32`: 4

// The program of an entry of a module; NULL with the reason in `error`, such as an instruction that is not known.
Program* decode(const Module* module, const Function* function, char* error, size_t room);

// Runs a grid. `parameters` is the packed list of arguments, at the offsets of the function's parameters. What it touched is the caller's.
Touched* run_grid(const Program* program, const unsigned* grid, const unsigned* block, unsigned shared_bytes, const char* parameters);

extern uint64_t instructions_run;  // times lanes
