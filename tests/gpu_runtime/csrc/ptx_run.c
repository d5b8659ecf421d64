// Runs a grid: block after block, warp after warp. Lanes that diverge are paths of their own, the one that is furthest behind runs
// first, and paths that meet become one again.
#include <unistd.h>

#include "ptx_machine.h"

uint64_t instructions_run;

static void fail(const char* what) {
  log_line("REFUSED kernel %s: %s", running_kernel, what);
  fprintf(stderr, "stand-in: kernel %s: %s\n", running_kernel, what);
  _exit(70);
}

// ---- one warp
static Path* lowest(Warp* w) {
  Path* found = NULL;
  for (int i = 0; i < w->path_count; i++) {
    Path* p = &w->paths[i];
    if (p->state == RUNS && (!found || p->at < found->at)) found = p;
  }
  return found;
}

static void remove_path(Warp* w, Path* p) { *p = w->paths[--w->path_count]; }

static uint32_t live_lanes(const Warp* w) {
  uint32_t live = 0;
  for (int i = 0; i < w->path_count; i++) live |= w->paths[i].mask;
  return live;
}

// Where the path has to stop at the latest: another one stands there, which it joins or lets run first.
static int limit_of(const Warp* w, const Path* p) {
  int limit = INT32_MAX;
  for (int i = 0; i < w->path_count; i++) {
    const Path* other = &w->paths[i];
    if (other != p && other->state != AT_BARRIER && other->at >= p->at && other->at < limit) limit = other->at;
  }
  return limit;
}

static bool join(Warp* w, Path* p) {
  for (int i = 0; i < w->path_count; i++) {
    Path* other = &w->paths[i];
    if (other == p || other->at != p->at || other->state == AT_BARRIER) continue;
    other->mask |= p->mask;
    other->state = RUNS;
    remove_path(w, p);
    return true;
  }
  return false;
}

static uint32_t lanes_named(const Warp* w, const Instruction* x) {
  return w->registers[x->s[x->s_count - 1]];  // the same in all lanes; lane 0's word
}

// Runs a path until it ends, waits, diverges, or reaches its limit.
static void run_path(const Program* program, Warp* w, Path* p) {
  int limit = limit_of(w, p), at = p->at;
  uint32_t mask = p->mask;
  uint64_t ran = 0;
  do {
    const Instruction* x = &program->code[at];
    uint32_t active = mask;
    if (x->guard >= 0) active &= x->guard_negated ? ~w->registers[x->guard] : w->registers[x->guard];
    ran += (uint64_t)__builtin_popcount(mask);
    if (x->flow == STRAIGHT) {
      if (active) x->run(w, x, active);
      at++;
    } else if (x->flow == BRANCH) {
      if (active && active != mask) {
        w->paths[w->path_count++] = (Path){x->target, active, RUNS};
        mask &= ~active;
        limit = -1;  // the other one may stand behind: choose anew
        at++;
      } else {
        if (active && x->target <= at && w->path_count > 1) limit = -1;  // back, perhaps before others: choose anew
        at = active ? x->target : at + 1;
      }
    } else if (x->flow == EXIT) {
      mask &= ~active;
      at++;
      if (!mask) break;
    } else if (x->flow == BARRIER) {
      p->state = AT_BARRIER;
      at++;
      break;
    } else {  // CONVERGE
      if (lanes_named(w, x) & live_lanes(w) & ~mask) {
        p->state = WAITS;
        break;
      }
      if (active) x->run(w, x, active);
      at++;
    }
  } while (at < limit);
  instructions_run += ran;
  p->at = at;
  p->mask = mask;
  if (!mask) remove_path(w, p);
  else if (p->state == RUNS) join(w, p);
}

// Until all paths have ended or wait at the block's barrier.
static void run_warp(const Program* program, Warp* w) {
  for (Path* p; (p = lowest(w));) run_path(program, w, p);
  for (int i = 0; i < w->path_count; i++) {
    if (w->paths[i].state != WAITS) continue;
    // Lanes that it waits for may have ended since.
    const Instruction* x = &program->code[w->paths[i].at];
    if (lanes_named(w, x) & live_lanes(w) & ~w->paths[i].mask) fail("lanes wait for lanes that never come");
    w->paths[i].state = RUNS;
    run_warp(program, w);
    return;
  }
}

// ---- one block
static void set32(Warp* w, int32_t place, int lane, uint32_t value) {
  if (place >= 0) w->registers[place + lane] = value;
}

static void fill(Warp* w, const Constant* c) {
  for (int l = 0; l < LANES; l++) {
    if (c->bytes == 1) w->registers[c->place] = c->value ? ALL : 0;
    if (c->bytes == 2) ((uint16_t*)&w->registers[c->place])[l] = (uint16_t)c->value;
    if (c->bytes == 4) w->registers[c->place + l] = (uint32_t)c->value;
    if (c->bytes == 8) ((uint64_t*)&w->registers[c->place])[l] = c->value;
  }
}

static void prepare_warp(const Program* program, Warp* w, Block* block, int index) {
  w->block = block;
  w->registers = aligned_alloc(64, ((size_t)program->words * 4 + 63) / 64 * 64);
  memset(w->registers, 0, (size_t)program->words * 4);
  w->local_bytes = (size_t)program->local_bytes * LANES;
  w->local = malloc(w->local_bytes + 16);
  for (int i = 0; i < program->constant_count; i++) fill(w, &program->constants[i]);
  const int32_t* special = program->special;
  const unsigned *size = block->size, *grid = block->grid;
  for (int l = 0; l < LANES; l++) {
    unsigned thread = (unsigned)(index * LANES + l);
    set32(w, special[TID_X], l, thread % size[0]);
    set32(w, special[TID_Y], l, thread / size[0] % size[1]);
    set32(w, special[TID_Z], l, thread / (size[0] * size[1]));
    set32(w, special[LANE_ID], l, (uint32_t)l);
    set32(w, special[WARP_ID], l, (uint32_t)index);
    for (int axis = 0; axis < 3; axis++) {
      set32(w, special[NTID_X + axis], l, size[axis]);
      set32(w, special[NCTAID_X + axis], l, grid[axis]);
    }
    char* local = w->local + (size_t)program->local_bytes * (size_t)l;
    for (int i = 0; i < program->local_count; i++)
      ((uint64_t*)&w->registers[program->locals[i].place])[l] = (uint64_t)(local + program->locals[i].offset);
  }
}

static void run_block(const Program* program, Warp* warps, int count, int threads) {
  const Block* block = warps->block;
  for (int i = 0; i < count; i++) {
    Warp* w = &warps[i];
    for (int axis = 0; axis < 3; axis++)
      for (int l = 0; l < LANES; l++) set32(w, program->special[CTAID_X + axis], l, block->index[axis]);
    int lanes = threads - i * LANES;
    w->paths[0] = (Path){0, lanes >= LANES ? ALL : (1u << lanes) - 1, RUNS};
    w->path_count = 1;
  }
  for (bool any = true; any;) {  // once for each barrier
    any = false;
    for (int i = 0; i < count; i++) run_warp(program, &warps[i]);
    for (int i = 0; i < count; i++)
      for (int p = 0; p < warps[i].path_count; p++) {
        warps[i].paths[p].state = RUNS;
        any = true;
      }
    for (int i = 0; any && i < count; i++)
      for (int p = 0; p < warps[i].path_count; p++)
        if (join(&warps[i], &warps[i].paths[p])) p--;
  }
}

Touched* run_grid(const Program* program, const unsigned* grid, const unsigned* size, unsigned shared_bytes, const char* parameters) {
  int threads = (int)(size[0] * size[1] * size[2]), count = (threads + LANES - 1) / LANES;
  size_t shared = (size_t)program->shared_bytes + shared_bytes + 64;
  Block block = {.grid = grid, .size = size, .shared = aligned_alloc(128, (shared + 127) / 128 * 128), .shared_bytes = shared,
                 .parameters = parameters, .touched = new_touched()};
  memset(block.shared, 0xff, shared);
  Warp* warps = calloc((size_t)count, sizeof *warps);
  for (int i = 0; i < count; i++) prepare_warp(program, &warps[i], &block, i);
  for (block.index[2] = 0; block.index[2] < grid[2]; block.index[2]++)
    for (block.index[1] = 0; block.index[1] < grid[1]; block.index[1]++)
      for (block.index[0] = 0; block.index[0] < grid[0]; block.index[0]++) run_block(program, warps, count, threads);
  for (int i = 0; i < count; i++) {
    free(warps[i].registers);
    free(warps[i].local);
  }
  free(warps);
  free(block.shared);
  return block.touched;
}
