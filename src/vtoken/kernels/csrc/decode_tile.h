// Scores and weighted sums of a tile: up to kTile live cells of one KV head against the query heads of its group.
#pragma once

#include <type_traits>

#include "attention_parts.h"

namespace vtoken::decoding {

constexpr int32_t kTile = 128;
// A tile's cells are computed in an order that draws from so many places of memory in turn: blocks at random places
// arrive up to twice as fast as one after the other (Zen 4: 12 KB runs at 18 and 29 GB/s, prefetched both).
constexpr int32_t kPlaces = 8;
constexpr int32_t kStep = 16;   // cells whose scores are stored at once, a multiple of kLanes
constexpr int32_t kFolded = 4;  // cells whose sums are folded into one vector
// Query heads computed together: with kFolded cells each, and as many vectors of a value, they fill the registers.
constexpr int32_t kMaxRows = kLanes == 16 ? 4 : 2;

struct Tile {
  const char* from;         // of this head
  const int64_t* elements;  // where cells start, in elements; up to whole steps, live cells repeated behind `count`
  int32_t count;
  int32_t head_dim;

  // Another tile, which is prefetched meanwhile; it may be empty.
  const char* ahead_from;
  const int64_t* ahead_elements;
  int32_t ahead_count;
  int32_t ahead_element_bytes;
  int64_t ahead_cell_bytes;
};

// Into the second cache: the first can wait for too few lines at a time to keep the memory busy. Cell by cell between
// the products, for the same reason.
[[gnu::always_inline]] inline void prefetch(const Tile& tile, int32_t begin, int32_t end) {
  for (int32_t i = begin; i < std::min(end, tile.ahead_count); ++i) {
    const char* cell = tile.ahead_from + tile.ahead_elements[i] * tile.ahead_element_bytes;
    for (const char* line = cell; line < cell + tile.ahead_cell_bytes; line += Scratch::kLine)
      __builtin_prefetch(line, 0, 2);
  }
}

template <KVFormat F>
using Element =
    std::conditional_t<F == kFloat32, float, std::conditional_t<bytes_per_element(F) == 2, uint16_t, uint8_t>>;

template <KVFormat F>
Vec decode_some(const void* from, int64_t at, int32_t count) {
  float some[kLanes] = {};
  for (int32_t i = 0; i < count; ++i) some[i] = decode_one<F>(from, at + i);
  return load(some);
}

// The same vector, in a register from here on: else the compiler loads it again for every product, and loads are what
// these loops run out of first.
inline Vec held(Vec v) {
#if defined(VTOKEN_AVX512)
  asm("" : "+v"(v));
#elif defined(VTOKEN_AVX2)
  asm("" : "+x"(v));
#endif
  return v;
}

// The same number, loaded by itself: compilers like to gather what lies apart by one slow instruction.
inline float held(float x) {
#if defined(VTOKEN_AVX512) || defined(VTOKEN_AVX2)
  asm("" : "+x"(x));
#endif
  return x;
}

// Four vectors to one, each of whose 128-bit lanes holds a part of the sum of a, of b, of c and of d.
inline Vec fold(Vec a, Vec b, Vec c, Vec d) {
#if defined(VTOKEN_AVX512)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
  return (Vec)_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
#elif defined(VTOKEN_AVX2)
  return (Vec)_mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
#else
  return Vec{sum(a), sum(b), sum(c), sum(d)};
#endif
}

// The kStep sums that are in four folded vectors, the first four in the first one.
inline void store_folded(float* to, const Vec* folded) {
#if defined(VTOKEN_AVX512)
  const __m512 a = (__m512)folded[0], b = (__m512)folded[1], c = (__m512)folded[2], d = (__m512)folded[3];
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  _mm512_storeu_ps(to, _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)));
#elif defined(VTOKEN_AVX2)
  for (int i = 0; i < 4; i += 2) {
    const __m256 a = (__m256)folded[i], b = (__m256)folded[i + 1];
    _mm256_storeu_ps(to + i * 4, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
  }
#else
  std::memcpy(to, folded, kStep * sizeof(float));
#endif
}

// Whether kWide elements at a time are decoded, and faster than by vector: FP8, by table.
template <KVFormat F>
#if defined(VTOKEN_AVX512) && defined(__AVX512VBMI__)
constexpr bool kDecodesWide = F == kFp8E4M3;
#else
constexpr bool kDecodesWide = false;
#endif
constexpr int32_t kWide = 64;

// kWide codes of FP8 to halves of the same value.
inline void expand(const uint8_t* codes, uint16_t* halves);

#if defined(VTOKEN_AVX512) && defined(__AVX512VBMI__)
// The halves of the 128 codes without a sign: their high bytes and their low bytes.
struct HalfTable {
  constexpr HalfTable() {
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> 3, mantissa = code & 7;
      const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // highest bit of a subnormal number
      const int half = code == 0x7f ? 0x7e00
                       : exponent   ? (exponent + 8) << 10 | mantissa << 7
                       : mantissa   ? (top + 6) << 10 | (mantissa - (1 << top)) << (10 - top)
                                    : 0;
      high[code] = half >> 8;
      low[code] = half & 0xff;
    }
  }

  alignas(64) uint8_t high[128] = {};
  alignas(64) uint8_t low[128] = {};
};
inline constexpr HalfTable kHalves;

inline void expand(const uint8_t* codes, uint16_t* halves) {
  // Eight bytes of the first half, eight of the second, and so on: unpacking then puts them in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kHalves.low), x, _mm512_load_si512(kHalves.low + 64));
  const __m512i magnitude =
      _mm512_permutex2var_epi8(_mm512_load_si512(kHalves.high), x, _mm512_load_si512(kHalves.high + 64));
  const __m512i high = _mm512_ternarylogic_epi32(magnitude, x, _mm512_set1_epi8(-128), 0xf8);  // | x & 0x80
  _mm512_store_si512(halves, _mm512_unpacklo_epi8(low, high));
  _mm512_store_si512(halves + 32, _mm512_unpackhi_epi8(low, high));
}
#endif

// scores[row * stride + i] = q[row] . cell i, for whole steps, without the last elements that fill no vector. Vector v
// of row r is at q + (v * q_rows + r) * kLanes.
template <KVFormat F, int R>
void score_rows(const Tile& tile, const float* q, int32_t q_rows, float* scores, int64_t stride) {
  const int32_t whole = tile.head_dim / kLanes * kLanes;
  const Element<F>* from = reinterpret_cast<const Element<F>*>(tile.from);
  for (int32_t first = 0; first < tile.count; first += kStep, scores += kStep) {
    Vec folded[R][kStep / kFolded];
#pragma GCC unroll 1
    for (int32_t group = 0; group < kStep / kFolded; ++group) {
      const int64_t* at = tile.elements + first + group * kFolded;
      prefetch(tile, first + group * kFolded, first + (group + 1) * kFolded);
      const Element<F>*a = from + at[0], *b = from + at[1], *c = from + at[2], *d = from + at[3];
      const float* x = q;
      Vec sums[R][kFolded] = {};
      const auto add = [&](Vec ka, Vec kb, Vec kc, Vec kd) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const Vec y = held(load(x + r * kLanes));
          sums[r][0] = fma(y, ka, sums[r][0]);
          sums[r][1] = fma(y, kb, sums[r][1]);
          sums[r][2] = fma(y, kc, sums[r][2]);
          sums[r][3] = fma(y, kd, sums[r][3]);
        }
        x += q_rows * kLanes;
      };
      int32_t e = 0;
      if constexpr (kDecodesWide<F>)
        for (; e + kWide <= whole; e += kWide) {
          alignas(64) uint16_t wide[kFolded][kWide];
          expand(a + e, wide[0]), expand(b + e, wide[1]), expand(c + e, wide[2]), expand(d + e, wide[3]);
          for (int32_t i = 0; i < kWide; i += kLanes)
            add(decode<kFloat16>(wide[0], i), decode<kFloat16>(wide[1], i), decode<kFloat16>(wide[2], i),
                decode<kFloat16>(wide[3], i));
        }
#pragma GCC unroll 1
      for (; e < whole; e += kLanes) add(decode<F>(a, e), decode<F>(b, e), decode<F>(c, e), decode<F>(d, e));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) folded[r][group] = fold(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store_folded(scores + r * stride, folded[r]);
  }
  prefetch(tile, Scratch::round_up(tile.count, kStep), kTile);
}

// Adds to scores what their last elements, which fill no vector, contribute.
template <KVFormat F>
void score_rest(const Tile& tile, int32_t num_rows, const float* q, float* scores, int64_t stride) {
  const int32_t whole = tile.head_dim / kLanes * kLanes, rest = tile.head_dim - whole;
  for (int32_t i = 0; i < tile.count; ++i) {
    const Vec k = decode_some<F>(tile.from, tile.elements[i] + whole, rest);
    const float* x = q + whole * num_rows;
    for (int32_t r = 0; r < num_rows; ++r) scores[r * stride + i] += sum(load(x + r * kLanes) * k);
  }
}

// sums[row] += weights[row] . cells, C vectors of the head's width from element `d` on, or its last `rest` elements.
template <KVFormat F, int R, int C>
void weigh_columns(const Tile& tile, int32_t d, int32_t rest, const float* weights, int64_t stride, float* sums,
                   int64_t sums_stride) {
  const Element<F>* from = reinterpret_cast<const Element<F>*>(tile.from);
  Vec total[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) total[r][c] = load(sums + r * sums_stride + d + c * kLanes);
  for (int32_t first = 0; first < tile.count; first += kFolded) {
    prefetch(tile, first, first + kFolded);
    const int32_t end = std::min(first + kFolded, tile.count);
#pragma GCC unroll 1
    for (int32_t i = first; i < end; ++i) {
      const Element<F>* cell = from + tile.elements[i];
      Vec v[C];
      if constexpr (kDecodesWide<F> && C * kLanes == kWide) {
        alignas(64) uint16_t wide[kWide];
        expand(cell + d, wide);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) v[c] = decode<kFloat16>(wide, c * kLanes);
      } else {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) v[c] = rest ? decode_some<F>(cell, d, rest) : decode<F>(cell, d + c * kLanes);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec w = splat(weights[r * stride + i]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) total[r][c] = fma(w, v[c], total[r][c]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(sums + r * sums_stride + d + c * kLanes, total[r][c]);
  prefetch(tile, Scratch::round_up(tile.count, kFolded), kTile);
}

template <KVFormat F, int R>
void weigh_rows(Tile& tile, const float* weights, int64_t stride, float* sums, int64_t sums_stride) {
  const int32_t whole = tile.head_dim / kLanes * kLanes, rest = tile.head_dim - whole;
  int32_t d = 0;
  for (; d + 4 * kLanes <= whole; d += 4 * kLanes) {
    weigh_columns<F, R, 4>(tile, d, 0, weights, stride, sums, sums_stride);
    tile.ahead_count = 0;  // once is enough
  }
  for (; d < whole; d += kLanes) {
    weigh_columns<F, R, 1>(tile, d, 0, weights, stride, sums, sums_stride);
    tile.ahead_count = 0;
  }
  if (rest) weigh_columns<F, R, 1>(tile, d, rest, weights, stride, sums, sums_stride);
}

// Rows go in as few parts as fit the registers, as even as can be.
template <KVFormat F>
void score_tile(Tile& tile, int32_t num_rows, const float* q, float* scores, int64_t stride) {
  int32_t row = 0;
  for (int32_t parts = (num_rows + kMaxRows - 1) / kMaxRows; parts; --parts) {
    const int32_t rows = (num_rows - row + parts - 1) / parts;
    const auto part = rows == 1   ? score_rows<F, 1>
                      : rows == 2 ? score_rows<F, 2>
                      : rows == 3 ? score_rows<F, std::min(3, kMaxRows)>
                                  : score_rows<F, kMaxRows>;
    part(tile, q + row * kLanes, num_rows, scores + row * stride, stride);
    tile.ahead_count = 0;  // once is enough
    row += rows;
  }
  if (tile.head_dim % kLanes) score_rest<F>(tile, num_rows, q, scores, stride);
}

template <KVFormat F>
void weigh_tile(Tile& tile, int32_t num_rows, const float* weights, int64_t stride, float* sums, int64_t sums_stride) {
  for (int32_t parts = (num_rows + kMaxRows - 1) / kMaxRows; parts; --parts) {
    const int32_t rows = (num_rows + parts - 1) / parts;
    const auto part = rows == 1   ? weigh_rows<F, 1>
                      : rows == 2 ? weigh_rows<F, 2>
                      : rows == 3 ? weigh_rows<F, std::min(3, kMaxRows)>
                                  : weigh_rows<F, kMaxRows>;
    part(tile, weights, stride, sums, sums_stride);
    num_rows -= rows, weights += rows * stride, sums += rows * sums_stride;
  }
}

using ScoreTile = decltype(&score_tile<kFloat32>);
using WeighTile = decltype(&weigh_tile<kFloat32>);
constexpr ScoreTile kScoreTile[] = {score_tile<kFloat32>, score_tile<kFloat16>, score_tile<kBFloat16>,
                                    score_tile<kFp8E4M3>, score_tile<kInt8>};
constexpr WeighTile kWeighTile[] = {weigh_tile<kFloat32>, weigh_tile<kFloat16>, weigh_tile<kBFloat16>,
                                    weigh_tile<kFp8E4M3>, weigh_tile<kInt8>};

}  // namespace vtoken::decoding
