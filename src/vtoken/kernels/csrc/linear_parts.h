// What the float and the int8 products share.
#pragma once

#include <algorithm>

#include "linear_holding.h"

namespace vtoken {

constexpr int64_t kPrefetch = 2048;  // bytes ahead, since hardware stops at each page
constexpr int64_t kRowBlock = 256;   // rows that share a panel while it is near

void run_int8(const LinearArgs& args);

// Waking a thread costs more than it brings for work of about 20 us: reading the weights counts as much as a row.
inline bool worth_threads(const LinearArgs& a) {
  return a.num_threads > 1 && (a.num_rows + 1) * a.in_features * a.out_features > 1 << 20;
}

// work(panel from, to, row from, to) for shares of panels and blocks of up to `block_rows` of `rows` (or tiles of them).
// A few shares a thread, of even sizes, so that a thread that is held up leaves some to the others. Within a parallel
// region.
template <class Work>
void divide(const LinearArgs& a, int64_t rows, int64_t block_rows, Work&& work) {
  const int64_t num_panels = (a.out_features + kPanel - 1) / kPanel;
  const int64_t num_blocks = (rows + block_rows - 1) / block_rows;
  const int64_t num_shares = std::min<int64_t>(num_panels, a.num_threads * 4);
#pragma omp for collapse(2) schedule(dynamic) nowait
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t share = 0; share < num_shares; ++share) {
      work(num_panels * share / num_shares, num_panels * (share + 1) / num_shares,
           rows * block / num_blocks, rows * (block + 1) / num_blocks);
    }
  }
}

VTOKEN_INLINE inline void prefetch(const uint8_t* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

// Where a tile's results go: added to sums until the last chunk, then given bias and written out.
struct Target {
  float* sums;  // [rows, kPanel] of the chunks before
  bool first, last;
  const float* bias;
  float* out;
  int64_t stride;
  int width;  // outputs there are in this panel
  bool accumulate;
  const uint8_t* next;  // to be fetched, next_step bytes for each group of k
  int64_t next_step;
};

// The outputs of a panel that is not full.
__attribute__((noinline)) inline void write_part(int rows, const Target& to) {
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < to.width; ++i) {
      float* const at = to.out + r * to.stride + i;
      float value = to.sums[r * kPanel + i];
      if (to.bias) value += to.bias[i];
      *at = to.accumulate ? value + *at : value;
    }
  }
}

// Hand over two vectors a row.
template <int kCount>
VTOKEN_INLINE inline void finish(Vec (&acc)[kCount], const Target& to) {
  constexpr int kRows = kCount / 2;
  if (!to.first) unroll<kCount>([&](auto n) VTOKEN_INLINE { acc[n] += load(to.sums + n * kLanes); });
  if (!to.last || to.width < kPanel) {
    unroll<kCount>([&](auto n) VTOKEN_INLINE { store(to.sums + n * kLanes, acc[n]); });
    if (to.last) write_part(kRows, to);
    return;
  }
  for (int half = 0; half < 2; ++half) {
    const Vec bias = to.bias ? load(to.bias + half * kLanes) : Vec{};
    unroll<kRows>([&](auto r) VTOKEN_INLINE {
      float* const at = to.out + r * to.stride + half * kLanes;
      const Vec value = (half ? acc[2 * r + 1] : acc[2 * r]) + bias;
      store(at, to.accumulate ? value + load(at) : value);
    });
  }
}

inline Target target(const LinearArgs& a, int64_t panel, int64_t begin) {
  const int64_t column = panel * kPanel;
  Target to{};
  to.bias = a.bias ? a.bias + column : nullptr;
  to.out = a.out + begin * a.out_stride + column;
  to.stride = a.out_stride;
  to.width = int(std::min<int64_t>(kPanel, a.out_features - column));
  to.accumulate = a.accumulate;
  return to;
}

}  // namespace vtoken
