// Vectors of float in GCC's own notation: one source for AVX-512, AVX2, and whatever else the compiler knows.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace vtoken {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define VTOKEN_AVX512 1
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VTOKEN_AVX2 1
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline Vec splat(float x) { return x - Vec{}; }

inline Vec bitcast(VecInt v) {
  Vec out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}

inline VecInt bitcast(Vec v) {
  VecInt out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN

// a * b + c: one instruction under -ffp-contract=fast where the machine has it.
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }

// a * b + c, where c is an accumulator that stays in its register: left to itself the compiler moves accumulators about
// and reads a vector of weights from memory for each row, which costs a tile that fills the registers up to a fifth.
__attribute__((always_inline)) inline Vec accumulate(Vec a, Vec b, Vec c) {
#if defined(VTOKEN_AVX512)
  asm("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
#elif defined(VTOKEN_AVX2)
  asm("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
#else
  return fma(a, b, c);
#endif
}

inline float sum(Vec v) {
  float total = 0;
  if constexpr (kLanes == 16) {
#ifdef VTOKEN_AVX512
    return _mm512_reduce_add_ps((__m512)v);
#endif
  }
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

inline float peak(Vec v) {
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

// e^x to about 1 unit in the last place for x <= 88.7 (infinity above); exactly 0 below -87.3 and for -infinity; NaN
// stays NaN. Range reduction x = n ln 2 + r with a polynomial of degree 6 in r (coefficients as in Cephes' expf).
inline Vec exp(Vec x) {
  const Vec too_small = splat(-87.33654f);
  Vec clipped = x < too_small ? too_small : x;
  clipped = clipped > splat(88.72283f) ? splat(88.72283f) : clipped;
  // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the low bits.
  const Vec magic = splat(12582912.0f);
  Vec shifted = clipped * splat(1.44269504088896341f) + magic;
  Vec n = shifted - magic;
  Vec r = clipped - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  Vec y = p * (r * r) + r + splat(1.0f);
  // 2^n in two factors, since n may be 128 where y < 1.
  VecInt e = bitcast(shifted) - bitcast(magic);
  VecInt half = e >> 1;
  y = y * bitcast((half + 127) << 23) * bitcast((e - half + 127) << 23);
  y = x < too_small ? Vec{} : y;
  y = x > splat(88.72283f) ? splat(__builtin_inff()) : y;
  return x != x ? x : y;
}

// tanh through e^(2x); absolute error below 1e-6, which a soft cap cannot tell from exact.
inline Vec tanh(Vec x) {
  Vec limited = x > splat(15.0f) ? splat(15.0f) : x;
  limited = limited < splat(-15.0f) ? splat(-15.0f) : limited;
  Vec e = exp(limited + limited);
  Vec y = (e - splat(1.0f)) / (e + splat(1.0f));
  return x != x ? x : y;
}

}  // namespace vtoken
