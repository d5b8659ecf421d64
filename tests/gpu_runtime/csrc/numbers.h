// Half-precision numbers.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float of_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static inline uint32_t bits_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}
static inline float from_bf16(uint16_t bits) { return of_bits((uint32_t)bits << 16); }
static inline uint16_t to_bf16(float f) {
  uint32_t bits = bits_of(f);
  if (f != f) return 0x7fff;  // CUDA's canonical NaN
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline float from_f16(uint16_t bits) {
  _Float16 h;
  memcpy(&h, &bits, 2);
  return (float)h;
}
static inline uint16_t to_f16(float f) {
  _Float16 h = (_Float16)f;
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
}
// A double that stands for an exact or once rounded result, to bfloat16 or float16 with one rounding: through a float that is rounded
// to odd, which keeps what the second rounding must know.
static inline float odd_float(double d) {
  float f = (float)d;
  if ((double)f == d || d != d) return f;
  uint32_t bits = bits_of(f);
  if (fabs((double)f) > fabs(d)) bits--;
  return of_bits(bits | 1);
}
