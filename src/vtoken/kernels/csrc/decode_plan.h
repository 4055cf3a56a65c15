// The work of one decode call, cut into ranges, and the memory that their results lie in.
#pragma once

#include "decode_tile.h"

namespace vtoken::decoding {

constexpr int32_t kRangeCells = 512;  // of one range: its scores stay in the first caches

// New tokens of a slice that see the same past: all of them, or each by itself under a window.
struct Queries {
  int32_t job, slice;
  int32_t token, num_tokens;
  int64_t hidden;                  // positions up to this one are out of sight
  bool is_tallied;                 // whether some tally counts one of them
  int32_t begin_range, end_range;  // indices of Range
};

struct Range {
  int32_t queries;
  int32_t begin, end;  // entries
};

struct Job {  // a slice
  int32_t begin_queries, end_queries;
  int32_t ranges_left;
};

// What computing a range leaves. Rows are [kv_head][token][query head of the group].
struct Result {
  float* peaks;    // [rows]
  float* totals;   // [rows] sum of e^(score - peak)
  float* values;   // [rows, padded_dim] the same weights times the values
  float* weights;  // [rows, range_cells] those weights, or null: kept for tallies
  int32_t* rows;   // [range_cells] rows of the slice, or null
  int32_t* count;  // live cells
};

// Sizes of one call.
struct Sizes {
  explicit Sizes(const AttendArgs& args)
      : num_kv_heads(args.num_kv_heads),
        group(args.num_heads / args.num_kv_heads),
        padded_dim((args.head_dim + kLanes - 1) / kLanes * kLanes),
        range_entries(std::max(1, kRangeCells / args.block_size)),
        range_cells((range_entries * args.block_size + kTile - 1) / kTile * kTile),
        bytes_per_cell(num_kv_heads * args.head_dim * (bytes_per_element(KVFormat(args.key_format)) +
                                                       bytes_per_element(KVFormat(args.value_format)))) {}

  // Bytes of a Result, each of its arrays on cache lines of its own.
  int64_t result_bytes(const Queries& queries) const {
    const int64_t rows = int64_t(num_kv_heads) * group * queries.num_tokens;
    const int64_t kept = Scratch::round_up(rows * range_cells * 4) + Scratch::round_up(range_cells * 4);
    return Scratch::round_up(rows * 4) * 2 + Scratch::round_up(rows * padded_dim * 4) + Scratch::kLine +
           (queries.is_tallied ? kept : 0);
  }

  int32_t num_kv_heads, group;
  int32_t padded_dim;  // head_dim up to whole vectors
  int32_t range_entries;
  int32_t range_cells;
  int64_t bytes_per_cell;
};

// Hands out parts of one piece of memory.
class Carver {
 public:
  explicit Carver(char* memory) : next_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += Scratch::round_up(count * int64_t(sizeof(T)));
    return taken;
  }

 private:
  char* next_;
};

// What there is to do in one call.
struct Plan {
  Job* jobs;
  Queries* queries;
  Range* ranges;
  Result* results;  // [ranges]
  int32_t num_jobs, num_ranges;
  int64_t max_rows, max_ranges;  // of any one Queries

  static bool make(const AttendArgs& args, const Sizes& sizes, const int32_t* slices, int32_t count, Plan& plan,
                   int64_t& bytes);

  int64_t job_bytes(const Sizes& sizes, const Job& job) const {
    int64_t bytes = 0;
    for (int32_t i = job.begin_queries; i < job.end_queries; ++i)
      bytes += (queries[i].end_range - queries[i].begin_range) * sizes.result_bytes(queries[i]);
    return bytes;
  }
};

// False when `bytes` of memory could not be had.
inline bool Plan::make(const AttendArgs& args, const Sizes& sizes, const int32_t* slices, int32_t count, Plan& plan,
                       int64_t& bytes) {
  thread_local Scratch scratch;
  const int32_t ranges_per_past = (args.num_entries + sizes.range_entries - 1) / sizes.range_entries;
  int64_t max_queries = 0;
  for (int32_t i = 0; i < count; ++i)
    max_queries += args.window ? args.starts[slices[i] + 1] - args.starts[slices[i]] : 1;
  const int64_t most_ranges = max_queries * std::max(ranges_per_past, 1);
  bytes = Scratch::round_up(count * int64_t(sizeof(Job))) + Scratch::round_up(max_queries * int64_t(sizeof(Queries))) +
          Scratch::round_up(most_ranges * int64_t(sizeof(Range))) +
          Scratch::round_up(most_ranges * int64_t(sizeof(Result)));
  char* memory = scratch.reserve(bytes);
  if (!memory) return false;
  Carver carver(memory);
  plan = {carver.take<Job>(count),
          carver.take<Queries>(max_queries),
          carver.take<Range>(most_ranges),
          carver.take<Result>(most_ranges),
          count,
          0,
          0,
          0};

  int32_t num_queries = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t slice = slices[i], end_token = args.starts[slice + 1];
    Job& job = plan.jobs[i] = {num_queries, num_queries, 0};
    const int32_t step = args.window ? 1 : end_token - args.starts[slice];
    int32_t counted = end_token;
    for (int32_t t = 0; t < args.num_tallies; ++t)
      counted = std::min(counted, first_counted(args, args.tallies[t], slice));
    for (int32_t token = args.starts[slice]; token < end_token; token += step) {
      Queries& queries = plan.queries[num_queries] = {i,
                                                      slice,
                                                      token,
                                                      step,
                                                      hidden_up_to(args, args.positions[token]),
                                                      counted < token + step,
                                                      plan.num_ranges,
                                                      plan.num_ranges};
      for (int32_t begin = 0; begin < args.num_entries; begin += sizes.range_entries) {
        const int32_t end = std::min(begin + sizes.range_entries, args.num_entries);
        const bool out_of_sight = !args.row_positions && int64_t(end) * args.block_size <= queries.hidden;
        if (!out_of_sight && any_live(args, slice, begin, end))
          plan.ranges[plan.num_ranges++] = {num_queries, begin, end};
      }
      // Without a past there is still somebody to merge.
      if (plan.num_ranges == queries.begin_range) plan.ranges[plan.num_ranges++] = {num_queries, 0, 0};
      queries.end_range = plan.num_ranges;
      plan.max_rows = std::max(plan.max_rows, int64_t(args.num_heads) * step);
      plan.max_ranges = std::max<int64_t>(plan.max_ranges, queries.end_range - queries.begin_range);
      job.end_queries = ++num_queries;
    }
    job.ranges_left = plan.num_ranges - plan.queries[job.begin_queries].begin_range;
  }
  return true;
}

// Places for the results of a wave's ranges.
inline void place_results(const Sizes& sizes, Plan& plan, int32_t begin_job, int32_t end_job, char* memory) {
  Carver carver(memory);
  for (int32_t j = begin_job; j < end_job; ++j)
    for (int32_t i = plan.jobs[j].begin_queries; i < plan.jobs[j].end_queries; ++i) {
      const Queries& queries = plan.queries[i];
      const int64_t rows = int64_t(sizes.num_kv_heads) * sizes.group * queries.num_tokens;
      for (int32_t r = queries.begin_range; r < queries.end_range; ++r) {
        Result& result = plan.results[r];
        result.peaks = carver.take<float>(rows);
        result.totals = carver.take<float>(rows);
        result.values = carver.take<float>(rows * sizes.padded_dim);
        result.count = carver.take<int32_t>(1);
        result.weights = queries.is_tallied ? carver.take<float>(rows * sizes.range_cells) : nullptr;
        result.rows = queries.is_tallied ? carver.take<int32_t>(sizes.range_cells) : nullptr;
      }
    }
}

}  // namespace vtoken::decoding
