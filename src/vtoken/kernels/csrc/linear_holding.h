// How weights lie in memory, and how they are widened to float32.
//
// A weight [out, in] is cut into panels of kPanel outputs (the last one padded with zeros). In a panel all outputs of
// one `in` index k lie side by side, so one vector holds the same k of kLanes outputs and a product needs no sums across
// lanes. Groups are of kGroup32 consecutive k of one output:
//
//   f32, f16, bf16   [k][kPanel] numbers
//   g8               per group: fp16 scale [kPanel], codes of 8 bits (HoldG8::place);    w = scale * code
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
#if defined(VTOKEN_AVX2)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = float(from[i]);
  return v;
#endif
}

// Each holding: kGroup k at a time, kBytes for them in a panel. begin(group), then block(b) for b = 0, kBlock, ...,
// then get(i, half) gives k = b + i of the first or second half of the outputs; i is a constant after unrolling.
struct HoldF32 {
  static constexpr int kGroup = 4, kBlock = 4, kBytes = kGroup * kPanel * 4, kUnit = kPanel * 4;  // kUnit: bytes of one k
  const float* at;
  void begin(const uint8_t* group) { at = (const float*)group; }
  void block(int) {}
  Vec get(int i, int half) const { return load(at + i * kPanel + half * kLanes); }
};

struct HoldF16 {
  static constexpr int kGroup = 4, kBlock = 4, kBytes = kGroup * kPanel * 2, kUnit = kPanel * 2;
  const uint16_t* at;
  void begin(const uint8_t* group) { at = (const uint16_t*)group; }
  void block(int) {}
  Vec get(int i, int half) const { return load_f16(at + i * kPanel + half * kLanes); }
};

struct HoldBF16 {
  static constexpr int kGroup = 4, kBlock = 4, kBytes = kGroup * kPanel * 2, kUnit = kPanel * 2;
  const uint16_t* at;
  void begin(const uint8_t* group) { at = (const uint16_t*)group; }
  void block(int) {}
  Vec get(int i, int half) const { return load_bf16(at + i * kPanel + half * kLanes); }
};

#if defined(VTOKEN_AVX512)
// Codes as in int8: four consecutive k, each plus 128, in a word of each output.
struct HoldG8 {
  static constexpr int kGroup = kGroup32, kBlock = 4, kBytes = kPanel * (2 + kGroup32), kUnit = 0, kBias = 128;
  static constexpr int place(int i, int lane) { return (i / 4 * kPanel + lane) * 4 + i % 4; }
  const uint8_t *codes, *at;
  Vec scale[2], offset[2];
  void begin(const uint8_t* group) {
    codes = group + 2 * kPanel;
    unroll<2>([&](auto half) VTOKEN_INLINE {
      const Vec whole = load_f16((const uint16_t*)group + half * kLanes);
      scale[half] = whole * splat(0x1p-8f);
      offset[half] = whole * splat(-0x1p15f - 128);
    });
  }
  void block(int b) { at = codes + b * kPanel; }
  // A masked load puts the code into the mantissa of 2^23, which makes it 2^23 + 256 * (code + 128): no shift, no
  // conversion. Both factors and the offset are exact (11 + 9 bits), and so is the result, rounded once: an intrinsic,
  // since the compiler may otherwise fuse the offset's product instead of this one.
  Vec get(int i, int half) const {
    const __m512i bits = _mm512_mask_loadu_epi8(_mm512_set1_epi32(0x4b000000), 0x2222222222222222,
                                                at + place(i, half * kLanes) - 1);
    return (Vec)_mm512_fmadd_ps((__m512)bits, (__m512)scale[half], (__m512)offset[half]);
  }
};

struct HoldG4 {
  static constexpr int kGroup = kGroup32, kBlock = 4, kBytes = kPanel * (4 + kGroup32 / 2), kUnit = 0;
  const uint8_t *codes, *at;
  Vec scale[2], offset[2];
  void begin(const uint8_t* group) {
    codes = group + 4 * kPanel;
    unroll<2>([&](auto half) VTOKEN_INLINE {
      scale[half] = load_f16((const uint16_t*)group + half * kLanes);
      offset[half] = load_f16((const uint16_t*)group + kPanel + half * kLanes);
    });
  }
  void block(int b) { at = codes + b / 8 * 4 * kPanel + b % 8 / 2; }
  // A permutation looks at the lowest 4 bits of a word, and loads from odd addresses bring half of the codes there:
  // as a table of the numbers 0 to 15 it converts without a mask. Loads end up to 3 bytes behind the group.
  Vec get(int i, int half) const {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i bits = _mm512_loadu_si512(at + half * kLanes * 4 + i / 2);
    if (i % 2) bits = _mm512_srli_epi32(bits, 4);
    return fma((Vec)_mm512_permutexvar_ps(bits, numbers), scale[half], offset[half]);
  }
};
#else
struct HoldG8 {
  static constexpr int kGroup = kGroup32, kBlock = 4, kBytes = kPanel * (2 + kGroup32), kUnit = 0, kBias = 0;
  static constexpr int place(int i, int lane) { return i * kPanel + lane; }
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
  static constexpr int kGroup = kGroup32, kBlock = 8, kBytes = kPanel * (4 + kGroup32 / 2), kUnit = 0;
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
    const VecInt bits = (word[half][i / 4] & (15 << 4 * j)) | 0x4b000000;
    return fma(bitcast(bits) - splat(8388608.0f), scale[half][j], offset[half]);
  }
};
#endif

constexpr int64_t kInt8GroupBytes = kPanel * (2 + kGroup32);

inline int64_t int8_groups(int64_t in_features) { return (in_features + kGroup32 - 1) / kGroup32; }

// Bytes of the first `k` indices of a panel; `k` is a multiple of kGroup where a group shares a scale.
template <class Hold>
constexpr int64_t panel_bytes(int64_t k) {
  return Hold::kUnit ? k * Hold::kUnit : k / Hold::kGroup * Hold::kBytes;
}

}  // namespace vtoken
