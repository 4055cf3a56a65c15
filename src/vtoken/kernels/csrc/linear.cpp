// Linear layers with float32 maths on packed weights of any holding.
//
// Every output element is a sum over chunks of kChunk k, each of them a chain of fused multiply-adds, all in ascending
// order, whatever the number of rows, the number of threads and the holding: so a row's bits depend on nothing but the
// row and the weight. Chunks keep the error of long sums down: it grows with the length of a chain.
#include <type_traits>

#include "linear_parts.h"

namespace vtoken {
namespace {

// Rows of one register tile: accumulators for 2 vectors each, beside 2 vectors of weights and a broadcast, out of 32
// registers (AVX-512) or 16.
constexpr int kMaxTile = kLanes == 16 ? 14 : 6;
// Up to so many rows weights are widened in registers; above, once into a buffer that all rows then read.
constexpr int kMaxDirect = kLanes == 16 ? 8 : 4;
constexpr int kMinTile = std::min(kMaxDirect + 1, kMaxTile / 2);
constexpr int64_t kChunk = 128;  // k of that buffer: it lies in the first-level cache beside the rows

// kRows rows times `num_k` k of a panel. What comes next is fetched: of the panel itself where it is read directly.
template <class Hold, int kRows, bool kDirect>
void tile(const uint8_t* panel, int64_t num_k, const float* x, int64_t stride, const Target& to) {
  Vec acc[2 * kRows];
  unroll<2 * kRows>([&](auto n) VTOKEN_INLINE { acc[n] = Vec{}; });
  const auto step = [&](const Hold& group, auto i, const float* x) VTOKEN_INLINE {
    const Vec w0 = group.get(i, 0), w1 = group.get(i, 1);
    unroll<kRows>([&](auto r) VTOKEN_INLINE {
      const Vec value = splat(x[r * stride]);
      acc[2 * r] = accumulate(value, w0, acc[2 * r]);
      acc[2 * r + 1] = accumulate(value, w1, acc[2 * r + 1]);
    });
  };
  const uint8_t* next = to.next;
  int64_t k = 0;
  for (; k + Hold::kGroup <= num_k; k += Hold::kGroup, panel += Hold::kBytes) {
    Hold group;
    group.begin(panel);
    if constexpr (kDirect) {
      prefetch(panel + kPrefetch, Hold::kBytes);
    } else {
      prefetch(next, to.next_step);
      next += to.next_step;
    }
    for (int b = 0; b < Hold::kGroup; b += Hold::kBlock) {
      group.block(b);
      unroll<Hold::kBlock>([&](auto i) VTOKEN_INLINE { step(group, i, x + k + b + i); });
    }
  }
  if constexpr (Hold::kUnit > 0) {
    for (; k < num_k; ++k, panel += Hold::kUnit) {
      Hold group;
      group.begin(panel);
      group.block(0);
      step(group, std::integral_constant<int, 0>{}, x + k);
    }
  }
  finish(acc, to);
}

using Tile = void (*)(const uint8_t*, int64_t, const float*, int64_t, const Target&);

// The tile of `rows` rows, kLeast <= rows < kLeast + the number of indices.
template <class Hold, int kLeast, bool kDirect, int... kIndex>
Tile pick(int64_t rows, std::integer_sequence<int, kIndex...>) {
  static constexpr Tile kTiles[] = {tile<Hold, kLeast + kIndex, kDirect>...};
  return kTiles[rows - kLeast];
}

// The next `num_k` k of a panel as float32 [num_k][kPanel].
template <class Hold>
void widen(const uint8_t* panel, int64_t num_k, float* out) {
  int64_t k = 0;
  for (; k + Hold::kGroup <= num_k; k += Hold::kGroup, panel += Hold::kBytes) {
    Hold group;
    group.begin(panel);
    for (int b = 0; b < Hold::kGroup; b += Hold::kBlock) {
      group.block(b);
      unroll<Hold::kBlock>([&](auto i) VTOKEN_INLINE {
        store(out + (k + b + i) * kPanel, group.get(i, 0));
        store(out + (k + b + i) * kPanel + kLanes, group.get(i, 1));
      });
    }
  }
  if constexpr (Hold::kUnit > 0) {
    for (; k < num_k; ++k, panel += Hold::kUnit) {
      Hold group;
      group.begin(panel);
      group.block(0);
      store(out + k * kPanel, group.get(0, 0));
      store(out + k * kPanel + kLanes, group.get(0, 1));
    }
  }
}

// All rows, few as they are, times one panel, widened in registers.
template <class Hold>
void multiply_few(const LinearArgs& a, int64_t panel) {
  alignas(64) float sums[kMaxDirect * kPanel];
  const uint8_t* weights = a.packed + panel * panel_bytes<Hold>(a.in_features);
  const Tile tile = pick<Hold, 1, true>(a.num_rows, std::make_integer_sequence<int, kMaxDirect>{});
  Target to = target(a, panel, 0);
  to.sums = sums;
  for (int64_t start = 0; start == 0 || start < a.in_features; start += kChunk) {
    const int64_t num_k = std::min(kChunk, a.in_features - start);
    to.first = start == 0;
    to.last = start + num_k >= a.in_features;
    tile(weights + panel_bytes<Hold>(start), num_k, a.x + start, a.x_stride, to);
  }
}

// Rows [begin, end) times one panel, widened once.
template <class Hold>
void multiply_many(const LinearArgs& a, int64_t panel, int64_t begin, int64_t end) {
  constexpr bool kIsWide = std::is_same_v<Hold, HoldF32>;
  constexpr int64_t kChunkBytes = panel_bytes<Hold>(kChunk);
  alignas(64) float wide[kIsWide ? 1 : kChunk * kPanel];
  alignas(64) float sums[kRowBlock * kPanel];
  const uint8_t* weights = a.packed + panel * panel_bytes<Hold>(a.in_features);
  const int64_t rows = end - begin, num_tiles = (rows + kMaxTile - 1) / kMaxTile;
  Target to = target(a, panel, begin);
  float* const out = to.out;
  for (int64_t start = 0; start == 0 || start < a.in_features; start += kChunk) {
    const int64_t num_k = std::min(kChunk, a.in_features - start);
    const uint8_t* chunk = weights + panel_bytes<Hold>(start);
    const uint8_t* next = chunk + kChunkBytes;
    to.first = start == 0;
    to.last = start + num_k >= a.in_features;
    if constexpr (!kIsWide) {
      widen<Hold>(chunk, num_k, wide);
      chunk = (const uint8_t*)wide;
    }
    for (int64_t t = 0; t < num_tiles; ++t) {
      // Tiles of even sizes: beyond kMaxDirect rows none is smaller than kMinTile.
      const int64_t from = rows * t / num_tiles, count = rows * (t + 1) / num_tiles - from;
      // The first two tiles fetch the next chunk, evenly, since few lines can be on their way at once.
      to.next = next + (t == 1 ? kChunkBytes / 2 : 0);
      to.next_step = t < 2 ? kChunkBytes / (kChunk / HoldF32::kGroup) / (num_tiles > 1 ? 2 : 1) : 0;
      to.sums = sums + from * kPanel;
      to.out = out + from * a.out_stride;
      pick<HoldF32, kMinTile, false>(count, std::make_integer_sequence<int, kMaxTile - kMinTile + 1>{})(
          chunk, num_k, a.x + (begin + from) * a.x_stride + start, a.x_stride, to);
    }
  }
}

template <class Hold>
void run(const LinearArgs& a) {
#pragma omp parallel num_threads(a.num_threads) if (worth_threads(a))
  divide(a, a.num_rows, kRowBlock, [&](int64_t panel, int64_t last_panel, int64_t begin, int64_t end) {
    for (; panel < last_panel; ++panel) {
      if (a.num_rows <= kMaxDirect) {
        multiply_few<Hold>(a, panel);
      } else {
        multiply_many<Hold>(a, panel, begin, end);
      }
    }
  });
}

}  // namespace
}  // namespace vtoken

using namespace vtoken;

int64_t vtoken_linear(const LinearArgs* args) {
  switch (args->holding) {
    case kHoldF32: run<HoldF32>(*args); break;
    case kHoldF16: run<HoldF16>(*args); break;
    case kHoldBF16: run<HoldBF16>(*args); break;
    case kHoldG8: run<HoldG8>(*args); break;
    case kHoldG4: run<HoldG4>(*args); break;
    case kHoldInt8: run_int8(*args); break;
  }
  return 0;
}
