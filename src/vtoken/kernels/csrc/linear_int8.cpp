// Linear layers on int8 weights with activations quantised by row and group of 32: integer sums within a group, float32
// beyond it. A row is quantised by its own numbers and summed in one order, so its bits do not depend on other rows.
#include "linear_parts.h"

namespace vtoken {
namespace {

constexpr int kMaxRows = kLanes == 16 ? 6 : 3;  // two integer and two float accumulators each

// A group of a row's activations. Weights are stored as code + 128 since the instruction wants one unsigned factor, so
// 128 times the sum of the activations has to go.
struct Activations {
  int8_t codes[kGroup32];
  float scale;
  int32_t correction;
};

// All activations, in LinearArgs::scratch: by tile of up to kMaxRows rows, then group, then row, so that a tile reads
// on. Tiles are of even sizes.
struct Quantised {
  Activations* at;
  int64_t num_rows, groups, num_tiles;
  explicit Quantised(const LinearArgs& a)
      : at((Activations*)a.scratch), num_rows(a.num_rows), groups(int8_groups(a.in_features)),
        num_tiles((a.num_rows + kMaxRows - 1) / kMaxRows) {}
  int64_t start(int64_t tile) const { return num_rows * tile / num_tiles; }
};

void quantise_group(const float* x, Activations* to) {
  typedef int8_t Narrow __attribute__((vector_size(kLanes)));
  Vec largest{};
  bool finite = true;
  for (int i = 0; i < kGroup32; i += kLanes) {
    const Vec v = load(x + i), size = bitcast(bitcast(v) & 0x7fffffff);
    largest = max(largest, size);
    for (int lane = 0; lane < kLanes; ++lane) finite &= bool((bitcast(size))[lane] < 0x7f800000);
  }
  const float most = peak(largest);
  // Infinity has no code: like NaN it makes the row's results NaN.
  to->scale = finite ? most / 127 : __builtin_nanf("");
  const float inverse = finite && most > 0 ? 127 / most : 0;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  VecInt total{};
  for (int i = 0; i < kGroup32; i += kLanes) {
    Vec scaled = load(x + i) * splat(finite && inverse < 0x1p120f ? inverse : 0);
    const VecInt code = finite ? bitcast(scaled + magic) - bitcast(magic) : VecInt{};
    total += code;
    const Narrow narrow = __builtin_convertvector(code, Narrow);
    std::memcpy(to->codes + i, &narrow, kLanes);
  }
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += total[lane];
  to->correction = -128 * sum;
}

void quantise_tile(const LinearArgs& a, const Quantised& to, int64_t tile) {
  const int64_t begin = to.start(tile), rows = to.start(tile + 1) - begin;
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = a.x + (begin + row) * a.x_stride;
    for (int64_t g = 0; g < to.groups; ++g) {
      const int64_t left = a.in_features - g * kGroup32;
      float padded[kGroup32] = {};
      if (left < kGroup32) std::memcpy(padded, x + g * kGroup32, left * sizeof(float));
      quantise_group(left < kGroup32 ? padded : x + g * kGroup32, to.at + begin * to.groups + g * rows + row);
    }
  }
}

// Each lane: acc + the sum of four unsigned bytes of w times four signed bytes of x.
inline VecInt dot4(VecInt acc, VecInt w, VecInt x) {
#if defined(VTOKEN_AVX512) && defined(__AVX512VNNI__)
  return (VecInt)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(VTOKEN_AVX2) && defined(__AVXVNNI__)
  return (VecInt)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#else
  // vpmaddubsw would saturate. As 16-bit numbers, bytes 0 and 2, then 1 and 3.
  typedef int16_t Short __attribute__((vector_size(kLanes * 4)));
  typedef uint16_t UnsignedShort __attribute__((vector_size(kLanes * 4)));
  const Short w_even = (Short)w & 255, w_odd = (Short)((UnsignedShort)w >> 8);
  const Short x_even = ((Short)x << 8) >> 8, x_odd = (Short)x >> 8;
#if defined(VTOKEN_AVX512)
  return acc + (VecInt)_mm512_madd_epi16((__m512i)w_even, (__m512i)x_even) +
         (VecInt)_mm512_madd_epi16((__m512i)w_odd, (__m512i)x_odd);
#elif defined(VTOKEN_AVX2)
  return acc + (VecInt)_mm256_madd_epi16((__m256i)w_even, (__m256i)x_even) +
         (VecInt)_mm256_madd_epi16((__m256i)w_odd, (__m256i)x_odd);
#else
  for (int i = 0; i < kLanes; ++i) {
    acc[i] += w_even[2 * i] * x_even[2 * i] + w_even[2 * i + 1] * x_even[2 * i + 1] + w_odd[2 * i] * x_odd[2 * i] +
              w_odd[2 * i + 1] * x_odd[2 * i + 1];
  }
  return acc;
#endif
#endif
}

// kRows rows times `groups` groups of a panel.
template <int kRows>
void tile(const uint8_t* panel, const Activations* x, int64_t groups, const Target& to) {
  Vec sums[2 * kRows];
  unroll<2 * kRows>([&](auto n) VTOKEN_INLINE { sums[n] = Vec{}; });
  for (int64_t g = 0; g < groups; ++g, panel += kInt8GroupBytes, x += kRows) {
    prefetch(panel + kPrefetch, kInt8GroupBytes);
    const uint8_t* weights = panel + 2 * kPanel;
    VecInt acc[2 * kRows];
    unroll<kRows>([&](auto r) VTOKEN_INLINE { acc[2 * r] = acc[2 * r + 1] = VecInt{} + x[r].correction; });
    unroll<kGroup32 / 4>([&](auto i) VTOKEN_INLINE {
      VecInt w0, w1;
      std::memcpy(&w0, weights + i * kPanel * 4, sizeof w0);
      std::memcpy(&w1, weights + i * kPanel * 4 + sizeof w0, sizeof w1);
      unroll<kRows>([&](auto r) VTOKEN_INLINE {
        int32_t four;
        std::memcpy(&four, x[r].codes + i * 4, 4);
        const VecInt all = VecInt{} + four;
        acc[2 * r] = dot4(acc[2 * r], w0, all);
        acc[2 * r + 1] = dot4(acc[2 * r + 1], w1, all);
      });
    });
    const Vec scale0 = load_f16((const uint16_t*)panel), scale1 = load_f16((const uint16_t*)panel + kLanes);
    unroll<kRows>([&](auto r) VTOKEN_INLINE {
      const Vec scale = splat(x[r].scale);
      sums[2 * r] = fma(__builtin_convertvector(acc[2 * r], Vec), scale * scale0, sums[2 * r]);
      sums[2 * r + 1] = fma(__builtin_convertvector(acc[2 * r + 1], Vec), scale * scale1, sums[2 * r + 1]);
    });
  }
  finish(sums, to);
}

// The rows of a tile times one panel.
void multiply(const LinearArgs& a, const Quantised& x, int64_t panel, int64_t row_tile) {
  float sums[kMaxRows * kPanel];
  const int64_t begin = x.start(row_tile), rows = x.start(row_tile + 1) - begin;
  Target to = target(a, panel, begin);
  to.first = to.last = true;
  to.sums = sums;
  using Tile = void (*)(const uint8_t*, const Activations*, int64_t, const Target&);
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    static constexpr Tile kTiles[] = {tile<kIndex + 1>...};
    kTiles[rows - 1](a.packed + panel * x.groups * kInt8GroupBytes, x.at + begin * x.groups, x.groups, to);
  }(std::make_integer_sequence<int, kMaxRows>{});
}

}  // namespace

void run_int8(const LinearArgs& a) {
  const Quantised x(a);
  const bool threads = worth_threads(a);
  // Few rows are quantised in less time than threads need to meet.
  const bool alone = !threads || x.num_tiles == 1;
  for (int64_t t = 0; alone && t < x.num_tiles; ++t) quantise_tile(a, x, t);
#pragma omp parallel num_threads(a.num_threads) if (threads)
  {
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < x.num_tiles; ++t) quantise_tile(a, x, t);
    }
    divide(a, x.num_tiles, kRowBlock / kMaxRows, [&](int64_t panel, int64_t last_panel, int64_t begin, int64_t end) {
      for (; panel < last_panel; ++panel) {
        for (int64_t t = begin; t < end; ++t) multiply(a, x, panel, t);
      }
    });
  }
}

}  // namespace vtoken
