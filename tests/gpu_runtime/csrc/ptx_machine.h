// The machine that runs PTX: a warp of 32 lanes at a time, every register a vector with one element per lane.
//
// A register of 4 bytes takes 32 words of its warp's register file, one of 8 bytes 64, one of 2 bytes 16, a predicate one word with a
// bit per lane. Constants and special registers are registers that are filled before the program runs, so that an instruction has
// only registers for operands and a handler is one loop over lanes, which the compiler turns into vector instructions.
#pragma once
#include "ptx.h"
#include "touched.h"

enum { LANES = 32 };
#define ALL 0xffffffffu

typedef struct Warp Warp;
typedef struct Instruction Instruction;
typedef void (*Handler)(Warp* warp, const Instruction* x, uint32_t mask);  // mask: the lanes that take part; never 0

typedef enum { STRAIGHT, BRANCH, EXIT, BARRIER, CONVERGE } Flow;  // CONVERGE: waits for the lanes that s[last] names
typedef enum { GENERIC, SHARED } Space;

struct Instruction {
  Handler run;
  uint32_t d[4], s[6];      // places in the register file
  uint8_t d_bytes[4], s_bytes[6];
  uint8_t d_count, s_count;
  uint8_t flow, space, combine, mode, to, from;
  int16_t guard_negated;
  int32_t guard;            // the place of a predicate; -1: none
  int32_t target;           // of a branch
  int64_t offset;           // of an address
};

typedef struct {
  uint32_t place, bytes;
  uint64_t value;
} Constant;

typedef enum { TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z,
               LANE_ID, WARP_ID, SPECIAL_COUNT } Special;

struct Program {
  Instruction* code;
  int count, constant_count;
  Constant* constants;
  uint32_t words;                    // of a register file
  int32_t special[SPECIAL_COUNT];    // places; -1: not used
  int local_bytes, local_count;      // of each lane
  struct Local {
    uint32_t place;                  // of a pointer into each lane's local memory
    int offset;
  }* locals;
  int shared_bytes;
};

typedef enum { RUNS, AT_BARRIER, WAITS } State;
typedef struct {
  int at;
  uint32_t mask;
  State state;
} Path;

typedef struct {
  const unsigned *grid, *size;
  unsigned index[3];
  char* shared;
  size_t shared_bytes;
  const char* parameters;
  Touched* touched;
} Block;

struct Warp {
  uint32_t* registers;
  Block* block;
  char* local;
  size_t local_bytes;           // of all lanes
  uint32_t carry;            // of the instructions with .cc, a bit per lane
  int path_count;
  Path paths[LANES];
};

// Which instructions are known. A form is the mnemonic without the words that change nothing here (see ptx_decode.c); the signature
// has the operands' bytes, results before `=`, `p` for a predicate.
typedef struct {
  const char *form, *signature;
  Handler run;
  uint8_t flow, mode;
} Row;
const Row* find_row(const char* form);
Handler conversion(const char* to, const char* from, const char* rounding, Instruction* x);
Handler load_handler(int bytes, bool is_signed, int register_bytes);
Handler store_handler(int bytes, int register_bytes);
Handler atomic_handler(const char* operation, const char* type);
Handler comparison(const char* operator_name, const char* type);
Handler move_handler(int d_count, int s_count, int bytes);
void load_matrices(Warp* warp, const Instruction* x, uint32_t mask);
void store_matrices(Warp* warp, const Instruction* x, uint32_t mask);
void load_parameter(Warp* warp, const Instruction* x, uint32_t mask);
void to_generic_shared(Warp* warp, const Instruction* x, uint32_t mask);
void from_generic_shared(Warp* warp, const Instruction* x, uint32_t mask);
