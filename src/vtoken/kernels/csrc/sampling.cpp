// Draw the next tokens, every row by itself: the same arithmetic as `worker/sampler.py`, in one or two passes a row.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "simd.h"

namespace vtoken {
namespace {

typedef double Wide __attribute__((vector_size(kLanes * 4)));  // half as many lanes
typedef int64_t WideInt __attribute__((vector_size(kLanes * 4)));
constexpr int kWideLanes = kLanes / 2;

// e^x in float64 for x <= 0, to a few units in the last place: x = n ln 2 + r and the Taylor series of e^r, whose
// 14th term is below 2^-60 for |r| <= ln 2 / 2. Below -708 the result is 0, as it is for -infinity.
inline Wide exp_negative(Wide x) {
  const Wide magic = 6755399441055744.0 - Wide{};  // 1.5 * 2^52: rounds to the nearest integer
  const Wide clipped = x < -708.0 ? Wide{} - 708.0 : x;
  const Wide shifted = clipped * 1.4426950408889634 + magic;
  const Wide n = shifted - magic;
  const Wide r = (clipped - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  Wide p = Wide{} + 1.0 / 6227020800.0;
  for (double factorial : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0})
    p = p * r + 1.0 / factorial;
  p = (p * r + 1.0) * r + 1.0;
  WideInt bits, magic_bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&magic_bits, &magic, sizeof magic_bits);
  const WideInt power = (bits - magic_bits + 1023) << 52;
  Wide scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < -708.0 ? Wide{} : p * scale;
}

enum Status : int32_t { kFine = 0, kNaN = 1, kInfinite = 2, kRuledOut = 3 };

// The first of the highest logits, and whether there is anything to draw from.
Status find_peak(const float* logits, int64_t size, int64_t* at) {
  Vec most = splat(-__builtin_inff());
  VecInt odd{};  // lanes in which a NaN was seen
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec v = load(logits + i);
    most = max(v, most);
    odd |= v != v;
  }
  float top = peak(most);
  bool nan = false;
  for (int lane = 0; lane < kLanes; ++lane) nan |= odd[lane] != 0;
  for (; i < size; ++i) {
    nan |= logits[i] != logits[i];
    top = logits[i] > top ? logits[i] : top;
  }
  if (nan) return kNaN;
  if (std::isinf(top)) return top > 0 ? kInfinite : kRuledOut;
  // Vector by vector until the one that holds it.
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const VecInt hit = load(logits + i) == splat(top);
    bool any = false;
    for (int lane = 0; lane < kLanes; ++lane) any |= hit[lane] != 0;
    if (any) break;
  }
  while (logits[i] != top) ++i;
  *at = i;
  return kFine;
}

struct Limits {
  double temperature, min_p, top_p;
  int64_t top_k;  // 0 = off
};

// exp((logit - peak) / temperature) of every token, zero where min_p rules it out.
void weigh(const float* logits, int64_t size, float top, const Limits& limits, double* weights) {
  int64_t i = 0;
  for (; i + kWideLanes <= size; i += kWideLanes) {
    Wide x;
    for (int lane = 0; lane < kWideLanes; ++lane) x[lane] = logits[i + lane];
    const Wide w = exp_negative((x - double(top)) / limits.temperature);
    const Wide kept = w < limits.min_p ? Wide{} : w;
    std::memcpy(weights + i, &kept, sizeof kept);
  }
  for (; i < size; ++i) {
    const double w = exp_negative(Wide{} + (double(logits[i]) - double(top)) / limits.temperature)[0];
    weights[i] = w < limits.min_p ? 0.0 : w;
  }
}

// The first entry whose running sum exceeds `uniform * total`; it has a weight above zero.
template <class At>
int64_t invert(int64_t count, double total, double uniform, At weight_at) {
  // uniform < 1, but the product may round up to the total: then it is the last entry that added weight.
  const double target = std::min(uniform * total, std::nextafter(total, 0.0));
  double running = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double w = weight_at(i);
    if (w > 0) last = i;
    running += w;
    if (running > target) return i;
  }
  return last;
}

// With top_k or top_p: from the likeliest token down, so that what is kept comes first. No more tokens are sorted than
// the limits can keep.
int64_t draw_by_rank(const float* logits, const double* weights, int64_t size, const Limits& limits, double uniform,
                     std::vector<int32_t>& order) {
  const auto likelier = [logits](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  order.resize(size);
  std::iota(order.begin(), order.end(), 0);
  const int64_t most = limits.top_k > 0 && limits.top_k < size ? limits.top_k : size;
  int64_t sorted = 0;
  const auto sort_to = [&](int64_t count) {
    count = std::min(count, most);
    if (count < size) std::nth_element(order.begin() + sorted, order.begin() + count, order.end(), likelier);
    std::sort(order.begin() + sorted, order.begin() + count, likelier);
    sorted = count;
  };
  // The mass that top_p is a share of: all, or what top_k keeps.
  double total = 0;
  if (most < size) {
    sort_to(most);
    for (int64_t i = 0; i < most; ++i) total += weights[order[i]];
  } else {
    for (int64_t i = 0; i < size; ++i) total += weights[i];
    sort_to(64);
  }
  // The shortest run that reaches top_p: a token stays when the mass before it falls short of that.
  double before = 0;
  int64_t kept = 0;
  while (kept < most) {
    if (kept == sorted) sort_to(4 * sorted);
    if (kept > 0 && before >= limits.top_p * total) break;
    before += weights[order[kept++]];
  }
  return order[invert(kept, before, uniform, [&](int64_t i) { return weights[order[i]]; })];
}

}  // namespace
}  // namespace vtoken

extern "C" {

// One draw a row of logits [rows, size]. `tokens[r]` is -1 where `statuses[r]` is not 0.
void vtoken_sample(const float* logits, int64_t rows, int64_t size, const uint8_t* greedy, const float* temperature,
                   const float* min_p, const float* top_p, const int32_t* top_k, const double* uniforms,
                   int32_t* tokens, int32_t* statuses, int32_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && rows > 1)
  {
    std::vector<double> weights;
    std::vector<int32_t> order;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = logits + r * size;
      int64_t at = -1;
      statuses[r] = vtoken::find_peak(row, size, &at);
      if (statuses[r] == vtoken::kFine && !greedy[r]) {
        const vtoken::Limits limits{temperature[r], min_p[r], top_p[r], top_k[r]};
        weights.resize(size);
        vtoken::weigh(row, size, row[at], limits, weights.data());
        if (limits.top_p < 1 || (limits.top_k > 0 && limits.top_k < size)) {
          at = vtoken::draw_by_rank(row, weights.data(), size, limits, uniforms[r], order);
        } else {
          double total = 0;
          for (double w : weights) total += w;
          at = vtoken::invert(size, total, uniforms[r], [&](int64_t i) { return weights[i]; });
        }
      }
      tokens[r] = int32_t(at);
    }
  }
}
}
