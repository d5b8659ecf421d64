// What each instruction of PTX does, and the table of those that are known.
#include <fenv.h>

#include "numbers.h"
#include "ptx_machine.h"

#define VECTOR(T, place) ((T*)&w->registers[place])
// The loop over lanes; whole warps apart, since most are and then nothing has to be masked.
#define EACH_LANE(...)                                  \
  if (mask == ALL) {                                    \
    _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) { __VA_ARGS__; } \
  } else {                                              \
    _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) \
      if (mask >> l & 1) { __VA_ARGS__; }               \
  }
#define HANDLER(name) static void name(UNUSED Warp* w, UNUSED const Instruction* x, UNUSED uint32_t mask)

// One, two and three sources of type A (and B, C), a result of type R: `a`, `b` and `c` are the lane's.
#define UNARY(name, R, A, expression)               \
  HANDLER(name) {                                   \
    R* d = VECTOR(R, x->d[0]);                      \
    const A* sa = VECTOR(const A, x->s[0]);         \
    EACH_LANE(A a = sa[l]; d[l] = (R)(expression))  \
  }
#define BINARY3(name, R, A, B, expression)                      \
  HANDLER(name) {                                               \
    R* d = VECTOR(R, x->d[0]);                                  \
    const A* sa = VECTOR(const A, x->s[0]);                     \
    const B* sb = VECTOR(const B, x->s[1]);                     \
    EACH_LANE(A a = sa[l]; B b = sb[l]; d[l] = (R)(expression)) \
  }
#define BINARY(name, T, expression) BINARY3(name, T, T, T, expression)
#define TERNARY4(name, R, A, B, C, expression)                             \
  HANDLER(name) {                                                          \
    R* d = VECTOR(R, x->d[0]);                                             \
    const A* sa = VECTOR(const A, x->s[0]);                                \
    const B* sb = VECTOR(const B, x->s[1]);                                \
    const C* sc = VECTOR(const C, x->s[2]);                                \
    EACH_LANE(A a = sa[l]; B b = sb[l]; C c = sc[l]; d[l] = (R)(expression)) \
  }
#define TERNARY(name, T, expression) TERNARY4(name, T, T, T, T, expression)

HANDLER(nothing) {}

// ---- integers
#define INTEGER(bits)                                                              \
  BINARY(add_##bits, uint##bits##_t, a + b)                                        \
  BINARY(sub_##bits, uint##bits##_t, a - b)                                        \
  BINARY(mul_##bits, uint##bits##_t, (uint64_t)a * b)                              \
  TERNARY(mad_##bits, uint##bits##_t, (uint64_t)a * b + c)                         \
  BINARY(div_u##bits, uint##bits##_t, b ? a / b : (uint##bits##_t)-1)              \
  BINARY(rem_u##bits, uint##bits##_t, b ? a % b : a)                               \
  BINARY(div_s##bits, int##bits##_t, b == -1 ? (int##bits##_t) - (uint##bits##_t)a : b ? a / b : -1) \
  BINARY(rem_s##bits, int##bits##_t, b == -1 ? 0 : b ? a % b : a)                  \
  BINARY(min_u##bits, uint##bits##_t, a < b ? a : b)                               \
  BINARY(max_u##bits, uint##bits##_t, a > b ? a : b)                               \
  BINARY(min_s##bits, int##bits##_t, a < b ? a : b)                                \
  BINARY(max_s##bits, int##bits##_t, a > b ? a : b)                                \
  UNARY(neg_##bits, uint##bits##_t, uint##bits##_t, -a)                            \
  UNARY(abs_##bits, uint##bits##_t, int##bits##_t, a < 0 ? -(uint##bits##_t)a : (uint##bits##_t)a) \
  BINARY(and_##bits, uint##bits##_t, a & b)                                        \
  BINARY(or_##bits, uint##bits##_t, a | b)                                         \
  BINARY(xor_##bits, uint##bits##_t, a ^ b)                                        \
  UNARY(not_##bits, uint##bits##_t, uint##bits##_t, ~a)                            \
  BINARY3(shl_##bits, uint##bits##_t, uint##bits##_t, uint32_t, b >= bits ? 0 : a << b)       \
  BINARY3(shr_u##bits, uint##bits##_t, uint##bits##_t, uint32_t, b >= bits ? 0 : a >> b)      \
  BINARY3(shr_s##bits, int##bits##_t, int##bits##_t, uint32_t, a >> (b >= bits ? bits - 1 : b))
INTEGER(16)
INTEGER(32)
INTEGER(64)
BINARY3(mul_wide_u16, uint32_t, uint16_t, uint16_t, (uint32_t)a * b)
BINARY3(mul_wide_s16, int32_t, int16_t, int16_t, (int32_t)a * b)
BINARY3(mul_wide_u32, uint64_t, uint32_t, uint32_t, (uint64_t)a * b)
BINARY3(mul_wide_s32, int64_t, int32_t, int32_t, (int64_t)a * b)
TERNARY4(mad_wide_u16, uint32_t, uint16_t, uint16_t, uint32_t, (uint32_t)a * b + c)
TERNARY4(mad_wide_s16, uint32_t, int16_t, int16_t, uint32_t, (uint32_t)((int32_t)a * b) + c)
TERNARY4(mad_wide_u32, uint64_t, uint32_t, uint32_t, uint64_t, (uint64_t)a * b + c)
TERNARY4(mad_wide_s32, uint64_t, int32_t, int32_t, uint64_t, (uint64_t)((int64_t)a * b) + c)
BINARY(mul_hi_u16, uint16_t, ((uint32_t)a * b) >> 16)
BINARY(mul_hi_s16, int16_t, ((int32_t)a * b) >> 16)
BINARY(mul_hi_u32, uint32_t, ((uint64_t)a * b) >> 32)
BINARY(mul_hi_s32, int32_t, ((int64_t)a * b) >> 32)
BINARY(mul_hi_u64, uint64_t, ((unsigned __int128)a * b) >> 64)
BINARY(mul_hi_s64, int64_t, ((__int128)a * b) >> 64)
TERNARY(mad_hi_u32, uint32_t, (((uint64_t)a * b) >> 32) + c)
TERNARY(mad_hi_s32, uint32_t, (uint32_t)(((int64_t)(int32_t)a * (int32_t)b) >> 32) + c)
UNARY(popc_32, uint32_t, uint32_t, __builtin_popcount(a))
UNARY(popc_64, uint32_t, uint64_t, __builtin_popcountll(a))
UNARY(clz_32, uint32_t, uint32_t, a ? __builtin_clz(a) : 32)
UNARY(clz_64, uint32_t, uint64_t, a ? __builtin_clzll(a) : 64)
UNARY(bfind_u32, uint32_t, uint32_t, a ? 31 - __builtin_clz(a) : -1)

static uint64_t reversed(uint64_t v, int bits) {
  uint64_t r = 0;
  for (int i = 0; i < bits; i++) r |= (v >> i & 1) << (bits - 1 - i);
  return r;
}
UNARY(brev_32, uint32_t, uint32_t, reversed(a, 32))
UNARY(brev_64, uint64_t, uint64_t, reversed(a, 64))

static uint64_t field(uint64_t v, unsigned start, unsigned length, int bits, bool is_signed) {
  start &= 255;
  length &= 255;
  uint64_t r = start > 63 ? 0 : v >> start;
  if (length >= (unsigned)bits) return r;
  r &= ((uint64_t)1 << length) - 1;
  return is_signed && length && r >> (length - 1) & 1 ? r | ~(((uint64_t)1 << length) - 1) : r;
}
TERNARY4(bfe_u32, uint32_t, uint32_t, uint32_t, uint32_t, field(a, b, c, 32, false))
TERNARY4(bfe_s32, uint32_t, int32_t, uint32_t, uint32_t, field((uint64_t)(int64_t)a, b, c, 32, true))
TERNARY4(bfe_u64, uint64_t, uint64_t, uint32_t, uint32_t, field(a, b, c, 64, false))
HANDLER(bfi_32) {
  uint32_t* d = VECTOR(uint32_t, x->d[0]);
  const uint32_t *a = VECTOR(const uint32_t, x->s[0]), *b = VECTOR(const uint32_t, x->s[1]);
  const uint32_t *start = VECTOR(const uint32_t, x->s[2]), *length = VECTOR(const uint32_t, x->s[3]);
  EACH_LANE(uint64_t ones = ((uint64_t)1 << (length[l] > 32 ? 32 : length[l])) - 1;
            uint32_t bits = start[l] > 31 ? 0 : (uint32_t)(ones << start[l]);
            d[l] = (b[l] & ~bits) | (start[l] > 31 ? 0 : a[l] << start[l] & bits))
}

static uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t which = selector >> (4 * i) & 15, byte = bytes >> (8 * (which & 7)) & 255;
    if (which & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}
TERNARY(prmt, uint32_t, permuted(a, b, c))
TERNARY(shf_l_wrap, uint32_t, (((uint64_t)b << 32 | a) << (c & 31)) >> 32)
TERNARY(shf_r_wrap, uint32_t, ((uint64_t)b << 32 | a) >> (c & 31))
TERNARY(shf_l_clamp, uint32_t, c >= 32 ? a : (((uint64_t)b << 32 | a) << c) >> 32)
TERNARY(shf_r_clamp, uint32_t, c >= 32 ? b : ((uint64_t)b << 32 | a) >> c)

static uint32_t looked_up(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t r = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
HANDLER(lop3) {
  uint32_t* d = VECTOR(uint32_t, x->d[0]);
  const uint32_t *a = VECTOR(const uint32_t, x->s[0]), *b = VECTOR(const uint32_t, x->s[1]);
  const uint32_t *c = VECTOR(const uint32_t, x->s[2]), *table = VECTOR(const uint32_t, x->s[3]);
  EACH_LANE(d[l] = looked_up(a[l], b[l], c[l], table[l]))
}

// Carries: the row's mode says whether one is read (1), written (2), or both (3).
#define CARRYING(name, expression)                                                      \
  HANDLER(name) {                                                                       \
    uint32_t* d = VECTOR(uint32_t, x->d[0]);                                            \
    const uint32_t *sa = VECTOR(const uint32_t, x->s[0]), *sb = VECTOR(const uint32_t, x->s[1]); \
    const uint32_t* sc = x->s_count > 2 ? VECTOR(const uint32_t, x->s[2]) : sb;         \
    for (int l = 0; l < LANES; l++) {                                                   \
      if (!(mask >> l & 1)) continue;                                                   \
      uint64_t a = sa[l], b = sb[l];                                                    \
      UNUSED uint64_t c = sc[l];                                                        \
      uint64_t in = x->mode & 1 ? w->carry >> l & 1 : 0, sum = expression;              \
      if (x->mode & 2) w->carry = (w->carry & ~(1u << l)) | (uint32_t)(sum >> 32 & 1) << l; \
      d[l] = (uint32_t)sum;                                                             \
    }                                                                                   \
  }
CARRYING(add_carry, a + b + in)
CARRYING(sub_carry, a - b - in)
CARRYING(mad_lo_carry, (uint32_t)(a * b) + c + in)
CARRYING(mad_hi_carry, (a * b >> 32) + c + in)

// ---- predicates: a word with a bit per lane
static void set_bits(Warp* w, uint32_t place, uint32_t mask, uint32_t bits) {
  w->registers[place] = (w->registers[place] & ~mask) | (bits & mask);
}
#define PREDICATE(name, expression)                                             \
  HANDLER(name) {                                                               \
    uint32_t a = w->registers[x->s[0]], b = x->s_count > 1 ? w->registers[x->s[1]] : 0; \
    (void)b;                                                                    \
    set_bits(w, x->d[0], mask, expression);                                     \
  }
PREDICATE(and_pred, a & b)
PREDICATE(or_pred, a | b)
PREDICATE(xor_pred, a ^ b)
PREDICATE(not_pred, ~a)
PREDICATE(mov_pred, a)

// A comparison's result may be joined with another predicate, and its opposite goes to a second one.
enum { ALONE, JOIN_AND, JOIN_OR, JOIN_XOR };
static void set_comparison(Warp* w, const Instruction* x, uint32_t mask, uint32_t bits) {
  uint32_t other = x->combine ? w->registers[x->s[2]] : 0, opposite = ~bits;
  if (x->combine == JOIN_AND) bits &= other, opposite &= other;
  if (x->combine == JOIN_OR) bits |= other, opposite |= other;
  if (x->combine == JOIN_XOR) bits ^= other, opposite ^= other;
  set_bits(w, x->d[0], mask, bits);
  if (x->d_count > 1) set_bits(w, x->d[1], mask, opposite);
}
#define COMPARE(name, T, convert, expression)                                   \
  HANDLER(name) {                                                               \
    const T *sa = VECTOR(const T, x->s[0]), *sb = VECTOR(const T, x->s[1]);     \
    uint32_t bits = 0;                                                          \
    for (int l = 0; l < LANES; l++) {                                           \
      __typeof__(convert(sa[l])) a = convert(sa[l]), b = convert(sb[l]);        \
      bits |= (uint32_t)(expression) << l;                                      \
    }                                                                           \
    set_comparison(w, x, mask, bits);                                           \
  }
#define SAME(v) (v)
#define ORDERED(suffix, T, convert)        \
  COMPARE(eq_##suffix, T, convert, a == b) \
  COMPARE(lt_##suffix, T, convert, a < b)  \
  COMPARE(le_##suffix, T, convert, a <= b) \
  COMPARE(gt_##suffix, T, convert, a > b)  \
  COMPARE(ge_##suffix, T, convert, a >= b)
#define WITH_NANS(suffix, T, convert)                             \
  ORDERED(suffix, T, convert)                                     \
  COMPARE(ne_##suffix, T, convert, (a < b) | (a > b))             \
  COMPARE(equ_##suffix, T, convert, !((a < b) | (a > b)))         \
  COMPARE(neu_##suffix, T, convert, a != b)                       \
  COMPARE(ltu_##suffix, T, convert, !(a >= b))                    \
  COMPARE(leu_##suffix, T, convert, !(a > b))                     \
  COMPARE(gtu_##suffix, T, convert, !(a <= b))                    \
  COMPARE(geu_##suffix, T, convert, !(a < b))                     \
  COMPARE(num_##suffix, T, convert, (a == a) & (b == b))          \
  COMPARE(nan_##suffix, T, convert, (a != a) | (b != b))
#define INTEGER_COMPARISONS(bits)                                 \
  ORDERED(u##bits, uint##bits##_t, SAME)                          \
  ORDERED(s##bits, int##bits##_t, SAME)                           \
  COMPARE(ne_u##bits, uint##bits##_t, SAME, a != b)
INTEGER_COMPARISONS(16)
INTEGER_COMPARISONS(32)
INTEGER_COMPARISONS(64)
WITH_NANS(f32, float, SAME)
WITH_NANS(f64, double, SAME)
WITH_NANS(f16, uint16_t, from_f16)
WITH_NANS(bf16, uint16_t, from_bf16)

#define NAMED(op, suffix) {#op, op##_##suffix}
typedef struct {
  const char* name;
  Handler run;
} Named;
#define ORDERED_NAMES(s) NAMED(eq, s), NAMED(lt, s), NAMED(le, s), NAMED(gt, s), NAMED(ge, s)
#define NAN_NAMES(s)                                                                                             \
  ORDERED_NAMES(s), NAMED(ne, s), NAMED(equ, s), NAMED(neu, s), NAMED(ltu, s), NAMED(leu, s), NAMED(gtu, s), NAMED(geu, s), \
      NAMED(num, s), NAMED(nan, s)
static Handler named(const Named* list, const char* name) {
  for (; list->name; list++)
    if (!strcmp(list->name, name)) return list->run;
  return NULL;
}
Handler comparison(const char* operator_name, const char* type) {
  static const Named u16[] = {ORDERED_NAMES(u16), NAMED(ne, u16), {"lo", lt_u16}, {"ls", le_u16}, {"hi", gt_u16}, {"hs", ge_u16}, {0}};
  static const Named u32[] = {ORDERED_NAMES(u32), NAMED(ne, u32), {"lo", lt_u32}, {"ls", le_u32}, {"hi", gt_u32}, {"hs", ge_u32}, {0}};
  static const Named u64[] = {ORDERED_NAMES(u64), NAMED(ne, u64), {"lo", lt_u64}, {"ls", le_u64}, {"hi", gt_u64}, {"hs", ge_u64}, {0}};
  static const Named s16[] = {ORDERED_NAMES(s16), {"ne", ne_u16}, {0}};
  static const Named s32[] = {ORDERED_NAMES(s32), {"ne", ne_u32}, {0}};
  static const Named s64[] = {ORDERED_NAMES(s64), {"ne", ne_u64}, {0}};
  static const Named f32[] = {NAN_NAMES(f32), {0}}, f64[] = {NAN_NAMES(f64), {0}};
  static const Named f16[] = {NAN_NAMES(f16), {0}}, bf16[] = {NAN_NAMES(bf16), {0}};
  static const struct {
    const char* type;
    const Named* list;
  } types[] = {{"u16", u16}, {"b16", u16}, {"s16", s16}, {"u32", u32}, {"b32", u32}, {"s32", s32},  {"u64", u64},
               {"b64", u64}, {"s64", s64}, {"f32", f32}, {"f64", f64}, {"f16", f16}, {"bf16", bf16}};
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (!strcmp(types[i].type, type)) return named(types[i].list, operator_name);
  return NULL;
}

#define SELECT(bits)                                                               \
  HANDLER(selp_##bits) {                                                           \
    uint##bits##_t* d = VECTOR(uint##bits##_t, x->d[0]);                           \
    const uint##bits##_t *a = VECTOR(const uint##bits##_t, x->s[0]), *b = VECTOR(const uint##bits##_t, x->s[1]); \
    uint32_t p = w->registers[x->s[2]];                                            \
    EACH_LANE(d[l] = p >> l & 1 ? a[l] : b[l])                                     \
  }
SELECT(16)
SELECT(32)
SELECT(64)

// ---- floating point
static float saturated(float v) { return v > 0 ? v < 1 ? v : 1 : 0; }
static float flushed_max(float a, float b) { return a != a ? b : b != b ? a : a > b ? a : b; }
static float flushed_min(float a, float b) { return a != a ? b : b != b ? a : a < b ? a : b; }
#define FLOATING(suffix, T, FUSED)             \
  BINARY(add_##suffix, T, a + b)                    \
  BINARY(sub_##suffix, T, a - b)                    \
  BINARY(mul_##suffix, T, a * b)                    \
  BINARY(div_##suffix, T, a / b)                    \
  TERNARY(fma_##suffix, T, FUSED(a, b, c))          \
  UNARY(neg_##suffix, T, T, -a)                     \
  UNARY(rcp_##suffix, T, T, 1 / a)
FLOATING(f32, float, fmaf)
FLOATING(f64, double, fma)
BINARY(max_f32, float, flushed_max(a, b))
BINARY(min_f32, float, flushed_min(a, b))
BINARY(max_nan_f32, float, a != a || b != b ? NAN : a > b ? a : b)
BINARY(min_nan_f32, float, a != a || b != b ? NAN : a < b ? a : b)
BINARY(max_f64, double, fmax(a, b))
BINARY(min_f64, double, fmin(a, b))
UNARY(abs_f32, uint32_t, uint32_t, a & 0x7fffffff)
UNARY(abs_f64, double, double, fabs(a))
BINARY(copysign_f32, uint32_t, (a & 0x80000000) | (b & 0x7fffffff))
BINARY(copysign_f64, double, copysign(b, a))
BINARY(add_sat_f32, float, saturated(a + b))
BINARY(mul_sat_f32, float, saturated(a * b))
TERNARY(fma_sat_f32, float, saturated(fmaf(a, b, c)))
UNARY(ex2_f32, float, float, exp2f(a))
UNARY(lg2_f32, float, float, log2f(a))
UNARY(sin_f32, float, float, sinf(a))
UNARY(cos_f32, float, float, cosf(a))
UNARY(tanh_f32, float, float, tanhf(a))
UNARY(sqrt_f32, float, float, sqrtf(a))
UNARY(rsqrt_f32, float, float, 1 / sqrtf(a))
UNARY(sqrt_f64, double, double, sqrt(a))
UNARY(rsqrt_f64, double, double, 1 / sqrt(a))

// Directed rounding: the row's mode is the rounding.
static const int roundings[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
#define DIRECTED(name, T, expression)                                              \
  HANDLER(name) {                                                                  \
    T* d = VECTOR(T, x->d[0]);                                                     \
    const T *sa = VECTOR(const T, x->s[0]), *sb = VECTOR(const T, x->s[1]);        \
    const T* sc = x->s_count > 2 ? VECTOR(const T, x->s[2]) : sb;                  \
    fesetround(roundings[x->mode]);                                                \
    for (int l = 0; l < LANES; l++) {                                              \
      if (!(mask >> l & 1)) continue;                                              \
      volatile T a = sa[l], b = sb[l], c = sc[l], r = expression; /* not moved across the change of rounding */ \
      (void)c;                                                                     \
      d[l] = r;                                                                    \
    }                                                                              \
    fesetround(FE_TONEAREST);                                                      \
  }
DIRECTED(add_directed_f32, float, a + b)
DIRECTED(sub_directed_f32, float, a - b)
DIRECTED(mul_directed_f32, float, a * b)
DIRECTED(div_directed_f32, float, a / b)
DIRECTED(fma_directed_f32, float, fmaf(a, b, c))
DIRECTED(add_directed_f64, double, a + b)
DIRECTED(mul_directed_f64, double, a * b)
DIRECTED(fma_directed_f64, double, fma(a, b, c))

// Half precision: computed in float, or in double where a float would round first, and rounded once.
#define HALF(suffix, from, to)                                                          \
  BINARY(add_##suffix, uint16_t, to(from(a) + from(b)))                                 \
  BINARY(sub_##suffix, uint16_t, to(from(a) - from(b)))                                 \
  BINARY(mul_##suffix, uint16_t, to(from(a) * from(b)))                                 \
  TERNARY(fma_##suffix, uint16_t, to(odd_float((double)from(a) * from(b) + from(c))))   \
  BINARY(max_##suffix, uint16_t, to(flushed_max(from(a), from(b))))                     \
  BINARY(min_##suffix, uint16_t, to(flushed_min(from(a), from(b))))                     \
  BINARY(max_nan_##suffix, uint16_t, from(a) != from(a) || from(b) != from(b) ? to(NAN) : to(flushed_max(from(a), from(b)))) \
  BINARY(min_nan_##suffix, uint16_t, from(a) != from(a) || from(b) != from(b) ? to(NAN) : to(flushed_min(from(a), from(b)))) \
  UNARY(ex2_##suffix, uint16_t, uint16_t, to(exp2f(from(a))))                           \
  UNARY(tanh_##suffix, uint16_t, uint16_t, to(tanhf(from(a))))
HALF(f16, from_f16, to_f16)
HALF(bf16, from_bf16, to_bf16)
UNARY(neg_half, uint16_t, uint16_t, a ^ 0x8000)
UNARY(abs_half, uint16_t, uint16_t, a & 0x7fff)

// Two of them in a register.
#define PACKED(name, one) \
  BINARY(name, uint32_t, one((uint16_t)a, (uint16_t)b) | (uint32_t)one((uint16_t)(a >> 16), (uint16_t)(b >> 16)) << 16)
#define HALF_PAIR(suffix, from, to)                                                                        \
  static uint16_t one_add_##suffix(uint16_t a, uint16_t b) { return to(from(a) + from(b)); }               \
  static uint16_t one_sub_##suffix(uint16_t a, uint16_t b) { return to(from(a) - from(b)); }               \
  static uint16_t one_mul_##suffix(uint16_t a, uint16_t b) { return to(from(a) * from(b)); }               \
  static uint16_t one_max_##suffix(uint16_t a, uint16_t b) { return to(flushed_max(from(a), from(b))); }   \
  static uint16_t one_min_##suffix(uint16_t a, uint16_t b) { return to(flushed_min(from(a), from(b))); }   \
  static uint16_t one_fma_##suffix(uint16_t a, uint16_t b, uint16_t c) {                                   \
    return to(odd_float((double)from(a) * from(b) + from(c)));                                             \
  }                                                                                                        \
  PACKED(add_##suffix##x2, one_add_##suffix)                                                               \
  PACKED(sub_##suffix##x2, one_sub_##suffix)                                                               \
  PACKED(mul_##suffix##x2, one_mul_##suffix)                                                               \
  PACKED(max_##suffix##x2, one_max_##suffix)                                                               \
  PACKED(min_##suffix##x2, one_min_##suffix)                                                               \
  TERNARY(fma_##suffix##x2, uint32_t,                                                                      \
          one_fma_##suffix((uint16_t)a, (uint16_t)b, (uint16_t)c) |                                        \
              (uint32_t)one_fma_##suffix((uint16_t)(a >> 16), (uint16_t)(b >> 16), (uint16_t)(c >> 16)) << 16)
HALF_PAIR(f16, from_f16, to_f16)
HALF_PAIR(bf16, from_bf16, to_bf16)
UNARY(neg_pair, uint32_t, uint32_t, a ^ 0x80008000)
UNARY(abs_pair, uint32_t, uint32_t, a & 0x7fff7fff)

#define CLASSIFY(name, T, expression)                     \
  HANDLER(name) {                                         \
    const T* sa = VECTOR(const T, x->s[0]);               \
    uint32_t bits = 0;                                    \
    for (int l = 0; l < LANES; l++) {                     \
      T a = sa[l];                                        \
      bits |= (uint32_t)(expression) << l;                \
    }                                                     \
    set_bits(w, x->d[0], mask, bits);                     \
  }
CLASSIFY(finite_f32, float, isfinite(a) != 0)
CLASSIFY(infinite_f32, float, isinf(a) != 0)
CLASSIFY(number_f32, float, !isnan(a))
CLASSIFY(nan_value_f32, float, isnan(a) != 0)
CLASSIFY(finite_f64, double, isfinite(a) != 0)
CLASSIFY(infinite_f64, double, isinf(a) != 0)
CLASSIFY(number_f64, double, !isnan(a))
CLASSIFY(nan_value_f64, double, isnan(a) != 0)

// ---- moves
#define MOVE(bits) UNARY(mov_##bits, uint##bits##_t, uint##bits##_t, a)
MOVE(16)
MOVE(32)
MOVE(64)
HANDLER(unpack) {  // one register to several: the lowest bits first
  int part = 8 * x->d_bytes[0];
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    uint64_t v = x->s_bytes[0] == 8 ? VECTOR(uint64_t, x->s[0])[l] : VECTOR(uint32_t, x->s[0])[l];
    for (int i = 0; i < x->d_count; i++, v >>= part) {
      if (part == 32) VECTOR(uint32_t, x->d[i])[l] = (uint32_t)v;
      else VECTOR(uint16_t, x->d[i])[l] = (uint16_t)v;
    }
  }
}
HANDLER(pack) {
  int part = 8 * x->s_bytes[0];
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    uint64_t v = 0;
    for (int i = x->s_count - 1; i >= 0; i--)
      v = v << part | (part == 32 ? VECTOR(uint32_t, x->s[i])[l] : VECTOR(uint16_t, x->s[i])[l]);
    if (x->d_bytes[0] == 8) VECTOR(uint64_t, x->d[0])[l] = v;
    else VECTOR(uint32_t, x->d[0])[l] = (uint32_t)v;
  }
}
Handler move_handler(int d_count, int s_count, int bytes) {
  if (d_count > 1) return unpack;
  if (s_count > 1) return pack;
  return bytes == 1 ? mov_pred : bytes == 2 ? mov_16 : bytes == 4 ? mov_32 : mov_64;
}

// ---- conversions. Common ones are handlers of their own; the rest goes through 64 bits or a double.
UNARY(cvt_u64_u32, uint64_t, uint32_t, a)
UNARY(cvt_s64_s32, int64_t, int32_t, a)
UNARY(cvt_u32_u64, uint32_t, uint64_t, a)
UNARY(cvt_f32_s32, float, int32_t, a)
UNARY(cvt_f32_u32, float, uint32_t, a)
UNARY(cvt_f32_bf16, float, uint16_t, from_bf16(a))
UNARY(cvt_bf16_f32, uint16_t, float, to_bf16(a))
UNARY(cvt_f32_f16, float, uint16_t, from_f16(a))
UNARY(cvt_f16_f32, uint16_t, float, to_f16(a))
BINARY3(cvt_bf16x2_f32, uint32_t, float, float, (uint32_t)to_bf16(a) << 16 | to_bf16(b))
BINARY3(cvt_f16x2_f32, uint32_t, float, float, (uint32_t)to_f16(a) << 16 | to_f16(b))

typedef enum { U8, U16, U32, U64, S8, S16, S32, S64, F16, BF16, F32, F64, TYPES } Type;
static const char* const type_names[TYPES] = {"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"};
static int bits_of_type(Type t) { return t == F32 ? 32 : t == F64 ? 64 : t == F16 || t == BF16 ? 16 : 8 << (t & 3); }
static bool is_integer(Type t) { return t <= S64; }
static bool is_signed_type(Type t) { return t >= S8 && t <= S64; }

static uint64_t read_lane(const Warp* w, uint32_t place, int bytes, int l) {
  const uint32_t* at = &w->registers[place];
  return bytes == 8 ? ((const uint64_t*)at)[l] : bytes == 4 ? at[l] : ((const uint16_t*)at)[l];
}
static void write_lane(Warp* w, uint32_t place, int bytes, int l, uint64_t v) {
  uint32_t* at = &w->registers[place];
  if (bytes == 8) ((uint64_t*)at)[l] = v;
  else if (bytes == 4) at[l] = (uint32_t)v;
  else ((uint16_t*)at)[l] = (uint16_t)v;
}
static uint64_t narrowed(uint64_t v, Type t) {  // to the type's bits, its sign extended
  int shift = 64 - bits_of_type(t);
  return is_signed_type(t) ? (uint64_t)((int64_t)(v << shift) >> shift) : v << shift >> shift;
}
static double as_number(uint64_t v, Type t) {
  double d;
  memcpy(&d, &v, 8);
  return t == F64 ? d : t == F32 ? (double)of_bits((uint32_t)v) : t == F16 ? (double)from_f16((uint16_t)v) : (double)from_bf16((uint16_t)v);
}
static uint64_t of_number(double d, Type t) {
  uint64_t v;
  memcpy(&v, &d, 8);
  return t == F64 ? v : t == F32 ? bits_of((float)d) : t == F16 ? to_f16(odd_float(d)) : to_bf16(odd_float(d));
}
static uint64_t clamped(double d, Type t) {  // CUDA's conversions to integers saturate, and a NaN becomes 0
  int bits = bits_of_type(t);
  double low = is_signed_type(t) ? -ldexp(1, bits - 1) : 0, high = ldexp(1, is_signed_type(t) ? bits - 1 : bits);
  if (d != d) return 0;
  if (d <= low) return is_signed_type(t) ? (uint64_t)(int64_t)low : 0;
  if (d >= high) return is_signed_type(t) ? ((uint64_t)1 << (bits - 1)) - 1 : bits == 64 ? ~(uint64_t)0 : ((uint64_t)1 << bits) - 1;
  return is_signed_type(t) ? (uint64_t)(int64_t)d : (uint64_t)d;
}
enum { KEEP, NEAREST, ZERO, DOWN, UP, SATURATE = 8 };
static double rounded_number(double d, int how) {
  switch (how & 7) {
    case NEAREST: return nearbyint(d);
    case ZERO: return trunc(d);
    case DOWN: return floor(d);
    case UP: return ceil(d);
    default: return d;
  }
}
static uint64_t converted(uint64_t v, Type to, Type from, int how) {
  if (is_integer(from)) {
    v = narrowed(v, from);
    if (is_integer(to)) return v;
    if (to == F32) return bits_of(is_signed_type(from) ? (float)(int64_t)v : (float)v);
    return of_number(is_signed_type(from) ? (double)(int64_t)v : (double)v, to);
  }
  double d = rounded_number(as_number(v, from), how);
  if (is_integer(to)) return clamped(d, to);
  if (how & SATURATE) d = d > 0 ? d < 1 ? d : 1 : 0;
  return of_number(d, to);
}
HANDLER(convert_generally) {
  for (int l = 0; l < LANES; l++)
    if (mask >> l & 1)
      write_lane(w, x->d[0], x->d_bytes[0], l,
                 converted(read_lane(w, x->s[0], x->s_bytes[0], l), (Type)x->to, (Type)x->from, x->mode));
}
static int type_named(const char* name) {
  for (int t = 0; t < TYPES; t++)
    if (!strcmp(type_names[t], name)) return t;
  return -1;
}
Handler conversion(const char* to, const char* from, const char* rounding, Instruction* x) {
  static const struct {
    const char *to, *from;
    Handler run;
    uint8_t d_bytes, s_bytes;
  } common[] = {{"u64", "u32", cvt_u64_u32, 8, 4},   {"s64", "s32", cvt_s64_s32, 8, 4},   {"u32", "u64", cvt_u32_u64, 4, 8},
                {"f32", "s32", cvt_f32_s32, 4, 4},   {"f32", "u32", cvt_f32_u32, 4, 4},   {"f32", "bf16", cvt_f32_bf16, 4, 2},
                {"bf16", "f32", cvt_bf16_f32, 2, 4}, {"f32", "f16", cvt_f32_f16, 4, 2},   {"f16", "f32", cvt_f16_f32, 2, 4}};
  static const char* const names[] = {"", "rni", "rzi", "rmi", "rpi"};
  int how = -1;
  bool sat = !strcmp(rounding, "sat");
  for (int i = 0; i < 5; i++)
    if (!strcmp(names[i], sat ? "" : rounding)) how = i;
  int t = type_named(to), f = type_named(from);
  if (how < 0 || t < 0 || f < 0) return NULL;
  if (sat && is_integer((Type)t) && is_integer((Type)f)) return NULL;
  if (!is_integer((Type)f) && is_integer((Type)t) && how == KEEP) return NULL;
  for (size_t i = 0; !how && !sat && i < sizeof common / sizeof *common; i++)
    if (!strcmp(common[i].to, to) && !strcmp(common[i].from, from) && common[i].d_bytes == x->d_bytes[0] &&
        common[i].s_bytes == x->s_bytes[0])
      return common[i].run;
  x->to = (uint8_t)t;
  x->from = (uint8_t)f;
  x->mode = (uint8_t)(how | (sat ? SATURATE : 0));
  return convert_generally;
}

// ---- memory
static bool is_own(const Warp* w, uint64_t address) {
  const Block* b = w->block;
  return address - (uint64_t)b->shared < b->shared_bytes || address - (uint64_t)w->local < w->local_bytes;
}
// What the lanes of `mask` touch is remembered, unless it is the block's own. Most warps touch one range, or one place.
static void remember(const Warp* w, uint32_t mask, size_t bytes, int how, const uint64_t* at) {
  bool range = mask == ALL, place = mask == ALL;
  for (int l = 0; l < LANES; l++) {
    range &= at[l] == at[0] + (uint64_t)l * bytes;
    place &= at[l] == at[0];
  }
  if (range || place) {
    if (!is_own(w, at[0])) touch_range(w->block->touched, at[0], place ? bytes : LANES * bytes, how);
    return;
  }
  for (int l = 0; l < LANES; l++)
    if (mask >> l & 1 && !is_own(w, at[l])) touch(w->block->touched, at[l], bytes, how);
}
// Of every lane.
static void addresses(const Warp* w, const Instruction* x, uint32_t mask, size_t bytes, int how, uint64_t* out) {
  uint64_t base = (uint64_t)x->offset + (x->space == SHARED ? (uint64_t)w->block->shared : 0);
  const uint32_t* at = &w->registers[x->s[0]];
  if (x->s_bytes[0] == 8)
    for (int l = 0; l < LANES; l++) out[l] = base + ((const uint64_t*)at)[l];
  else
    for (int l = 0; l < LANES; l++) out[l] = base + at[l];
  if (x->space != SHARED) remember(w, mask, bytes, how, out);
}
#define LOAD(name, Memory, Register)                                                          \
  HANDLER(name) {                                                                             \
    uint64_t at[LANES];                                                                       \
    addresses(w, x, mask, sizeof(Memory) * x->d_count, READ, at);                             \
    for (int i = 0; i < x->d_count; i++) { /* all addresses were taken: a result may overwrite them */ \
      Register* d = VECTOR(Register, x->d[i]);                                                \
      for (int l = 0; l < LANES; l++)                                                         \
        if (mask >> l & 1) d[l] = (Register)((const Memory*)at[l])[i];                        \
    }                                                                                         \
  }
#define STORE(name, Memory, Register)                                    \
  HANDLER(name) {                                                        \
    uint64_t at[LANES];                                                  \
    addresses(w, x, mask, sizeof(Memory) * (x->s_count - 1), WRITE, at); \
    for (int i = 1; i < x->s_count; i++) {                               \
      const Register* s = VECTOR(const Register, x->s[i]);               \
      for (int l = 0; l < LANES; l++)                                    \
        if (mask >> l & 1) ((Memory*)at[l])[i - 1] = (Memory)s[l];       \
    }                                                                    \
  }
#define LOADS(Register, bytes)                                                                                         \
  LOAD(load_u8_##bytes, uint8_t, Register) LOAD(load_s8_##bytes, int8_t, Register) LOAD(load_u16_##bytes, uint16_t, Register) \
      LOAD(load_s16_##bytes, int16_t, Register) LOAD(load_u32_##bytes, uint32_t, Register)                             \
          LOAD(load_s32_##bytes, int32_t, Register) LOAD(load_u64_##bytes, uint64_t, Register)
LOADS(uint16_t, 2)
LOADS(uint32_t, 4)
LOADS(uint64_t, 8)
#define STORES(Register, bytes)                                                           \
  STORE(store_8_##bytes, uint8_t, Register) STORE(store_16_##bytes, uint16_t, Register)   \
      STORE(store_32_##bytes, uint32_t, Register) STORE(store_64_##bytes, uint64_t, Register)
STORES(uint16_t, 2)
STORES(uint32_t, 4)
STORES(uint64_t, 8)

Handler load_handler(int bytes, bool is_signed, int register_bytes) {
#define OF(b) {{load_u8_##b, load_s8_##b}, {load_u16_##b, load_s16_##b}, {load_u32_##b, load_s32_##b}, {load_u64_##b, load_u64_##b}}
  static const Handler all[3][4][2] = {OF(2), OF(4), OF(8)};
  if (register_bytes < 2 || register_bytes < bytes) return NULL;
  return all[__builtin_ctz((unsigned)register_bytes) - 1][__builtin_ctz((unsigned)bytes)][is_signed];
}
// A register may be wider than what is stored: its low bytes go.
Handler store_handler(int bytes, int register_bytes) {
#define TO(b) {store_8_##b, store_16_##b, store_32_##b, store_64_##b}
  static const Handler all[3][4] = {TO(2), TO(4), TO(8)};
  if (register_bytes < 2 || register_bytes < bytes) return NULL;
  return all[__builtin_ctz((unsigned)register_bytes) - 1][__builtin_ctz((unsigned)bytes)];
}
// Matrices of 8 x 8 numbers of 16 bits in shared memory: lane 8 i + r names row r of the i-th; each lane has two neighbours of row
// lane / 4, where `mode` is set of the transposed matrix.
static uint16_t* of_matrix(const Instruction* x, const uint64_t* rows, int matrix, int lane, int which) {
  int row = lane / 4, column = lane % 4 * 2 + which;
  return x->mode ? (uint16_t*)rows[8 * matrix + column] + row : (uint16_t*)rows[8 * matrix + row] + column;
}
void load_matrices(Warp* w, const Instruction* x, uint32_t mask) {
  uint64_t at[LANES];
  addresses(w, x, mask, 16, READ, at);
  for (int i = 0; i < x->d_count; i++) {
    uint32_t* d = VECTOR(uint32_t, x->d[i]);
    EACH_LANE(d[l] = *of_matrix(x, at, i, l, 0) | (uint32_t)*of_matrix(x, at, i, l, 1) << 16)
  }
}
void store_matrices(Warp* w, const Instruction* x, uint32_t mask) {
  uint64_t at[LANES];
  addresses(w, x, mask, 16, WRITE, at);
  for (int i = 0; i < x->s_count - 1; i++) {
    const uint32_t* s = VECTOR(const uint32_t, x->s[i + 1]);
    for (int l = 0; l < LANES; l++)
      for (int which = 0; which < 2 && mask >> l & 1; which++) *of_matrix(x, at, i, l, which) = (uint16_t)(s[l] >> 16 * which);
  }
}
void load_parameter(Warp* w, const Instruction* x, uint32_t mask) {
  int bytes = x->mode;  // of one element
  for (int i = 0; i < x->d_count; i++) {
    uint64_t v = 0;
    memcpy(&v, w->block->parameters + x->offset + i * bytes, (size_t)bytes);
    for (int l = 0; l < LANES; l++)
      if (mask >> l & 1) write_lane(w, x->d[i], x->d_bytes[i], l, v);
  }
}
void to_generic_shared(Warp* w, const Instruction* x, uint32_t mask) {  // cvta.shared
  uint64_t* d = VECTOR(uint64_t, x->d[0]);
  EACH_LANE(d[l] = (uint64_t)w->block->shared + read_lane(w, x->s[0], x->s_bytes[0], l))
}
void from_generic_shared(Warp* w, const Instruction* x, uint32_t mask) {  // cvta.to.shared
  for (int l = 0; l < LANES; l++)
    if (mask >> l & 1)
      write_lane(w, x->d[0], x->d_bytes[0], l, read_lane(w, x->s[0], x->s_bytes[0], l) - (uint64_t)w->block->shared);
}

// Atomic operations: lanes one after another. `old` is what memory held, b and c the operands.
#define ATOMIC(name, T, expression)                                                    \
  HANDLER(name) {                                                                      \
    uint64_t at[LANES];                                                                \
    addresses(w, x, mask, sizeof(T), READ | WRITE, at);                                \
    for (int l = 0; l < LANES; l++) {                                                  \
      if (!(mask >> l & 1)) continue;                                                  \
      T old = *(T*)at[l], b = VECTOR(T, x->s[1])[l], c = x->s_count > 2 ? VECTOR(T, x->s[2])[l] : b; \
      (void)c;                                                                         \
      *(T*)at[l] = (T)(expression);                                                    \
      if (x->d_count) VECTOR(T, x->d[0])[l] = old;                                     \
    }                                                                                  \
  }
#define ATOMICS(bits)                                               \
  ATOMIC(atom_add_##bits, uint##bits##_t, old + b)                  \
  ATOMIC(atom_exch_##bits, uint##bits##_t, b)                       \
  ATOMIC(atom_cas_##bits, uint##bits##_t, old == b ? c : old)       \
  ATOMIC(atom_and_##bits, uint##bits##_t, old & b)                  \
  ATOMIC(atom_or_##bits, uint##bits##_t, old | b)                   \
  ATOMIC(atom_xor_##bits, uint##bits##_t, old ^ b)                  \
  ATOMIC(atom_min_u##bits, uint##bits##_t, old < b ? old : b)       \
  ATOMIC(atom_max_u##bits, uint##bits##_t, old > b ? old : b)       \
  ATOMIC(atom_min_s##bits, int##bits##_t, old < b ? old : b)        \
  ATOMIC(atom_max_s##bits, int##bits##_t, old > b ? old : b)
ATOMICS(32)
ATOMICS(64)
ATOMIC(atom_cas_16, uint16_t, old == b ? c : old)
ATOMIC(atom_add_f32, float, old + b)
ATOMIC(atom_add_f64, double, old + b)
ATOMIC(atom_add_f16, uint16_t, to_f16(from_f16(old) + from_f16(b)))
ATOMIC(atom_add_bf16, uint16_t, to_bf16(from_bf16(old) + from_bf16(b)))
Handler atomic_handler(const char* operation, const char* type) {
  static const struct {
    const char *operation, *types;
    Handler run;
  } all[] = {
      {"add", "u32 s32", atom_add_32},   {"add", "u64 s64", atom_add_64},   {"add", "f32", atom_add_f32},
      {"add", "f64", atom_add_f64},      {"add", "f16", atom_add_f16},      {"add", "bf16", atom_add_bf16},
      {"exch", "b32", atom_exch_32},     {"exch", "b64", atom_exch_64},     {"cas", "b16", atom_cas_16},
      {"cas", "b32", atom_cas_32},       {"cas", "b64", atom_cas_64},       {"and", "b32", atom_and_32},
      {"and", "b64", atom_and_64},       {"or", "b32", atom_or_32},         {"or", "b64", atom_or_64},
      {"xor", "b32", atom_xor_32},       {"xor", "b64", atom_xor_64},       {"min", "u32", atom_min_u32},
      {"min", "u64", atom_min_u64},      {"min", "s32", atom_min_s32},      {"min", "s64", atom_min_s64},
      {"max", "u32", atom_max_u32},      {"max", "u64", atom_max_u64},      {"max", "s32", atom_max_s32},
      {"max", "s64", atom_max_s64},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    const char* at = strcmp(all[i].operation, operation) ? NULL : strstr(all[i].types, type);
    if (at && (at == all[i].types || at[-1] == ' ')) return all[i].run;
  }
  return NULL;
}

// ---- across lanes. shfl: the row's mode; d[1], if there, says whether the lane asked for is in range.
enum { UP_, DOWN_, BUTTERFLY, INDEX };
HANDLER(shfl) {
  const uint32_t *value = VECTOR(const uint32_t, x->s[0]), *lane = VECTOR(const uint32_t, x->s[1]), *c = VECTOR(const uint32_t, x->s[2]);
  uint32_t out[LANES], in_range = 0;
  for (int l = 0; l < LANES; l++) {
    int segment = c[l] >> 8 & 31, clamp = c[l] & 31, b = lane[l] & 31;
    int first = l & segment, last = first | (clamp & ~segment & 31);
    int from = x->mode == UP_ ? l - b : x->mode == DOWN_ ? l + b : x->mode == BUTTERFLY ? l ^ b : first | (b & ~segment);
    bool fits = x->mode == UP_ ? from >= last : from <= last;
    out[l] = value[fits ? from : l];
    in_range |= (uint32_t)fits << l;
  }
  uint32_t* d = VECTOR(uint32_t, x->d[0]);
  EACH_LANE(d[l] = out[l])
  if (x->d_count > 1) set_bits(w, x->d[1], mask, in_range);
}
HANDLER(vote_ballot) {
  uint32_t bits = w->registers[x->s[0]] & mask, *d = VECTOR(uint32_t, x->d[0]);
  EACH_LANE(d[l] = bits)
}
HANDLER(vote_any) { set_bits(w, x->d[0], mask, w->registers[x->s[0]] & mask ? ALL : 0); }
HANDLER(vote_all) { set_bits(w, x->d[0], mask, (w->registers[x->s[0]] & mask) == mask ? ALL : 0); }
HANDLER(activemask) {
  uint32_t* d = VECTOR(uint32_t, x->d[0]);
  EACH_LANE(d[l] = mask)
}
#define REDUX(name, T, start, expression)                    \
  HANDLER(name) {                                            \
    T r = start, *d = VECTOR(T, x->d[0]);                    \
    const T* s = VECTOR(const T, x->s[0]);                   \
    for (int l = 0; l < LANES; l++) {                        \
      T a = s[l];                                            \
      if (mask >> l & 1) r = expression;                     \
    }                                                        \
    EACH_LANE(d[l] = r)                                      \
  }
REDUX(redux_add, uint32_t, 0, r + a)
REDUX(redux_and, uint32_t, ALL, r & a)
REDUX(redux_or, uint32_t, 0, r | a)
REDUX(redux_xor, uint32_t, 0, r ^ a)
REDUX(redux_min_s32, int32_t, INT32_MAX, a < r ? a : r)
REDUX(redux_max_s32, int32_t, INT32_MIN, a > r ? a : r)
REDUX(redux_min_u32, uint32_t, ALL, a < r ? a : r)
REDUX(redux_max_u32, uint32_t, 0, a > r ? a : r)

// ---- the table
#define ROW(form, signature, run) {form, signature, run, STRAIGHT, 0}
#define INTEGER_ROWS(bits, n)                                                                     \
  ROW("add.u" #bits, #n "=" #n #n, add_##bits), ROW("add.s" #bits, #n "=" #n #n, add_##bits),     \
  ROW("sub.u" #bits, #n "=" #n #n, sub_##bits), ROW("sub.s" #bits, #n "=" #n #n, sub_##bits),     \
  ROW("mul.lo.u" #bits, #n "=" #n #n, mul_##bits), ROW("mul.lo.s" #bits, #n "=" #n #n, mul_##bits), \
  ROW("mul.hi.u" #bits, #n "=" #n #n, mul_hi_u##bits), ROW("mul.hi.s" #bits, #n "=" #n #n, mul_hi_s##bits), \
  ROW("mad.lo.u" #bits, #n "=" #n #n #n, mad_##bits), ROW("mad.lo.s" #bits, #n "=" #n #n #n, mad_##bits), \
  ROW("div.u" #bits, #n "=" #n #n, div_u##bits), ROW("div.s" #bits, #n "=" #n #n, div_s##bits),   \
  ROW("rem.u" #bits, #n "=" #n #n, rem_u##bits), ROW("rem.s" #bits, #n "=" #n #n, rem_s##bits),   \
  ROW("min.u" #bits, #n "=" #n #n, min_u##bits), ROW("min.s" #bits, #n "=" #n #n, min_s##bits),   \
  ROW("max.u" #bits, #n "=" #n #n, max_u##bits), ROW("max.s" #bits, #n "=" #n #n, max_s##bits),   \
  ROW("neg.s" #bits, #n "=" #n, neg_##bits), ROW("abs.s" #bits, #n "=" #n, abs_##bits),           \
  ROW("and.b" #bits, #n "=" #n #n, and_##bits), ROW("or.b" #bits, #n "=" #n #n, or_##bits),       \
  ROW("xor.b" #bits, #n "=" #n #n, xor_##bits), ROW("not.b" #bits, #n "=" #n, not_##bits),        \
  ROW("shl.b" #bits, #n "=" #n "4", shl_##bits), ROW("shr.u" #bits, #n "=" #n "4", shr_u##bits),  \
  ROW("shr.b" #bits, #n "=" #n "4", shr_u##bits), ROW("shr.s" #bits, #n "=" #n "4", shr_s##bits), \
  ROW("selp.b" #bits, #n "=" #n #n "p", selp_##bits), ROW("selp.u" #bits, #n "=" #n #n "p", selp_##bits), \
  ROW("selp.s" #bits, #n "=" #n #n "p", selp_##bits)
#define FLOAT_ROWS(t, n)                                                                          \
  ROW("add." #t, #n "=" #n #n, add_##t), ROW("sub." #t, #n "=" #n #n, sub_##t), ROW("mul." #t, #n "=" #n #n, mul_##t), \
  ROW("fma." #t, #n "=" #n #n #n, fma_##t), ROW("max." #t, #n "=" #n #n, max_##t), ROW("min." #t, #n "=" #n #n, min_##t)
#define DIRECTED_ROWS(op, t, signature)                                                           \
  {#op ".rz." #t, signature, op##_directed_##t, STRAIGHT, 1}, {#op ".rm." #t, signature, op##_directed_##t, STRAIGHT, 2}, \
  {#op ".rp." #t, signature, op##_directed_##t, STRAIGHT, 3}
#define CARRY_ROWS(type)                                                                          \
  {"add.cc." type, "4=44", add_carry, STRAIGHT, 2}, {"addc." type, "4=44", add_carry, STRAIGHT, 1}, \
  {"addc.cc." type, "4=44", add_carry, STRAIGHT, 3}, {"sub.cc." type, "4=44", sub_carry, STRAIGHT, 2}, \
  {"subc." type, "4=44", sub_carry, STRAIGHT, 1}, {"subc.cc." type, "4=44", sub_carry, STRAIGHT, 3}
#define MAD_CARRY_ROWS(half, run)                                                                 \
  {"mad." half ".cc.u32", "4=444", run, STRAIGHT, 2}, {"madc." half ".u32", "4=444", run, STRAIGHT, 1}, \
  {"madc." half ".cc.u32", "4=444", run, STRAIGHT, 3}
#define CONVERGING(form, signature, run, mode) {form, signature, run, CONVERGE, mode}

static const Row rows[] = {
    INTEGER_ROWS(16, 2), INTEGER_ROWS(32, 4), INTEGER_ROWS(64, 8),
    ROW("mul.wide.u16", "4=22", mul_wide_u16), ROW("mul.wide.s16", "4=22", mul_wide_s16),
    ROW("mul.wide.u32", "8=44", mul_wide_u32), ROW("mul.wide.s32", "8=44", mul_wide_s32),
    ROW("mad.wide.u16", "4=224", mad_wide_u16), ROW("mad.wide.s16", "4=224", mad_wide_s16),
    ROW("mad.wide.u32", "8=448", mad_wide_u32), ROW("mad.wide.s32", "8=448", mad_wide_s32),
    ROW("mad.hi.u32", "4=444", mad_hi_u32), ROW("mad.hi.s32", "4=444", mad_hi_s32),
    ROW("popc.b32", "4=4", popc_32), ROW("popc.b64", "4=8", popc_64), ROW("clz.b32", "4=4", clz_32), ROW("clz.b64", "4=8", clz_64),
    ROW("bfind.u32", "4=4", bfind_u32), ROW("brev.b32", "4=4", brev_32), ROW("brev.b64", "8=8", brev_64),
    ROW("bfe.u32", "4=444", bfe_u32), ROW("bfe.s32", "4=444", bfe_s32), ROW("bfe.u64", "8=844", bfe_u64),
    ROW("bfi.b32", "4=4444", bfi_32), ROW("prmt.b32", "4=444", prmt), ROW("lop3.b32", "4=4444", lop3),
    ROW("shf.l.wrap.b32", "4=444", shf_l_wrap), ROW("shf.r.wrap.b32", "4=444", shf_r_wrap),
    ROW("shf.l.clamp.b32", "4=444", shf_l_clamp), ROW("shf.r.clamp.b32", "4=444", shf_r_clamp),
    CARRY_ROWS("u32"), CARRY_ROWS("s32"), MAD_CARRY_ROWS("lo", mad_lo_carry), MAD_CARRY_ROWS("hi", mad_hi_carry),
    ROW("and.pred", "p=pp", and_pred), ROW("or.pred", "p=pp", or_pred), ROW("xor.pred", "p=pp", xor_pred), ROW("not.pred", "p=p", not_pred),
    FLOAT_ROWS(f32, 4), FLOAT_ROWS(f64, 8), FLOAT_ROWS(f16, 2), FLOAT_ROWS(bf16, 2), FLOAT_ROWS(f16x2, 4), FLOAT_ROWS(bf16x2, 4),
    ROW("selp.f32", "4=44p", selp_32), ROW("selp.f64", "8=88p", selp_64),
    ROW("div.f32", "4=44", div_f32), ROW("div.f64", "8=88", div_f64), ROW("neg.f32", "4=4", neg_f32), ROW("neg.f64", "8=8", neg_f64),
    ROW("abs.f32", "4=4", abs_f32), ROW("abs.f64", "8=8", abs_f64), ROW("rcp.f32", "4=4", rcp_f32), ROW("rcp.f64", "8=8", rcp_f64),
    ROW("sqrt.f32", "4=4", sqrt_f32), ROW("sqrt.f64", "8=8", sqrt_f64), ROW("rsqrt.f32", "4=4", rsqrt_f32), ROW("rsqrt.f64", "8=8", rsqrt_f64),
    ROW("max.NaN.f32", "4=44", max_nan_f32), ROW("min.NaN.f32", "4=44", min_nan_f32),
    ROW("max.NaN.f16", "2=22", max_nan_f16), ROW("min.NaN.f16", "2=22", min_nan_f16),
    ROW("max.NaN.bf16", "2=22", max_nan_bf16), ROW("min.NaN.bf16", "2=22", min_nan_bf16),
    ROW("copysign.f32", "4=44", copysign_f32), ROW("copysign.f64", "8=88", copysign_f64),
    ROW("add.sat.f32", "4=44", add_sat_f32), ROW("mul.sat.f32", "4=44", mul_sat_f32), ROW("fma.sat.f32", "4=444", fma_sat_f32),
    ROW("ex2.f32", "4=4", ex2_f32), ROW("lg2.f32", "4=4", lg2_f32), ROW("sin.f32", "4=4", sin_f32), ROW("cos.f32", "4=4", cos_f32),
    ROW("tanh.f32", "4=4", tanh_f32), ROW("ex2.f16", "2=2", ex2_f16), ROW("ex2.bf16", "2=2", ex2_bf16),
    ROW("tanh.f16", "2=2", tanh_f16), ROW("tanh.bf16", "2=2", tanh_bf16),
    ROW("neg.f16", "2=2", neg_half), ROW("neg.bf16", "2=2", neg_half), ROW("abs.f16", "2=2", abs_half), ROW("abs.bf16", "2=2", abs_half),
    ROW("neg.f16x2", "4=4", neg_pair), ROW("neg.bf16x2", "4=4", neg_pair), ROW("abs.f16x2", "4=4", abs_pair), ROW("abs.bf16x2", "4=4", abs_pair),
    DIRECTED_ROWS(add, f32, "4=44"), DIRECTED_ROWS(sub, f32, "4=44"), DIRECTED_ROWS(mul, f32, "4=44"), DIRECTED_ROWS(div, f32, "4=44"),
    DIRECTED_ROWS(fma, f32, "4=444"), DIRECTED_ROWS(add, f64, "8=88"), DIRECTED_ROWS(mul, f64, "8=88"), DIRECTED_ROWS(fma, f64, "8=888"),
    ROW("testp.finite.f32", "p=4", finite_f32), ROW("testp.infinite.f32", "p=4", infinite_f32),
    ROW("testp.number.f32", "p=4", number_f32), ROW("testp.notanumber.f32", "p=4", nan_value_f32),
    ROW("testp.finite.f64", "p=8", finite_f64), ROW("testp.infinite.f64", "p=8", infinite_f64),
    ROW("testp.number.f64", "p=8", number_f64), ROW("testp.notanumber.f64", "p=8", nan_value_f64),
    ROW("cvt.bf16x2.f32", "4=44", cvt_bf16x2_f32), ROW("cvt.f16x2.f32", "4=44", cvt_f16x2_f32),
    CONVERGING("shfl.up.b32", "4=4444", shfl, UP_), CONVERGING("shfl.down.b32", "4=4444", shfl, DOWN_),
    CONVERGING("shfl.bfly.b32", "4=4444", shfl, BUTTERFLY), CONVERGING("shfl.idx.b32", "4=4444", shfl, INDEX),
    CONVERGING("vote.ballot.b32", "4=p4", vote_ballot, 0), CONVERGING("vote.any.pred", "p=p4", vote_any, 0),
    CONVERGING("vote.all.pred", "p=p4", vote_all, 0), CONVERGING("bar.warp", "=4", nothing, 0),
    CONVERGING("redux.add.s32", "4=44", redux_add, 0), CONVERGING("redux.add.u32", "4=44", redux_add, 0),
    CONVERGING("redux.and.b32", "4=44", redux_and, 0), CONVERGING("redux.or.b32", "4=44", redux_or, 0),
    CONVERGING("redux.xor.b32", "4=44", redux_xor, 0), CONVERGING("redux.min.s32", "4=44", redux_min_s32, 0),
    CONVERGING("redux.max.s32", "4=44", redux_max_s32, 0), CONVERGING("redux.min.u32", "4=44", redux_min_u32, 0),
    CONVERGING("redux.max.u32", "4=44", redux_max_u32, 0), ROW("activemask.b32", "4=", activemask),
    ROW("membar", "=", nothing), ROW("fence", "=", nothing), ROW("nanosleep", "=4", nothing), ROW("griddepcontrol", "=", nothing),
};

const Row* find_row(const char* form) {
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    if (!strcmp(rows[i].form, form)) return &rows[i];
  return NULL;
}
