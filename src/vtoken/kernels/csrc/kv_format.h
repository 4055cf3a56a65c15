// How keys and values lie in the cache: decoded in registers while they are read, encoded when they are written.
#pragma once

#include <cmath>

#include "simd.h"

namespace vtoken {

// The numbers are those of `quant.kv_format.CODES`.
enum KVFormat : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFp8E4M3 = 3, kInt8 = 4 };

constexpr float kInt8Max = 127.0f;
constexpr float kFp8Max = 448.0f;

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t rest = h & 0x7fff;
  if (rest >= 0x7c00) {  // infinity and NaN
    const uint32_t bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  }
  // The exponents differ by 112; scaling instead of adding makes subnormals come out right too.
  const uint32_t bits = sign | rest << 13;
  float out;
  std::memcpy(&out, &bits, 4);
  return out * 0x1p112f;
#endif
}

inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (bits < 0x38800000) {                       // subnormal: adding 0.5 rounds at the right bit
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | (bits - 0x3f000000);
  }
  bits += 0xc8000fff + (bits >> 13 & 1);  // exponent rebased by -112, rounded to even
  return sign | bits >> 13;
#endif
}

inline float bfloat_to_float(uint16_t b) {
  const uint32_t bits = uint32_t(b) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t float_to_bfloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// OCP FP8 E4M3 (arXiv:2209.05433): no infinities, NaN is 0x7f and 0xff, the largest number 448.
inline float fp8_to_float(uint8_t code) {
  if ((code & 0x7f) == 0x7f) return std::nanf("");
  // Sign and 4 + 3 bits fall on those of a half; the exponents differ by 8.
  return half_to_float(uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
}

// One vector of kLanes elements at `from + at`, as float, without the scale.
template <KVFormat F>
inline Vec decode(const void* from, int64_t at);

template <>
inline Vec decode<kFloat32>(const void* from, int64_t at) {
  return load(static_cast<const float*>(from) + at);
}

template <>
inline Vec decode<kFloat16>(const void* from, int64_t at) {
  const uint16_t* p = static_cast<const uint16_t*>(from) + at;
#if defined(VTOKEN_AVX512)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(VTOKEN_AVX2)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i]);
  return v;
#endif
}

template <>
inline Vec decode<kBFloat16>(const void* from, int64_t at) {
  const uint16_t* p = static_cast<const uint16_t*>(from) + at;
#if defined(VTOKEN_AVX512)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(VTOKEN_AVX2)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = bfloat_to_float(p[i]);
  return v;
#endif
}

template <>
inline Vec decode<kInt8>(const void* from, int64_t at) {
  const int8_t* p = static_cast<const int8_t*>(from) + at;
  // GCC 12 widens bytes one by one when left to itself.
#if defined(VTOKEN_AVX512)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(VTOKEN_AVX2)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
#endif
}

template <>
inline Vec decode<kFp8E4M3>(const void* from, int64_t at) {
  const uint8_t* p = static_cast<const uint8_t*>(from) + at;
#if defined(VTOKEN_AVX512)
  const __m128i codes = _mm_loadu_si128((const __m128i*)p);
  const __mmask16 numbers = _mm_cmpneq_epi8_mask(_mm_or_si128(codes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
  const __m256i half =
      _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(int16_t(0xbf80)));
  return (Vec)_mm512_mask_mul_ps(_mm512_set1_ps(__builtin_nanf("")), numbers, _mm512_cvtph_ps(half),
                                 _mm512_set1_ps(256.0f));
#elif defined(VTOKEN_AVX2)
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
  const __m128i half = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8),
                                    _mm_slli_epi16(magnitude, 7));
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
  return (Vec)_mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)))) * splat(256.0f);
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = fp8_to_float(p[i]);
  return v;
#endif
}

// One element; for the last few of a width that is no multiple of kLanes.
template <KVFormat F>
inline float decode_one(const void* from, int64_t at) {
  if constexpr (F == kFloat32) return static_cast<const float*>(from)[at];
  if constexpr (F == kFloat16) return half_to_float(static_cast<const uint16_t*>(from)[at]);
  if constexpr (F == kBFloat16) return bfloat_to_float(static_cast<const uint16_t*>(from)[at]);
  if constexpr (F == kFp8E4M3) return fp8_to_float(static_cast<const uint8_t*>(from)[at]);
  if constexpr (F == kInt8) return static_cast<const int8_t*>(from)[at];
}

constexpr bool has_scales(KVFormat format) { return format == kFp8E4M3 || format == kInt8; }

constexpr int64_t bytes_per_element(KVFormat format) {
  return format == kFloat32 ? 4 : format == kFloat16 || format == kBFloat16 ? 2 : 1;
}

}  // namespace vtoken
