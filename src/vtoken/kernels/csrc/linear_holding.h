// How weights lie in memory, and how they are widened to float32.
//
// A weight [out, in] is cut into panels of kPanel outputs (the last one padded with zeros). In a panel all outputs of
// one `in` index k lie side by side, so one vector holds the same k of kLanes outputs and a product needs no sums across
// lanes. Groups are of kGroup32 consecutive k of one output:
//
//   f32, f16, bf16   [k][kPanel] numbers
//   g8               per group: fp16 scale [kPanel], int8 code [32][kPanel];             w = scale * code
//   g4               per group: fp16 scale [kPanel], fp16 offset [kPanel], then for every 8 k a uint32 [kPanel] with
//                    the code of the i-th k in bits 4 i .. 4 i + 3;                      w = scale * code + offset
//   int8             per group: fp16 scale [kPanel], then for every 4 k four bytes code + 128 [kPanel][4]
//
// scale * code is exact in float32 (11 + 8 bits), and the sum is rounded once, as in whatever decoded the checkpoint.
#pragma once

#include <utility>

#include "kv_format.h"
#include "linear.h"

namespace vtoken {

constexpr int kPanel = 2 * kLanes;
constexpr int kGroup32 = 32;

#define VTOKEN_INLINE __attribute__((always_inline))

// f(0), f(1), ... f(kCount - 1), the index a constant to the compiler, so that arrays it indexes become registers.
template <int kCount, class Function>
__attribute__((always_inline)) inline void unroll(Function&& f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) VTOKEN_INLINE {
    (f(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

inline Vec load_f16(const uint16_t* from) {
#if defined(VTOKEN_AVX512)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(VTOKEN_AVX2)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(from[i]);
  return v;
#endif
}

inline Vec load_bf16(const uint16_t* from) {
  typedef uint16_t Narrow __attribute__((vector_size(kLanes * 2)));
  Narrow v;
  std::memcpy(&v, from, sizeof v);
  return bitcast(__builtin_convertvector(v, VecInt) << 16);
}

inline Vec load_int8(const int8_t* from) {
#if defined(VTOKEN_AVX512)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(VTOKEN_AVX2)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = float(from[i]);
  return v;
#endif
}

// Each holding: kGroup k at a time, kBytes for them in a panel. begin(group), then block(b) for b = 0, 8, ..., then
// get(i, half) gives k = b + i of the first or second half of the outputs; i is a constant after unrolling.
struct HoldF32 {
  static constexpr int kGroup = 8, kBytes = kGroup * kPanel * 4, kUnit = kPanel * 4;  // kUnit: bytes of one k
  const float* at;
  void begin(const uint8_t* group) { at = (const float*)group; }
  void block(int) {}
  Vec get(int i, int half) const { return load(at + i * kPanel + half * kLanes); }
};

struct HoldF16 {
  static constexpr int kGroup = 8, kBytes = kGroup * kPanel * 2, kUnit = kPanel * 2;
  const uint16_t* at;
  void begin(const uint8_t* group) { at = (const uint16_t*)group; }
  void block(int) {}
  Vec get(int i, int half) const { return load_f16(at + i * kPanel + half * kLanes); }
};

struct HoldBF16 {
  static constexpr int kGroup = 8, kBytes = kGroup * kPanel * 2, kUnit = kPanel * 2;
  const uint16_t* at;
  void begin(const uint8_t* group) { at = (const uint16_t*)group; }
  void block(int) {}
  Vec get(int i, int half) const { return load_bf16(at + i * kPanel + half * kLanes); }
};

struct HoldG8 {
  static constexpr int kGroup = kGroup32, kBytes = kPanel * (2 + kGroup32), kUnit = 0;
  const int8_t *codes, *row;
  Vec scale[2];
  void begin(const uint8_t* group) {
    codes = (const int8_t*)group + 2 * kPanel;
    unroll<2>([&](auto half) VTOKEN_INLINE { scale[half] = load_f16((const uint16_t*)group + half * kLanes); });
  }
  void block(int b) { row = codes + b * kPanel; }
  Vec get(int i, int half) const { return load_int8(row + i * kPanel + half * kLanes) * scale[half]; }
};

struct HoldG4 {
  static constexpr int kGroup = kGroup32, kBytes = kPanel * (4 + kGroup32 / 2), kUnit = 0;
  const uint8_t* codes;
  Vec scale[2][4], offset[2];  // the scale divided by 1, 16, 256, 4096: for codes that stay where they are in a word
  VecInt word[2][2];
  void begin(const uint8_t* group) {
    codes = group + 4 * kPanel;
    unroll<2>([&](auto half) VTOKEN_INLINE {
      const Vec whole = load_f16((const uint16_t*)group + half * kLanes);
      unroll<4>([&](auto i) VTOKEN_INLINE { scale[half][i] = whole * splat(1.0f / float(1 << 4 * i)); });
      offset[half] = load_f16((const uint16_t*)group + kPanel + half * kLanes);
    });
  }
  void block(int b) {
    unroll<2>([&](auto half) VTOKEN_INLINE {
      std::memcpy(&word[half][0], codes + (b / 4 + half) * kLanes * 4, sizeof(VecInt));
      word[half][1] = word[half][0] >> 16;
    });
  }
  // A code left at its place in the mantissa of 2^23 is code * 16^j + 2^23: no shift, no conversion.
  Vec get(int i, int half) const {
    const int j = i % 4;
    const VecInt two23 = VecInt{} + 0x4b000000, mask = VecInt{} + (15 << 4 * j);
#if defined(VTOKEN_AVX512)
    const VecInt bits =
        (VecInt)_mm512_ternarylogic_epi32((__m512i)word[half][i / 4], (__m512i)mask, (__m512i)two23, 0xea);  // a & b | c
#else
    const VecInt bits = (word[half][i / 4] & mask) | two23;
#endif
    return fma(bitcast(bits) - splat(8388608.0f), scale[half][j], offset[half]);
  }
};

constexpr int64_t kInt8GroupBytes = kPanel * (2 + kGroup32);

inline int64_t int8_groups(int64_t in_features) { return (in_features + kGroup32 - 1) / kGroup32; }

// Bytes of the first `k` indices of a panel; `k` is a multiple of kGroup where a group shares a scale.
template <class Hold>
constexpr int64_t panel_bytes(int64_t k) {
  return Hold::kUnit ? k * Hold::kUnit : k / Hold::kGroup * Hold::kBytes;
}

}  // namespace vtoken
