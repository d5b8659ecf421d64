// Reads the text of an entry into a Program. Whatever is not known ends the decoding with a reason.
#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>

#include "ptx_machine.h"

// ---- names: a small table from strings to numbers
typedef struct {
  char** names;
  int64_t* values;
  int count, room;
} Names;

static int slot_of(const Names* t, const char* name) {
  uint64_t hash = 14695981039346656037u;
  for (const char* c = name; *c; c++) hash = (hash ^ (uint8_t)*c) * 1099511628211u;
  int i = (int)(hash % (uint64_t)t->room);
  while (t->names[i] && strcmp(t->names[i], name)) i = (i + 1) % t->room;
  return i;
}
static const int64_t* look_up(const Names* t, const char* name) {
  if (!t->room) return NULL;
  int i = slot_of(t, name);
  return t->names[i] ? &t->values[i] : NULL;
}
static void keep(Names* t, const char* name, int64_t value);
static void grow(Names* t) {
  Names larger = {.room = t->room ? 2 * t->room : 64};
  larger.names = calloc((size_t)larger.room, sizeof(char*));
  larger.values = calloc((size_t)larger.room, sizeof(int64_t));
  for (int i = 0; i < t->room; i++)
    if (t->names[i]) {
      int k = slot_of(&larger, t->names[i]);
      larger.names[k] = t->names[i];
      larger.values[k] = t->values[i];
    }
  larger.count = t->count;
  free(t->names);
  free(t->values);
  *t = larger;
}
static void keep(Names* t, const char* name, int64_t value) {
  if (2 * (t->count + 1) > t->room) grow(t);
  int i = slot_of(t, name);
  if (!t->names[i]) {
    t->names[i] = strdup(name);
    t->count++;
  }
  t->values[i] = value;
}
static void free_names(Names* t) {
  for (int i = 0; i < t->room; i++) free(t->names[i]);
  free(t->names);
  free(t->values);
}

// ---- what is being decoded
typedef struct {
  char prefix[32];  // `%r` of `.reg .b32 %r<100>;`
  int bytes;
} Family;
typedef struct Scope {
  struct Scope* outer;  // NULL: a function's own
  Names registers;      // place * 16 + bytes
  Names labels;         // index of an instruction
  Family families[32];
  int family_count;
  struct Scope* next_made;
} Scope;
typedef struct {
  int instruction;
  Scope* scope;
  char* label;
} Jump;
typedef struct {
  const Module* module;
  const Function* function;
  Program* program;
  int code_room;
  Scope *scope, *made;
  const char* return_label;  // of a function that is called; NULL in the entry
  int depth;                 // of calls
  Names constants, shared;
  Names fields;              // of parameters of a call that are arrays of bytes: a register for each `number:offset`
  int aggregate_count;
  bool dynamic_shared;
  Jump* jumps;
  int jump_count;
  char statement[160];       // for errors
  char* error;
  size_t room;
  jmp_buf failed;
} Decoder;

__attribute__((format(printf, 2, 3), noreturn)) static void fail(Decoder* d, const char* format, ...) {
  va_list values;
  va_start(values, format);
  int n = vsnprintf(d->error, d->room, format, values);
  va_end(values);
  if (*d->statement && n > 0 && (size_t)n < d->room) snprintf(d->error + n, d->room - (size_t)n, " (in `%s`)", d->statement);
  longjmp(d->failed, 1);
}

static Scope* enter(Decoder* d, Scope* outer) {
  Scope* s = calloc(1, sizeof *s);
  s->outer = outer;
  s->next_made = d->made;
  d->made = s;
  return d->scope = s;
}

// ---- places in the register file
static uint32_t take_place(Decoder* d, int bytes) {
  uint32_t words = bytes == 1 ? 1 : (uint32_t)(bytes * LANES / 4);
  uint32_t place = words > 1 ? (d->program->words + 15) / 16 * 16 : d->program->words;  // 64 bytes: a line of the cache
  d->program->words = place + words;
  return place;
}
static int64_t declare(Decoder* d, Scope* scope, const char* name, int bytes) {
  int64_t value = (int64_t)take_place(d, bytes) * 16 + bytes;
  keep(&scope->registers, name, value);
  return value;
}
static const int64_t* find_register(Decoder* d, const char* name) {
  for (Scope* s = d->scope; s; s = s->outer) {
    const int64_t* found = look_up(&s->registers, name);
    if (found) return found;
    size_t stem = strlen(name);
    while (stem && isdigit((unsigned char)name[stem - 1])) stem--;
    for (int i = 0; i < s->family_count; i++)
      if (strlen(s->families[i].prefix) == stem && !strncmp(s->families[i].prefix, name, stem)) {
        declare(d, s, name, s->families[i].bytes);
        return look_up(&s->registers, name);
      }
  }
  return NULL;
}
static uint32_t constant(Decoder* d, uint64_t value, int bytes) {
  char key[40];
  if (bytes < 8) value &= ((uint64_t)1 << 8 * bytes) - 1;
  snprintf(key, sizeof key, "%d:%lx", bytes, value);
  const int64_t* found = look_up(&d->constants, key);
  if (found) return (uint32_t)*found;
  Program* p = d->program;
  uint32_t place = take_place(d, bytes);
  p->constants = realloc(p->constants, sizeof(Constant) * (size_t)(p->constant_count + 1));
  p->constants[p->constant_count++] = (Constant){place, (uint32_t)bytes, value};
  keep(&d->constants, key, place);
  return place;
}

static int special_of(const char* name) {
  static const char* const names[] = {"%tid.x",   "%tid.y",   "%tid.z",    "%ntid.x",   "%ntid.y",   "%ntid.z", "%ctaid.x",
                                      "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid"};
  for (int i = 0; i < SPECIAL_COUNT; i++)
    if (!strcmp(names[i], name)) return i;
  return -1;
}

// ---- variables in shared memory. Those of the module take room when an entry first names them.
static bool module_shared(Decoder* d, const char* name, int* bytes, int* alignment) {
  for (const char* t = d->module->ptx; (t = strstr(t, ".shared")); t++) {
    const char *end = strpbrk(t, ";\n"), *at = strstr(t, name);
    if (!end || !at || at > end || isalnum((unsigned char)at[strlen(name)]) || at[strlen(name)] == '_') continue;
    const char *align = strstr(t, ".align"), *bracket = strchr(at, '[');
    *alignment = align && align < at ? (int)strtol(align + 6, NULL, 10) : 16;
    *bytes = bracket && bracket < end ? (int)strtol(bracket + 1, NULL, 10) : 8;  // 0 in `name[]`: as much as the launch says
    return true;
  }
  return false;
}
static int64_t place_shared(Decoder* d, const char* name, int bytes, int alignment) {
  Program* p = d->program;
  if (d->dynamic_shared) fail(d, "a variable in shared memory after the one without a size");
  if (!bytes) d->dynamic_shared = true;
  p->shared_bytes = (p->shared_bytes + alignment - 1) / alignment * alignment;
  keep(&d->shared, name, p->shared_bytes);
  p->shared_bytes += bytes;
  return *look_up(&d->shared, name);
}

// The address of a variable, or of one in shared memory its place there.
static bool symbol(Decoder* d, const char* name, uint64_t* value) {
  const int64_t* found = look_up(&d->shared, name);
  int bytes, alignment;
  for (int i = 0; i < d->module->global_count; i++)
    if (!strcmp(d->module->globals[i].name, name)) {
      *value = d->module->globals[i].address;
      return true;
    }
  if (found) *value = (uint64_t)*found;
  else if (module_shared(d, name, &bytes, &alignment)) *value = (uint64_t)place_shared(d, name, bytes, alignment);
  else return false;
  return true;
}

static bool number(const char* t, uint64_t* value) {
  if (t[0] == '0' && strchr("fFdD", t[1]) && t[1]) *value = strtoull(t + 2, NULL, 16);
  else if (*t == '-') *value = (uint64_t)strtoll(t, NULL, 0);
  else if (isdigit((unsigned char)*t)) *value = strtoull(t, NULL, 0);
  else return false;
  return true;
}

// ---- operands. `bytes` is what the instruction wants, 0 what the register has; `got` what it is.
static uint32_t operand(Decoder* d, const char* t, int bytes, int* got) {
  char name[200];
  uint64_t value;
  int n = snprintf(name, sizeof name, "%s", t);
  while (n && isspace((unsigned char)name[n - 1])) name[--n] = 0;
  if (!strcmp(name, "_")) snprintf(name, sizeof name, "_%d", bytes);
  if (*name == '_' && bytes && !find_register(d, name) && isdigit((unsigned char)name[1])) declare(d, d->scope, name, bytes);
  int special = special_of(name);
  if (special >= 0) {
    if (d->program->special[special] < 0) d->program->special[special] = (int32_t)take_place(d, 4);
    if (got) *got = 4;
    if (bytes && bytes != 4) fail(d, "%s in %d bytes", name, bytes);
    return (uint32_t)d->program->special[special];
  }
  const int64_t* found = find_register(d, name);
  if (found) {
    int has = (int)(*found & 15);
    if (bytes && has != bytes) fail(d, "register %s has %d bytes, not %d", name, has, bytes);
    if (got) *got = has;
    return (uint32_t)(*found >> 4);
  }
  if (number(name, &value) || symbol(d, name, &value)) {
    if (got) *got = bytes ? bytes : 4;
    return constant(d, value, bytes ? bytes : 4);
  }
  fail(d, "operand %s is not known", name);
}
static uint32_t predicate(Decoder* d, const char* t) { return operand(d, t, 1, NULL); }

static void add_result(Decoder* d, Instruction* x, const char* t, int bytes) {
  int got;
  if (x->d_count == 4) fail(d, "more than four results");
  x->d[x->d_count] = operand(d, t, bytes, &got);
  x->d_bytes[x->d_count++] = (uint8_t)got;
}
static void add_source(Decoder* d, Instruction* x, const char* t, int bytes) {
  int got;
  if (x->s_count == 6) fail(d, "more than six sources");
  x->s[x->s_count] = operand(d, t, bytes, &got);
  x->s_bytes[x->s_count++] = (uint8_t)got;
}

// Splits `a, {b, c}, [d+4]` at the outer commas, in place.
static int split(char* t, char** parts, int room) {
  int count = 0, depth = 0;
  while (isspace((unsigned char)*t)) t++;
  if (!*t) return 0;
  parts[count++] = t;
  for (; *t; t++) {
    if (strchr("{[(", *t)) depth++;
    if (strchr("}])", *t)) depth--;
    if (*t != ',' || depth) continue;
    *t++ = 0;
    while (isspace((unsigned char)*t)) t++;
    if (count == room) return -1;
    parts[count++] = t--;
  }
  return count;
}

// The members of `{a, b}`, or the operand itself.
static int members(Decoder* d, char* t, char** parts) {
  if (*t != '{') {
    parts[0] = t;
    return 1;
  }
  char* end = strchr(t, '}');
  if (!end) fail(d, "a vector without its end");
  *end = 0;
  int count = split(t + 1, parts, 4);
  if (count < 1) fail(d, "a vector of more than four");
  return count;
}

// `[%rd1+16]`: the base into the first source, the rest into the offset. A variable may be the base.
static void add_address(Decoder* d, Instruction* x, char* t) {
  char *open = strchr(t, '['), *close = strchr(t, ']');
  if (!open || !close) fail(d, "an address is expected");
  *close = 0;
  char* plus = strchr(open, '+');
  if (plus) {
    *plus = 0;
    x->offset = strtoll(plus + 1, NULL, 0);
  }
  char* name = open + 1;
  while (isspace((unsigned char)*name)) name++;
  const int64_t* found = find_register(d, name);
  add_source(d, x, name, found ? 0 : 8);
}

// ---- the words of a mnemonic
typedef struct {
  char text[120], *word[16];
  int count;
} Mnemonic;

// What changes nothing here: rounding to nearest, denormals (kept), precision of approximations (all are as good as the C
// library's), hints for caches, scopes and orders of memory (one device thread runs everything in order).
static bool ignorable(const char* word) {
  static const char* const list[] = {"rn",  "ftz", "approx", "full", "uni", "sync", "aligned", "relaxed", "acquire", "release", "acq_rel", "sc",
                                     "weak", "volatile", "gpu", "sys", "cta", "cluster", "global", "const", "nc", "noftz", "ca", "cg",
                                     "cs", "lu", "cv", "wb", "wt", "gl", "proxy", "async", "wait", "launch_dependents", "evict_first",
                                     "evict_last", "mbarrier_init"};
  if (strstr(word, "L1::") || strstr(word, "L2::")) return true;
  for (size_t i = 0; i < sizeof list / sizeof *list; i++)
    if (!strcmp(list[i], word)) return true;
  return false;
}
static void read_mnemonic(Decoder* d, Mnemonic* m, const char* t) {
  if (strlen(t) >= sizeof m->text) fail(d, "a mnemonic of %zu characters", strlen(t));
  memcpy(m->text, t, strlen(t) + 1);
  m->count = 0;
  char* rest = m->text;
  for (char* word; (word = strsep(&rest, "."));) {
    if (m->count == 16) fail(d, "a mnemonic of many words");
    if (!m->count || !ignorable(word)) m->word[m->count++] = word;
  }
}
// True if the word is there; takes it out.
static bool take(Mnemonic* m, const char* word) {
  for (int i = 1; i < m->count; i++) {
    size_t n = strcspn(m->word[i], ":");  // `shared::cta` is `shared`
    if (strncmp(m->word[i], word, n) || strlen(word) != n) continue;
    memmove(&m->word[i], &m->word[i + 1], sizeof(char*) * (size_t)(m->count - i - 1));
    m->count--;
    return true;
  }
  return false;
}
static int take_vector(Mnemonic* m) { return take(m, "v2") ? 2 : take(m, "v4") ? 4 : 1; }
static const char* last(const Mnemonic* m) { return m->word[m->count - 1]; }
static void join_words(const Mnemonic* m, char* out, size_t room) {
  size_t n = 0;
  for (int i = 0; i < m->count; i++) n += (size_t)snprintf(out + n, n < room ? room - n : 0, i ? ".%s" : "%s", m->word[i]);
}
static int bytes_of(Decoder* d, const char* type) {
  const char* digits = type + strcspn(type, "0123456789");
  int bits = atoi(digits);
  if (!strcmp(type, "pred")) return 1;
  if (!strchr("busf", *type) || bits < 8 || bits > 64) fail(d, "type %s is not known", type);
  return bits / 8;
}

// ---- instructions
static Instruction* emit(Decoder* d) {
  Program* p = d->program;
  if (p->count == d->code_room) {
    d->code_room = d->code_room ? 2 * d->code_room : 256;
    p->code = realloc(p->code, sizeof(Instruction) * (size_t)d->code_room);
  }
  Instruction* x = &p->code[p->count++];
  *x = (Instruction){.guard = -1};
  return x;
}
static void jump_to(Decoder* d, Instruction* x, const char* label) {
  x->flow = BRANCH;
  d->jumps = realloc(d->jumps, sizeof(Jump) * (size_t)(d->jump_count + 1));
  d->jumps[d->jump_count++] = (Jump){(int)(x - d->program->code), d->scope, strdup(label)};
}

static void decode_move(Decoder* d, Instruction* x, Mnemonic* m, char** part) {
  char *to[4], *from[4];
  int d_count = members(d, part[0], to), s_count = members(d, part[1], from), bytes = bytes_of(d, last(m));
  if (m->count > 2) fail(d, "instruction is not known");
  for (int i = 0; i < d_count; i++) add_result(d, x, to[i], d_count > 1 ? bytes / d_count : bytes);
  for (int i = 0; i < s_count; i++) add_source(d, x, from[i], s_count > 1 ? bytes / s_count : bytes);
  if (d_count > 1 && s_count > 1) fail(d, "a vector to a vector");
  x->run = move_handler(d_count, s_count, bytes);
}

// Generic addresses are the host's; those of shared memory begin at 0 in each block; local memory has generic ones from the start.
static void decode_convert_address(Decoder* d, Instruction* x, Mnemonic* m, char** part) {
  bool to = take(m, "to"), shared = take(m, "shared");
  take(m, "local");
  add_result(d, x, part[0], 0);
  add_source(d, x, part[1], find_register(d, part[1]) ? 0 : x->d_bytes[0]);
  if (m->count > 2) fail(d, "instruction is not known");
  x->run = shared ? to ? from_generic_shared : to_generic_shared : move_handler(1, 1, x->d_bytes[0]);
}

static void decode_convert(Decoder* d, Instruction* x, Mnemonic* m, char** part) {
  const char *from = last(m), *to = m->count > 2 ? m->word[m->count - 2] : "";
  m->count -= 2;
  bool sat = take(m, "sat");
  if (sat && (*from == 'f' || *from == 'b') && (*to == 's' || *to == 'u')) sat = false;  // these saturate anyway
  const char* rounding = m->count > 1 ? m->word[1] : sat ? "sat" : "";
  add_result(d, x, part[0], 0);
  add_source(d, x, part[1], find_register(d, part[1]) ? 0 : bytes_of(d, from));
  x->run = m->count > 2 || (sat && m->count > 1) ? NULL : conversion(to, from, rounding, x);
  if (!x->run) fail(d, "conversion is not known");
}

static void decode_compare(Decoder* d, Instruction* x, Mnemonic* m, char** part, int count) {
  x->combine = take(m, "and") ? 1 : take(m, "or") ? 2 : take(m, "xor") ? 3 : 0;
  char* second = strchr(part[0], '|');
  if (second) *second = 0;
  x->d[x->d_count++] = predicate(d, part[0]);
  if (second) x->d[x->d_count++] = predicate(d, second + 1);
  if (m->count != 3 || count != (x->combine ? 4 : 3)) fail(d, "comparison is not known");
  int bytes = bytes_of(d, strcmp(last(m), "bf16") ? last(m) : "b16");
  for (int i = 1; i < 3; i++) add_source(d, x, part[i], bytes);
  if (x->combine) add_source(d, x, part[3], 1);
  x->run = comparison(m->word[1], last(m));
  if (!x->run) fail(d, "comparison is not known");
}

// From a register into one that may be wider or narrower.
static void copy_integer(Decoder* d, Instruction* x, bool is_signed) {
  static const char* const names[][2] = {[2] = {"u16", "s16"}, [4] = {"u32", "s32"}, [8] = {"u64", "s64"}};
  int to = x->d_bytes[0], from = x->s_bytes[0];
  if (to != from && (to < 2 || from < 2)) fail(d, "a predicate as a number");
  x->run = to == from ? move_handler(1, 1, to) : conversion(names[to][is_signed], names[from][is_signed], "", x);
}

// The register of a part of an array of bytes; its users agree on the part's width.
static int64_t field(Decoder* d, int64_t aggregate, int64_t offset, int bytes) {
  char key[48];
  snprintf(key, sizeof key, "%ld:%ld", aggregate, offset);
  const int64_t* found = look_up(&d->fields, key);
  int64_t place = found ? *found : (int64_t)take_place(d, bytes) * 16 + bytes;
  if ((place & 15) != bytes) fail(d, "a part of %ld bytes of a parameter, in %d bytes", place & 15, bytes);
  if (!found) keep(&d->fields, key, place);
  return place;
}

// A place in the parameters of the entry, or of a function that is called or calls: then a register.
static void decode_parameter(Decoder* d, Instruction* x, bool load, char* address, char* value, int bytes, bool is_signed) {
  char *open = strchr(address, '['), *close = strchr(address, ']'), *part[4];
  if (!open || !close) fail(d, "an address is expected");
  *close = 0;
  char *plus = strchr(open, '+'), *name = open + 1;
  int64_t offset = plus ? strtoll(plus + 1, NULL, 0) : 0;
  if (plus) *plus = 0;
  int count = members(d, value, part);
  const Function* f = d->function;
  for (int i = 0; load && !d->depth && i < f->parameter_count; i++) {
    if (strcmp(f->parameters[i].name, name)) continue;
    if (is_signed && bytes < 4) fail(d, "a narrow signed parameter");
    for (int k = 0; k < count; k++) add_result(d, x, part[k], 0);
    x->offset = f->parameters[i].offset + offset;
    x->mode = (uint8_t)bytes;
    x->run = load_parameter;
    return;
  }
  const int64_t *found = find_register(d, name), whole = found ? *found : 0;
  bool aggregate = found && !(whole & 15);
  if (!found || (!aggregate && (offset || count > 1))) fail(d, "parameter %s is not known", name);
  Instruction guarded = *x;
  for (int k = 0; k < count; k++) {  // an instruction for each register
    if (k) *(x = emit(d)) = guarded;
    int64_t place = aggregate ? field(d, whole >> 4, offset + k * bytes, bytes) : whole;
    int has = (int)(place & 15);
    if (load) {
      add_result(d, x, part[k], 0);
      x->s[x->s_count] = (uint32_t)(place >> 4);
      x->s_bytes[x->s_count++] = (uint8_t)has;
    } else {
      x->d[x->d_count] = (uint32_t)(place >> 4);
      x->d_bytes[x->d_count++] = (uint8_t)has;
      add_source(d, x, part[k], find_register(d, part[k]) ? 0 : has);
    }
    copy_integer(d, x, is_signed);
  }
}

static void decode_memory(Decoder* d, Instruction* x, Mnemonic* m, char** part) {
  bool load = !strcmp(m->word[0], "ld"), is_signed = *last(m) == 's';
  bool shared = take(m, "shared"), parameter = take(m, "param");
  take(m, "local");
  int count = take_vector(m), bytes = bytes_of(d, strcmp(last(m), "bf16") ? last(m) : "b16");
  if (m->count != 2) fail(d, "instruction is not known");
  char *address = part[load ? 1 : 0], *value = part[load ? 0 : 1], *each[4];
  if (parameter) {
    decode_parameter(d, x, load, address, value, bytes, is_signed);
    return;
  }
  x->space = shared ? SHARED : GENERIC;
  add_address(d, x, address);
  if (members(d, value, each) != count) fail(d, "a vector of another length");
  for (int i = 0; i < count; i++) {
    if (load) add_result(d, x, each[i], 0);
    else add_source(d, x, each[i], find_register(d, each[i]) ? 0 : bytes < 2 ? 2 : bytes);
  }
  x->run = load ? load_handler(bytes, is_signed, x->d_bytes[0]) : store_handler(bytes, x->s_bytes[1]);
  if (!x->run) fail(d, "a register that does not fit");
}

static void decode_matrices(Decoder* d, Instruction* x, Mnemonic* m, char** part) {
  bool load = !strcmp(m->word[0], "ldmatrix");
  int count = take(m, "x4") ? 4 : take(m, "x2") ? 2 : take(m, "x1") ? 1 : 0;
  x->mode = take(m, "trans");
  bool known = take(m, "m8n8") && take(m, "shared") && take(m, "b16") && m->count == 1;
  char* each[4];
  if (!known || !count) fail(d, "instruction is not known");
  x->space = SHARED;
  add_address(d, x, part[load ? 1 : 0]);
  if (members(d, part[load ? 0 : 1], each) != count) fail(d, "a vector of another length");
  for (int i = 0; i < count; i++) {
    if (load) add_result(d, x, each[i], 4);
    else add_source(d, x, each[i], 4);
  }
  x->run = load ? load_matrices : store_matrices;
}

static void decode_atomic(Decoder* d, Instruction* x, Mnemonic* m, char** part, int count) {
  bool result = !strcmp(m->word[0], "atom");
  x->space = take(m, "shared") ? SHARED : GENERIC;
  if (m->count != 3) fail(d, "instruction is not known");
  int bytes = bytes_of(d, strcmp(last(m), "bf16") ? last(m) : "b16");
  if (result) add_result(d, x, part[0], bytes);
  add_address(d, x, part[result]);
  for (int i = result + 1; i < count; i++) add_source(d, x, part[i], bytes);
  x->run = atomic_handler(m->word[1], last(m));
  if (!x->run) fail(d, "instruction is not known");
}

// By the table: results and sources as the row's signature has them.
static void decode_row(Decoder* d, Instruction* x, Mnemonic* m, char** part, int count) {
  char form[160];
  join_words(m, form, sizeof form);
  if (!strncmp(form, "membar", 6) || !strncmp(form, "fence", 5)) form[*form == 'm' ? 6 : 5] = 0;
  const Row* row = find_row(form);
  if (!row) fail(d, "instruction is not known");
  const char* sources = strchr(row->signature, '=') + 1;
  int i = 0;
  for (const char* s = row->signature; *s != '='; s++, i++) {
    if (i >= count) fail(d, "operands are missing");
    char* second = strchr(part[i], '|');
    if (second) *second = 0;
    add_result(d, x, part[i], *s == 'p' ? 1 : *s - '0');
    if (second) add_result(d, x, second + 1, 1);
  }
  if (count - i != (int)strlen(sources)) fail(d, "%d sources, not %zu", count - i, strlen(sources));
  for (const char* s = sources; *s; s++, i++) add_source(d, x, part[i], *s == 'p' ? 1 : *s - '0');
  x->run = row->run;
  x->flow = row->flow;
  x->mode = row->mode;
}

static void decode_call(Decoder* d, Mnemonic* m, char** part, int count);

static void decode_instruction(Decoder* d, char* t) {
  int32_t guard = -1;
  bool negated = false;
  if (*t == '@') {
    negated = t[1] == '!';
    char* name = t + 1 + negated;
    t = name + strcspn(name, " \t\n");
    *t++ = 0;
    guard = (int32_t)predicate(d, name);
    while (isspace((unsigned char)*t)) t++;
  }
  char *operands = t + strcspn(t, " \t\n"), *part[16];
  if (*operands) *operands++ = 0;
  Mnemonic m;
  read_mnemonic(d, &m, t);
  int count = split(operands, part, 16);
  if (count < 0) fail(d, "many operands");
  const char* base = m.word[0];
  if (!strcmp(base, "call")) {
    if (guard >= 0) fail(d, "a call under a predicate");
    decode_call(d, &m, part, count);
    return;
  }
  Instruction* x = emit(d);
  x->guard = guard;
  x->guard_negated = negated;
#define IS(name) (!strcmp(base, name))
#define NEEDS(n) if (count < (n)) fail(d, "operands are missing")
  if (IS("bra")) {
    NEEDS(1);
    jump_to(d, x, part[0]);
  } else if (IS("ret") && d->return_label) {
    jump_to(d, x, d->return_label);
  } else if (IS("ret") || IS("exit")) {
    x->flow = EXIT;
  } else if ((IS("bar") || IS("barrier")) && m.count == 1) {
    if (count > 1) fail(d, "a barrier for some of the threads");
    x->flow = BARRIER;
  } else if (IS("mov")) {
    NEEDS(2);
    decode_move(d, x, &m, part);
  } else if (IS("cvta")) {
    NEEDS(2);
    decode_convert_address(d, x, &m, part);
  } else if (IS("cvt") && count == 2) {
    decode_convert(d, x, &m, part);
  } else if (IS("setp")) {
    NEEDS(3);
    decode_compare(d, x, &m, part, count);
  } else if (IS("ld") || IS("st")) {
    NEEDS(2);
    decode_memory(d, x, &m, part);
  } else if (IS("ldmatrix") || IS("stmatrix")) {
    NEEDS(2);
    decode_matrices(d, x, &m, part);
  } else if (IS("atom") || IS("red")) {
    NEEDS(2);
    decode_atomic(d, x, &m, part, count);
  } else {
    decode_row(d, x, &m, part, count);
  }
}

// ---- declarations within a function
static void declare_registers(Decoder* d, char* t) {
  char* words = t + 4;
  while (isspace((unsigned char)*words)) words++;
  char* type = words + 1;
  words += strcspn(words, " \t");
  *words++ = 0;
  int bytes = bytes_of(d, type);
  if (bytes == 1 && strcmp(type, "pred")) bytes = 2;  // registers of eight bits live in sixteen
  char* part[64];
  int count = split(words, part, 64);
  if (count < 0) fail(d, "many registers in one declaration");
  for (int i = 0; i < count; i++) {
    char* range = strchr(part[i], '<');
    if (!range) {
      part[i][strcspn(part[i], " \t\n")] = 0;
      declare(d, d->scope, part[i], bytes);
      continue;
    }
    *range = 0;
    if (d->scope->family_count == 32) fail(d, "many families of registers");
    Family* f = &d->scope->families[d->scope->family_count++];
    snprintf(f->prefix, sizeof f->prefix, "%s", part[i]);
    f->bytes = bytes;
  }
}

static void declare_variable(Decoder* d, char* t) {
  bool shared = !strncmp(t, ".shared", 7), local = !strncmp(t, ".local", 6);
  char *align = strstr(t, ".align"), *bracket = strchr(t, '[');
  int alignment = align ? (int)strtol(align + 6, NULL, 10) : 8, count = bracket ? (int)strtol(bracket + 1, NULL, 10) : 1;
  if (bracket) *bracket = 0;
  char* end = t + strlen(t);
  while (isspace((unsigned char)end[-1])) *--end = 0;
  char* name = end;
  while (name > t && !isspace((unsigned char)name[-1])) name--;
  char *type = strstr(t, ".b"), *other = type ? type : strpbrk(t + 7, ".");
  int bytes = count * (other ? bytes_of(d, strndupa(other + 1, strcspn(other + 1, " \t"))) : 1);
  Program* p = d->program;
  if (shared) {
    place_shared(d, name, bytes, alignment);
  } else if (local) {
    p->local_bytes = (p->local_bytes + alignment - 1) / alignment * alignment;
    int64_t made = declare(d, d->scope, name, 8);
    p->locals = realloc(p->locals, sizeof(struct Local) * (size_t)(p->local_count + 1));
    p->locals[p->local_count++] = (struct Local){(uint32_t)(made >> 4), p->local_bytes};
    p->local_bytes += bytes;
  } else {  // .param: of a call
    if (bracket) keep(&d->scope->registers, name, (int64_t)d->aggregate_count++ * 16);
    else if (bytes == 2 || bytes == 4 || bytes == 8) declare(d, d->scope, name, bytes);
    else fail(d, "a parameter of %d bytes in a call", bytes);
  }
}

// ---- statements
static const char* skip_blanks(const char* t) {
  for (;;) {
    while (isspace((unsigned char)*t)) t++;
    if (t[0] != '/' || (t[1] != '/' && t[1] != '*')) return t;
    const char* end = t[1] == '/' ? strchr(t, '\n') : strstr(t, "*/");
    if (!end) return t + strlen(t);
    t = t[1] == '/' ? end : end + 2;
  }
}

static void decode_statement(Decoder* d, const char* t, size_t n) {
  char copy[2048];
  if (n >= sizeof copy) fail(d, "a statement of %zu characters", n);
  memcpy(copy, t, n);
  copy[n] = 0;
  snprintf(d->statement, sizeof d->statement, "%.150s", copy);
  for (char* c = d->statement; *c; c++)
    if (isspace((unsigned char)*c)) *c = ' ';
  if (!strncmp(copy, ".reg", 4)) declare_registers(d, copy);
  else if (!strncmp(copy, ".shared", 7) || !strncmp(copy, ".local", 6) || !strncmp(copy, ".param", 6)) declare_variable(d, copy);
  else if (*copy == '.' && strncmp(copy, ".pragma", 7)) fail(d, "directive is not known");
  else if (*copy != '.') decode_instruction(d, copy);
  *d->statement = 0;
}

// From behind the function's `{` to its `}`.
static void decode_body(Decoder* d, const char* t) {
  Scope* own = d->scope;
  while (*(t = skip_blanks(t))) {
    if (*t == '}' && d->scope == own) return;
    if (*t == '}') {
      d->scope = d->scope->outer;
      t++;
    } else if (*t == '{') {
      enter(d, d->scope);
      t++;
    } else if (!strncmp(t, ".loc", 4) && isspace((unsigned char)t[4])) {
      t += strcspn(t, "\n");
    } else {
      size_t word = strcspn(t, " \t\n:;{");
      if (t[word] == ':' && t[word + 1] != ':') {
        keep(&d->scope->labels, strndupa(t, word), d->program->count);
        t += word + 1;
        continue;
      }
      const char* end = strchr(t, ';');
      if (!end) fail(d, "a statement without its end");
      decode_statement(d, t, (size_t)(end - t));
      t = end + 1;
    }
  }
  fail(d, "a function without its end");
}

// The definition of a function (not its declaration): where its name stands.
static const char* find_definition(const Module* module, const char* kind, const char* name) {
  size_t n = strlen(name);
  for (const char* t = module->ptx; (t = strstr(t, kind));) {
    t += strlen(kind);
    const char* at = strstr(t, name);
    const char *brace = strchr(t, '{'), *semicolon = strchr(t, ';');
    if (!at || !brace) return NULL;
    bool whole = !isalnum((unsigned char)at[n]) && at[n] != '_' && at[n] != '$' && (isspace((unsigned char)at[-1]) || at[-1] == ')');
    if (whole && at < brace && (!semicolon || brace < semicolon)) return at;
  }
  return NULL;
}

static void resolve_jumps(Decoder* d) {
  for (int i = 0; i < d->jump_count; i++) {
    const int64_t* found = NULL;
    for (Scope* s = d->jumps[i].scope; s && !found; s = s->outer) found = look_up(&s->labels, d->jumps[i].label);
    if (!found) fail(d, "label %s is not known", d->jumps[i].label);
    d->program->code[d->jumps[i].instruction].target = (int32_t)*found;
  }
}

// The formal parameters in `(.param .b32 a, .param .b64 b)` become names of the caller's registers.
static void name_parameters(Decoder* d, const char* t, const char* end, char** given, int count, const Scope* caller) {
  for (int i = 0; i < count; i++) {
    t = strstr(t, ".param");
    if (!t || t > end) fail(d, "a call with other parameters than the function's");
    const char* stop = t + strcspn(t, ",)[");
    while (isspace((unsigned char)stop[-1])) stop--;
    const char* start = stop;
    while (!isspace((unsigned char)start[-1])) start--;
    const char* name = strndupa(start, (size_t)(stop - start));
    const int64_t* found = NULL;
    given[i][strcspn(given[i], " \t\n)")] = 0;
    for (const Scope* s = caller; s && !found; s = s->outer) found = look_up(&s->registers, given[i]);
    if (!found) fail(d, "parameter %s of a call", given[i]);
    keep(&d->scope->registers, name, *found);
    t = stop;
  }
}

// `call.uni (result), function, (arguments)`: the function's body stands here.
static void decode_call(Decoder* d, UNUSED Mnemonic* m, char** part, int count) {
  char *results[4], *arguments[16];
  int result_count = *part[0] == '(' ? split(part[0] + 1, results, 4) : 0, at = *part[0] == '(';
  int argument_count = count > at + 1 ? split(part[at + 1] + 1, arguments, 16) : 0;
  if (at >= count || result_count < 0 || argument_count < 0) fail(d, "a call of this form");
  char* name = part[at];
  name[strcspn(name, " \t\n")] = 0;
  const char* definition = find_definition(d->module, ".func", name);
  if (!definition || d->depth == 20) fail(d, "call of %s", name);
  const char *line = definition, *brace = strchr(definition, '{');
  while (strncmp(line, ".func", 5)) line--;
  Scope* caller = d->scope;
  const char* return_label = d->return_label;
  if (argument_count && *arguments[argument_count - 1] == ')') argument_count--;
  enter(d, NULL);
  name_parameters(d, line, definition, results, result_count, caller);
  name_parameters(d, definition, brace, arguments, argument_count, caller);
  d->return_label = "<end of call>";
  d->depth++;
  Scope* own = d->scope;
  decode_body(d, brace + 1);
  keep(&own->labels, "<end of call>", d->program->count);
  d->depth--;
  d->return_label = return_label;
  d->scope = caller;
}

static void free_decoder(Decoder* d) {
  for (Scope *s = d->made, *next; s; s = next) {
    next = s->next_made;
    free_names(&s->registers);
    free_names(&s->labels);
    free(s);
  }
  for (int i = 0; i < d->jump_count; i++) free(d->jumps[i].label);
  free(d->jumps);
  free_names(&d->constants);
  free_names(&d->fields);
  free_names(&d->shared);
}

static void free_program(Program* p) {
  free(p->code);
  free(p->constants);
  free(p->locals);
  free(p);
}

static bool decode_entry(Decoder* d) {
  if (setjmp(d->failed)) return false;
  const char* at = find_definition(d->module, ".entry", d->function->name);
  if (!at) fail(d, "it has no PTX");
  enter(d, NULL);
  decode_body(d, strchr(at, '{') + 1);
  emit(d)->flow = EXIT;
  resolve_jumps(d);
  return true;
}

Program* decode(const Module* module, const Function* function, char* error, size_t room) {
  Decoder d = {.module = module, .function = function, .program = calloc(1, sizeof(Program)), .error = error, .room = room};
  for (int i = 0; i < SPECIAL_COUNT; i++) d.program->special[i] = -1;
  bool decoded = decode_entry(&d);
  free_decoder(&d);
  if (!decoded) free_program(d.program);
  return decoded ? d.program : NULL;
}
