// What decode adds to tallies when a slice's ranges are merged: their weights are still there, and final.
#pragma once

#include "decode_plan.h"

namespace vtoken::decoding {

// Added to a double, it rounds to multiples of 2^-28, the unit of attention mass; it holds sums up to 2^23.
constexpr double kMassRounder = 0x1.8p24;

// Half of a Vec, and the same as doubles.
typedef float HalfFloats __attribute__((vector_size(kLanes * 2)));
typedef double HalfDoubles __attribute__((vector_size(kLanes * 4)));

// A query head's view of the slice's own tokens.
struct OwnWeights {
  int32_t first, token;  // the tokens it sees; the last is its own
  const float* weights;  // e^(score - peak) of each
  double total;          // of these and of the past
  int32_t seen;          // tokens it sees, the past included
};

inline void tally_own(const AttendArgs& args, const Tally& tally, int32_t slice, const OwnWeights& own) {
  if (own.token < first_counted(args, tally, slice)) return;
  double* values = tally.values + slice * tally.stride;
  const float inverse = float(1 / own.total), share = float(own.total / own.seen);
  for (int32_t t = own.first; t <= own.token; ++t) {
    const float weight = own.weights[t - own.first];
    values[args.write_rows[t]] +=
        tally.counts_low ? double(weight < share) : (kMassRounder + double(weight * inverse)) - kMassRounder;
  }
}

// Makes a range's peak the factor that turns its weights into probabilities, and its total the weight that is a fair
// share: 1 to the bit where all weigh 1, so that none of these is less. `factor` is that of the range when merged.
inline void prepare_tally(const Result& result, int32_t row, float factor, double total, int32_t seen) {
  result.peaks[row] = factor * float(1 / total);
  result.totals[row] = float(total / (double(factor) * seen));
}

// Of the past, once all rows have been prepared.
inline void tally_past(const AttendArgs& args, const Sizes& sizes, const Tally& tally, const Queries& queries,
                       const Result* results) {
  // Rows of a KV head are in order of tokens.
  const int32_t skipped = std::max(0, first_counted(args, tally, queries.slice) - queries.token) * sizes.group;
  const int32_t per_head = queries.num_tokens * sizes.group, num_rows = sizes.num_kv_heads * per_head;
  if (skipped >= per_head) return;
  double* values = tally.values + queries.slice * tally.stride;
  for (const Result* result = results; result < results + (queries.end_range - queries.begin_range); ++result)
    // As many cells as fill a vector, so that their sums stay in registers while all rows are added.
    for (int32_t begin = 0; begin < *result->count; begin += kLanes) {
      const auto each_row = [&](auto add) {
        for (int32_t head = 0; head < num_rows; head += per_head)
          for (int32_t row = head + skipped; row < head + per_head; ++row)
            add(row, load(result->weights + int64_t(row) * sizes.range_cells + begin));
      };
      double drawn[kLanes];
      if (tally.counts_low) {
        VecInt low{};
        each_row([&](int32_t row, Vec weights) { low -= weights < splat(result->totals[row]); });
        for (int32_t i = 0; i < kLanes; ++i) drawn[i] = low[i];
      } else {
        HalfDoubles sums[2] = {kMassRounder - HalfDoubles{}, kMassRounder - HalfDoubles{}};
        each_row([&](int32_t row, Vec weights) {
          const Vec drawn = weights * splat(result->peaks[row]);
          HalfFloats halves[2];
          std::memcpy(halves, &drawn, sizeof drawn);
          sums[0] += __builtin_convertvector(halves[0], HalfDoubles);
          sums[1] += __builtin_convertvector(halves[1], HalfDoubles);
        });
        for (HalfDoubles& half : sums) half -= kMassRounder;
        std::memcpy(drawn, sums, sizeof drawn);
      }
      const int32_t count = std::min(kLanes, *result->count - begin);
      for (int32_t i = 0; i < count; ++i) values[result->rows[begin + i]] += drawn[i];
    }
}

}  // namespace vtoken::decoding
