// One tile of keys against one panel of query rows: the arithmetic of prefill attention.
//
// Scores are held transposed, a key's scores for all rows of the panel side by side, so the lanes of every vector are
// query rows. Keys and values then stay as they lie (their elements are broadcast), maxima and sums of a softmax run
// down the lanes and need no shuffles, and a row's result depends on no other row.
#pragma once

#include <cfloat>
#include <climits>

#include "simd.h"

namespace vtoken::prefill {

// A product block is kBlock broadcast elements times kRowVecs vectors, whose accumulators fill the registers.
constexpr int kRowVecs = 3;
#ifdef VTOKEN_AVX512
constexpr int kBlock = 8;
#else
constexpr int kBlock = 4;
#endif
constexpr int kPanel = kRowVecs * kLanes;  // query rows
constexpr int kTile = 64;                  // keys; a multiple of kBlock

typedef double VecDouble __attribute__((vector_size(kLanes * 4)));  // half as many as in a Vec
constexpr int kDoubles = kLanes / 2;

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kMassUnits = 0x1p28f;  // probabilities are added up as multiples of 1 / kMassUnits

constexpr int32_t round_up(int32_t n, int32_t to) { return (n + to - 1) / to * to; }

inline VecInt splat(int32_t x) { return x - VecInt{}; }

inline VecInt load(const int32_t* from) {
  VecInt v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// 2^x for x <= 0 with a relative error below 2e-7; exactly 0 below -126 and for -infinity, exactly 1 at 0; NaN stays
// NaN. The polynomial is the minimax one of degree 5 for 2^r, |r| <= 1/2, with 2^0 = 1 held.
inline Vec exp2_of_negative(Vec x) {
  const Vec lowest = vtoken::splat(-126.0f);
#ifdef VTOKEN_AVX512
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec magic = vtoken::splat(12582912.0f);  // 1.5 * 2^23: the sum's last place is 1
  const Vec clipped = x < lowest ? lowest : x;
  const Vec shifted = clipped + magic;
  const Vec n = shifted - magic;
#endif
  const Vec r = x - n;
  Vec p = vtoken::splat(0.001326472731307149f);
  p = p * r + vtoken::splat(0.009671512991189957f);
  p = p * r + vtoken::splat(0.05550733581185341f);
  p = p * r + vtoken::splat(0.24022242426872253f);
  p = p * r + vtoken::splat(0.6931470036506653f);
  p = p * r + vtoken::splat(1.0f);
#ifdef VTOKEN_AVX512
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)lowest, _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)n);
#else
  p = p * bitcast((bitcast(shifted) - bitcast(magic) + 127) << 23);
  return x < lowest ? Vec{} : p;
#endif
}

// To the nearest integer, halves to even; x >= 0 or NaN.
inline Vec round_positive(Vec x) {
  const Vec whole = vtoken::splat(0x1p23f);  // from here on every float is an integer
  return x < whole ? (x + whole) - whole : x;
}

// The state of a panel between two tiles, and what a lane is.
struct Panel {
  const float* queries;    // [head_dim, kPanel] times scale and log2(e), zeros in lanes without a row
  float* result;           // [head_dim rounded up to kBlock, kPanel] weighted values, not divided by `total` yet
  float* peak;             // [kPanel] largest score so far
  float* total;            // [kPanel] sum of 2^(score - peak)
  const int32_t* last;     // [kPanel] the lane's own position, which is the last one it sees
  const int32_t* hidden;   // [kPanel] positions up to this one lie before the lane's window
};

// acc[i][j] += a[i * row + k * step] * b[k * kPanel + j * kLanes], for k in [0, depth).
template <int C>
[[gnu::always_inline]] inline void multiply(Vec (&acc)[kBlock][C], const float* a, int64_t row, int64_t step,
                                            const float* b, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) right[j] = vtoken::load(b + k * kPanel + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i) {
      const Vec left = vtoken::splat(a[i * row + k * step]);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) acc[i][j] = accumulate(left, right[j], acc[i][j]);
    }
  }
}

// Scores [num_keys rounded up to kBlock, kPanel] of the tile's keys, in log2 units; raises `peak` [kPanel] to them.
template <int C>
void score(const Panel& panel, const float* keys, int64_t key_stride, int32_t head_dim, int32_t num_keys,
           float* scores, float* peak) {
  for (int32_t key = 0; key < num_keys; key += kBlock) {
    Vec acc[kBlock][C] = {};
    multiply<C>(acc, keys + key * key_stride, key_stride, 1, panel.queries, head_dim);
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      Vec most = vtoken::load(peak + j * kLanes);  // kept in memory: the product needs all registers
#pragma GCC unroll 8
      for (int i = 0; i < kBlock; ++i) {
        store(scores + (key + i) * kPanel + j * kLanes, acc[i][j]);
        most = max(acc[i][j], most);
      }
      store(peak + j * kLanes, most);
    }
  }
}

// What the tile needs beyond plain products: the soft cap, and -infinity where a row does not see a key. Scores are
// changed in place and `peak` [kPanel] is raised to what is left.
template <int C>
void cap_and_hide(const Panel& panel, const int32_t* positions, int32_t num_keys, float cap, bool hides, float* scores,
                  float* peak) {
  for (int j = 0; j < C; ++j) {
    Vec most = vtoken::load(peak + j * kLanes);
    const VecInt last = load(panel.last + j * kLanes), hidden = load(panel.hidden + j * kLanes);
    for (int32_t key = 0; key < num_keys; ++key) {
      float* at = scores + key * kPanel + j * kLanes;
      Vec s = vtoken::load(at);
      if (cap != 0) s = tanh(s) * vtoken::splat(cap);
      if (hides) {
        const VecInt position = splat(positions[key]);
        s = (position <= last) & (position > hidden) ? s : vtoken::splat(-__builtin_inff());
      }
      store(at, s);
      most = max(s, most);
    }
    store(peak + j * kLanes, most);
  }
}

// Turns scores into 2^(score - peak), with the peak raised to `new_peak`, and adds them to `total`. `shrink` [kPanel]
// is what everything summed under the old peak has to be multiplied by.
template <int C>
void soften(const Panel& panel, int32_t num_keys, const float* new_peak, float* scores, float* shrink) {
  for (int j = 0; j < C; ++j) {
    const Vec peak = vtoken::load(new_peak + j * kLanes);
    const Vec factor = exp2_of_negative(vtoken::load(panel.peak + j * kLanes) - peak);
    store(panel.peak + j * kLanes, peak);
    store(shrink + j * kLanes, factor);
    Vec total = vtoken::load(panel.total + j * kLanes) * factor;
    for (int32_t key = 0; key < num_keys; ++key) {
      float* at = scores + key * kPanel + j * kLanes;
      const Vec p = exp2_of_negative(vtoken::load(at) - peak);
      store(at, p);
      total += p;
    }
    store(panel.total + j * kLanes, total);
  }
}

// result = result * shrink + weights . values over the first `num_keys` keys.
template <int C>
void weigh(const Panel& panel, const float* weights, const float* values, int64_t value_stride, int32_t head_dim,
           int32_t num_keys, const float* shrink) {
  for (int32_t d = 0; d < head_dim; d += kBlock) {
    float* result = panel.result + d * kPanel;
    Vec acc[kBlock][C];
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j)
        acc[i][j] = vtoken::load(result + i * kPanel + j * kLanes) * vtoken::load(shrink + j * kLanes);
    multiply<C>(acc, values + d, 1, value_stride, weights, num_keys);
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) store(result + i * kPanel + j * kLanes, acc[i][j]);
  }
}

// The same bits as `weigh`, but a hidden key's value is not even multiplied by its zero weight, since 0 * NaN is NaN.
template <int C>
void weigh_seen(const Panel& panel, const int32_t* positions, const float* weights, const float* values,
                int64_t value_stride, int32_t head_dim, int32_t num_keys, const float* shrink) {
  for (int32_t d = 0; d < head_dim; ++d)
    for (int j = 0; j < C; ++j) {
      const VecInt last = load(panel.last + j * kLanes), hidden = load(panel.hidden + j * kLanes);
      float* result = panel.result + d * kPanel + j * kLanes;
      Vec acc = vtoken::load(result) * vtoken::load(shrink + j * kLanes);
      for (int32_t key = 0; key < num_keys; ++key) {
        const VecInt position = splat(positions[key]);
        const Vec more =
            fma(vtoken::splat(values[key * value_stride + d]), vtoken::load(weights + key * kPanel + j * kLanes), acc);
        acc = (position <= last) & (position > hidden) ? more : acc;
      }
      store(result, acc);
    }
}

// Adds each key's probabilities, as whole numbers of mass units, to `mass` [kTile, kDoubles]. The panel's peak and
// total are final; `units` [kPanel] is kMassUnits / total, 0 in lanes without a row.
template <int C>
void add_mass(const Panel& panel, const float* units, const float* scores, int32_t num_keys, double* mass) {
  for (int32_t key = 0; key < num_keys; ++key) {
    VecDouble sum;
    std::memcpy(&sum, mass + key * kDoubles, sizeof sum);
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      const Vec s = vtoken::load(scores + key * kPanel + j * kLanes), unit = vtoken::load(units + j * kLanes);
      Vec drawn = round_positive(exp2_of_negative(s - vtoken::load(panel.peak + j * kLanes)) * unit);
      // A lane without a row, or that does not see the key, draws nothing even where a NaN has got into it.
      drawn = (unit == Vec{}) | (s == vtoken::splat(-__builtin_inff())) ? Vec{} : drawn;
      typedef float Half __attribute__((vector_size(kLanes * 2)));
      Half halves[2];
      std::memcpy(halves, &drawn, sizeof drawn);
      sum += __builtin_convertvector(halves[0], VecDouble) + __builtin_convertvector(halves[1], VecDouble);
    }
    std::memcpy(mass + key * kDoubles, &sum, sizeof sum);
  }
}

// Counts for each key the lanes that see it and give it less than their fair share: adds to `low` [kTile, kLanes].
// `limits` [kPanel] are those shares in units of 2^(score - peak), 0 in lanes that do not count. Positions are looked
// at where some lane may not see some key.
template <int C>
void count_low(const Panel& panel, const float* limits, const int32_t* positions, bool hides, const float* scores,
               int32_t num_keys, int32_t* low) {
  for (int32_t key = 0; key < num_keys; ++key) {
    VecInt count = load(low + key * kLanes);
    const VecInt position = splat(positions[key]);
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      const int lane = j * kLanes;
      const Vec weight = exp2_of_negative(vtoken::load(scores + key * kPanel + lane) - vtoken::load(panel.peak + lane));
      VecInt below = weight < vtoken::load(limits + lane);  // -1 where it holds
      if (hides) below &= (position <= load(panel.last + lane)) & (position > load(panel.hidden + lane));
      count -= below;
    }
    std::memcpy(low + key * kLanes, &count, sizeof count);
  }
}

// Adds to `seen` [kPanel] how many of the keys each lane sees.
template <int C>
void count_seen(const Panel& panel, const int32_t* positions, int32_t num_keys, int32_t* seen) {
  for (int j = 0; j < C; ++j) {
    VecInt count = load(seen + j * kLanes);
    const VecInt last = load(panel.last + j * kLanes), hidden = load(panel.hidden + j * kLanes);
    for (int32_t key = 0; key < num_keys; ++key) {
      const VecInt position = splat(positions[key]);
      count -= (position <= last) & (position > hidden);
    }
    std::memcpy(seen + j * kLanes, &count, sizeof count);
  }
}

}  // namespace vtoken::prefill
