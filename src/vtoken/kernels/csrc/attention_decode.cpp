// Attention of few new tokens over a paged past: one pass over the cache, nothing gathered.
//
// A slice's past is cut into ranges of entries. A range is computed by one thread: scores of all its live cells against
// all query heads, one exponential over all of them, then weights times values; what it leaves is the peak, the sum and
// the weighted values of each query head. Whoever ends a slice's last range merges them, in order, with the slice's own
// new tokens. Ranges depend on the slice alone, so neither the number of threads nor the neighbours change a bit.
//
// Cells are found through a list of live ones, so that holes cost nothing and a dead cell is never touched. They are
// computed in tiles, whose cells are taken from several blocks in turn. In both passes all KV heads of a tile come
// before the next tile, since a block is one contiguous run, and what comes some KB later is prefetched, across the end
// of a pass and of a range too.
#include <omp.h>

#include <cfloat>
#include <cmath>

#include "decode_tally.h"

namespace vtoken {
namespace {

using namespace decoding;

// How far ahead of the computation the cache is prefetched, at least.
constexpr int64_t kAheadBytes = 16 << 10;

// Scratch for results of ranges that are not merged yet. Beyond it slices are computed in waves.
constexpr int64_t kWaveBytes = 2 << 20;
// Below this many bytes of cache a second thread is not worth its start.
constexpr int64_t kBytesPerThread = 128 << 10;

// Scratch of one thread.
struct Desk {
  static int64_t bytes(const Sizes& sizes, int64_t max_rows, int64_t max_ranges) {
    return Scratch::round_up(max_rows * sizes.padded_dim * 4) +
           2 * Scratch::round_up(max_rows * sizes.range_cells * 4) + 5 * Scratch::round_up(sizes.range_cells * 8) +
           2 * Scratch::round_up(sizes.range_cells * 4) + Scratch::round_up(max_ranges * 4) +
           Scratch::round_up(sizes.padded_dim * 4);
  }

  Desk(char* memory, const Sizes& sizes, int64_t max_rows, int64_t max_ranges) {
    Carver carver(memory);
    q = carver.take<float>(max_rows * sizes.padded_dim);
    scores = carver.take<float>(max_rows * sizes.range_cells);
    scaled = carver.take<float>(max_rows * sizes.range_cells);
    for (int turn = 0; turn < 2; ++turn) {
      cells[turn] = carver.take<int64_t>(sizes.range_cells);
      elements[turn] = carver.take<int64_t>(sizes.range_cells);
    }
    listed_cells = carver.take<int64_t>(sizes.range_cells);
    listed_rows = carver.take<int32_t>(sizes.range_cells);
    scales = carver.take<float>(sizes.range_cells);
    factors = carver.take<float>(max_ranges);
    sums = carver.take<float>(sizes.padded_dim);
  }

  float* q;               // [rows, padded_dim] times the softmax scale, zeros behind head_dim; see pack_queries
  float* scores;          // [rows, range_cells]
  float* scaled;          // [rows, range_cells] weights times value scales, where the weights themselves are kept
  int64_t* cells[2];      // [range_cells] of the range that is computed and of the next one; see RangeCells
  int64_t* elements[2];   // [range_cells]
  int64_t* listed_cells;  // [range_cells] in order of rows
  int32_t* listed_rows;   // [range_cells]
  float* scales;          // [range_cells] of one head's keys or values
  float* factors;         // [ranges of a slice]
  float* sums;            // [padded_dim]
};

// The keys or the values.
struct Plane {
  Plane(const AttendArgs& args, const void* from, const float* scales, int32_t format)
      : from(static_cast<const char*>(from)),
        scales(scales),
        element_bytes(bytes_per_element(KVFormat(format))),
        cell_bytes(args.head_dim * element_bytes),
        head_bytes(args.block_size * cell_bytes) {}

  const char* from;
  const float* scales;  // or null
  int32_t element_bytes;
  int64_t cell_bytes;
  int64_t head_bytes;  // from one KV head of a block to the next
};

// The live cells of a range, in the order in which they are computed.
struct RangeCells {
  int64_t* cells;     // [range_cells] up to a whole step, live cells repeated behind `count`
  int64_t* elements;  // [range_cells] the same times head_dim
  int32_t* rows;      // [range_cells] or null
  int32_t count;
};

int64_t tiles(const RangeCells& live) { return (live.count + kTile - 1) / kTile; }

class Decode {
 public:
  Decode(const AttendArgs& args, const Sizes& sizes)
      : args_(args),
        sizes_(sizes),
        keys_(args, args.keys, args.key_scales, args.key_format),
        values_(args, args.values, args.value_scales, args.value_format),
        items_ahead_(1 + kAheadBytes / (kTile * std::max(keys_.cell_bytes, values_.cell_bytes))) {}

  // The live cells of a range, in the turn's part of the desk and in its result.
  RangeCells list(const Queries& queries, const Range& range, const Result& result, int32_t turn, Desk& desk) const;
  // `then` is what this thread will compute after it. Of both, keys before values, `prefetched` items are on their way.
  void compute(const Queries& queries, const RangeCells& live, const RangeCells& then, int64_t& prefetched,
               const Result& result, Desk& desk) const;
  void merge(const Queries& queries, const Result* results, Desk& desk) const;

 private:
  int32_t rows_per_head(const Queries& queries) const { return queries.num_tokens * sizes_.group; }

  // Query head and token of a row; see Result.
  void locate(const Queries& queries, int32_t row, int32_t& token, int32_t& head) const {
    const int32_t in_head = row % rows_per_head(queries);
    token = queries.token + in_head / sizes_.group;
    head = row / rows_per_head(queries) * sizes_.group + in_head % sizes_.group;
  }

  const float* query(const Queries& queries, int32_t row) const {
    int32_t token, head;
    locate(queries, row, token, head);
    return args_.q + token * args_.q_stride + int64_t(head) * args_.head_dim;
  }

  void pack_queries(const Queries& queries, float* q) const;
  void aim(Tile& tile, const Plane& plane, const RangeCells& live, int64_t item) const;
  void aim_ahead(Tile& tile, int64_t next, const RangeCells& live, const RangeCells& then) const;
  void look_ahead(Tile& tile, int64_t item, const RangeCells& live, const RangeCells& then, int64_t& prefetched) const;
  const float* gather_scales(const Plane& plane, int32_t head, const RangeCells& live, Desk& desk) const;
  float cap(float score) const {
    return args_.soft_cap > 0 ? tanh(splat(score / args_.soft_cap))[0] * args_.soft_cap : score;
  }

  const AttendArgs& args_;
  const Sizes& sizes_;
  const Plane keys_, values_;
  // An item is a tile of one KV head of the keys or the values: what is computed, and prefetched, at once.
  const int64_t items_ahead_;
};

// To [kv_head][vector][row of the head][kLanes], as score_rows wants them.
void Decode::pack_queries(const Queries& queries, float* q) const {
  const int32_t per_head = rows_per_head(queries), num_rows = args_.num_kv_heads * per_head;
  const int32_t head_dim = args_.head_dim, padded_dim = sizes_.padded_dim;
  const Vec scale = splat(args_.scale);
  for (int32_t row = 0; row < num_rows; ++row) {
    const float* from = query(queries, row);
    float* to = q + (row / per_head * per_head * padded_dim + row % per_head * kLanes);
    for (int32_t d = 0; d < head_dim; d += kLanes, to += per_head * kLanes)
      store(to, scale * (d + kLanes <= head_dim ? load(from + d) : decode_some<kFloat32>(from, d, head_dim - d)));
  }
}

void Decode::aim(Tile& tile, const Plane& plane, const RangeCells& live, int64_t item) const {
  const int32_t first = item / args_.num_kv_heads * kTile;
  tile.from = plane.from + item % args_.num_kv_heads * plane.head_bytes;
  tile.elements = live.elements + first;
  tile.count = std::min(kTile, live.count - first);
  tile.head_dim = args_.head_dim;
}

// Aims at item `next` of the keys of `live`, its values, the keys of `then`, its values.
void Decode::aim_ahead(Tile& tile, int64_t next, const RangeCells& live, const RangeCells& then) const {
  const int64_t items = tiles(live) * args_.num_kv_heads, then_items = tiles(then) * args_.num_kv_heads;
  const bool own = next < 2 * items;
  if (!own) next -= 2 * items;
  const bool keys = next < (own ? items : then_items);
  if (!keys) next -= own ? items : then_items;
  const Plane& plane = keys ? keys_ : values_;
  const RangeCells& ahead = own ? live : then;
  const int64_t head = next % args_.num_kv_heads, first = next / args_.num_kv_heads * kTile;
  tile.ahead_count = std::min<int64_t>(ahead.count - first, kTile);
  tile.ahead_from = plane.from + head * plane.head_bytes;
  tile.ahead_elements = ahead.elements + first;
  tile.ahead_element_bytes = plane.element_bytes;
  tile.ahead_cell_bytes = plane.cell_bytes;
  // Scales of values are wanted before the values: as soon as all keys have been scored.
  if (keys)
    for (const float* scales : {keys_.scales, values_.scales})
      if (scales)
        for (int32_t i = 0; i < std::min(kPlaces, tile.ahead_count); ++i)
          __builtin_prefetch(scales + head * args_.block_size + ahead.cells[first + i]);
}

// Aims at what to prefetch while item `item` of `live` is computed, which may be nothing.
void Decode::look_ahead(Tile& tile, int64_t item, const RangeCells& live, const RangeCells& then,
                        int64_t& prefetched) const {
  const int64_t end = std::min(item + items_ahead_ + 1, 2 * args_.num_kv_heads * (tiles(live) + tiles(then)));
  prefetched = std::max(prefetched, item + 1);
  tile.ahead_count = 0;
  // At the start, and after a range too short to look far, there is more than one item to make up for.
  if (prefetched + 1 < end) {
    aim_ahead(tile, prefetched++, live, then);
    prefetch(tile, 0, kTile);
  }
  if (prefetched < end) aim_ahead(tile, prefetched++, live, then);
}

// The scales of a head's live cells, and whatever behind them up to a whole step; null where the format has none.
const float* Decode::gather_scales(const Plane& plane, int32_t head, const RangeCells& live, Desk& desk) const {
  if (!plane.scales) return nullptr;
  const float* from = plane.scales + int64_t(head) * args_.block_size;
  const int32_t end = Scratch::round_up(live.count, kStep);
  const int64_t* __restrict cells = live.cells;
  float* __restrict to = desk.scales;
#pragma GCC unroll 4
  for (int32_t i = 0; i < end; ++i) to[i] = held(from[cells[i]]);
  return to;
}

// e^x for x <= 0 to about 1 unit in the last place; exactly 0 below -87.3; NaN stays NaN. As `exp` of simd.h, without
// what only positive numbers need.
Vec exp_below(Vec x) {
  const Vec too_small = splat(-87.33654f);
  const Vec clipped = too_small > x ? too_small : x;
  const Vec magic = splat(12582912.0f);
  const Vec shifted = clipped * splat(1.44269504088896341f) + magic;
  const Vec n = shifted - magic;
  Vec r = clipped - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  const Vec y = p * (r * r) + r + splat(1.0f);
  // Of the bits of `shifted` the lowest nine hold n, and those of `magic` are zero.
  return x < too_small ? Vec{} : y * bitcast((bitcast(shifted) << 23) + (127 << 23));
}

// Scores to weights e^(score * key scale - peak), zeros up to the end of the last step.
void soften(float* scores, int32_t count, const float* key_scales, float soft_cap, float& peak_out, float& total_out) {
  const int32_t padded = (count + kStep - 1) / kStep * kStep;
  if (key_scales)
    for (int32_t i = 0; i < padded; i += kLanes) store(scores + i, load(scores + i) * load(key_scales + i));
  if (soft_cap > 0) {
    const Vec cap = splat(soft_cap), inverse = splat(1.0f / soft_cap);
    for (int32_t i = 0; i < padded; i += kLanes) store(scores + i, tanh(load(scores + i) * inverse) * cap);
  }
  std::fill(scores + count, scores + padded, -INFINITY);
  // At least the lowest number: a row that sees only -inf must not become -inf - -inf.
  Vec peaks = splat(-FLT_MAX);
  for (int32_t i = 0; i < padded; i += kLanes) peaks = max(load(scores + i), peaks);
  const float most = peak(peaks);
  Vec totals{};
  for (int32_t i = 0; i < padded; i += kLanes) {
    const Vec weight = exp_below(load(scores + i) - splat(most));
    store(scores + i, weight);
    totals += weight;
  }
  peak_out = most;
  total_out = sum(totals);
}

// Puts each tile's cells into the order in which they are computed: from each quarter of the tile one after the other.
template <class T>
void interleave(const T* from, T* to, int32_t count) {
  for (; count > 0; count -= kTile, from += kTile) {
    const int32_t here = std::min(count, kTile), quarter = (here + kPlaces - 1) / kPlaces;
    for (int32_t i = 0; i < quarter; ++i)
      for (int32_t at = i; at < here; at += quarter) *to++ = from[at];
  }
}

RangeCells Decode::list(const Queries& queries, const Range& range, const Result& result, int32_t turn,
                        Desk& desk) const {
  LiveCells listed{desk.listed_cells, result.rows ? desk.listed_rows : nullptr, 0};
  list_live(args_, queries.slice, range.begin, range.end, queries.hidden, listed);
  *result.count = listed.count;
  const RangeCells live{desk.cells[turn], desk.elements[turn], result.rows, listed.count};
  if (!live.count) return live;
  interleave(listed.cells, live.cells, live.count);
  if (live.rows) interleave(listed.rows, live.rows, live.count);
  // The last step is filled up with a cell that may be read; what comes of it is dropped.
  const int32_t end = Scratch::round_up(live.count, kStep);
  std::fill(live.cells + live.count, live.cells + end, live.cells[live.count - 1]);
  for (int32_t i = 0; i < end; ++i) live.elements[i] = live.cells[i] * args_.head_dim;
  return live;
}

void Decode::compute(const Queries& queries, const RangeCells& live, const RangeCells& then, int64_t& prefetched,
                     const Result& result, Desk& desk) const {
  const int32_t per_head = rows_per_head(queries), num_heads = args_.num_kv_heads, num_rows = num_heads * per_head;
  const int64_t stride = sizes_.range_cells, padded_dim = sizes_.padded_dim;
  std::fill(result.values, result.values + num_rows * padded_dim, 0.0f);
  if (!live.count) {
    std::fill(result.peaks, result.peaks + num_rows, -FLT_MAX);
    std::fill(result.totals, result.totals + num_rows, 0.0f);
    return;
  }

  const int64_t items = tiles(live) * num_heads;
  Tile tile;
  pack_queries(queries, desk.q);
  float* weights = result.weights ? result.weights : desk.scores;
  for (int64_t item = 0; item < items; ++item) {
    aim(tile, keys_, live, item);
    look_ahead(tile, item, live, then, prefetched);
    const int64_t row = item % num_heads * per_head, first = item / num_heads * kTile;
    kScoreTile[args_.key_format](tile, per_head, desk.q + row * padded_dim, weights + row * stride + first, stride);
  }

  float* scaled = args_.value_scales && result.weights ? desk.scaled : weights;
  for (int32_t head = 0; head < num_heads; ++head) {
    const int32_t begin = head * per_head, end = begin + per_head;
    const float* scales = gather_scales(keys_, head, live, desk);
    for (int32_t row = begin; row < end; ++row)
      soften(weights + row * stride, live.count, scales, args_.soft_cap, result.peaks[row], result.totals[row]);
    scales = gather_scales(values_, head, live, desk);
    if (!scales) continue;
    for (int32_t row = begin; row < end; ++row)
      for (int32_t i = 0; i < live.count; i += kLanes) {
        const int64_t at = row * stride + i;
        store(scaled + at, load(weights + at) * load(scales + i));
      }
  }

  for (int64_t item = 0; item < items; ++item) {
    aim(tile, values_, live, item);
    look_ahead(tile, items + item, live, then, prefetched);
    const int64_t row = item % num_heads * per_head, first = item / num_heads * kTile;
    kWeighTile[args_.value_format](tile, per_head, scaled + row * stride + first, stride,
                                   result.values + row * padded_dim, padded_dim);
  }
  prefetched = std::max<int64_t>(prefetched - 2 * items, 0);
}

float dot(const float* a, const float* b, int32_t count) {
  Vec total{};
  int32_t d = 0;
  for (; d + kLanes <= count; d += kLanes) total = fma(load(a + d), load(b + d), total);
  if (d < count) total = fma(decode_some<kFloat32>(a, d, count - d), decode_some<kFloat32>(b, d, count - d), total);
  return sum(total);
}

void Decode::merge(const Queries& queries, const Result* results, Desk& desk) const {
  const int32_t num_ranges = queries.end_range - queries.begin_range;
  const int32_t num_rows = args_.num_kv_heads * rows_per_head(queries);
  const int32_t head_dim = args_.head_dim, padded_dim = sizes_.padded_dim, first_token = args_.starts[queries.slice];
  int32_t past_seen = 0;
  for (int32_t i = 0; i < num_ranges; ++i) past_seen += *results[i].count;

  for (int32_t row = 0; row < num_rows; ++row) {
    int32_t token, head;
    locate(queries, row, token, head);
    const int64_t kv_head = head / sizes_.group;
    // The slice's own tokens that this one sees: [first, token].
    int32_t first = first_token;
    while (args_.positions[first] <= hidden_up_to(args_, args_.positions[token])) ++first;
    float own[kDecodeTokens];
    float most = -FLT_MAX;
    for (int32_t t = first; t <= token; ++t) {
      const float* key = args_.k_new + t * args_.k_stride + kv_head * head_dim;
      own[t - first] = cap(dot(query(queries, row), key, head_dim) * args_.scale);
      most = std::max(most, own[t - first]);
    }
    for (int32_t i = 0; i < num_ranges; ++i) most = std::max(most, results[i].peaks[row]);

    double total = 0;
    std::fill(desk.sums, desk.sums + padded_dim, 0.0f);
    for (int32_t i = 0; i < num_ranges; ++i) {
      const float factor = std::exp(results[i].peaks[row] - most);
      const float* values = results[i].values + int64_t(row) * padded_dim;
      desk.factors[i] = factor;
      total += double(factor) * results[i].totals[row];
      for (int32_t d = 0; d < padded_dim; d += kLanes)
        store(desk.sums + d, fma(splat(factor), load(values + d), load(desk.sums + d)));
    }
    for (int32_t t = first; t <= token; ++t) {
      const float weight = own[t - first] = std::exp(own[t - first] - most);
      const float* value = args_.v_new + t * args_.v_stride + kv_head * head_dim;
      total += weight;
      for (int32_t d = 0; d < head_dim; ++d) desk.sums[d] += weight * value[d];
    }
    const float inverse = float(1 / total);
    float* out = args_.out + (int64_t(token) * args_.num_heads + head) * head_dim;
    for (int32_t d = 0; d < head_dim; ++d) out[d] = desk.sums[d] * inverse;

    if (!queries.is_tallied) continue;
    const int32_t seen = past_seen + token - first + 1;
    for (int32_t i = 0; i < args_.num_tallies; ++i)
      tally_own(args_, args_.tallies[i], queries.slice, {first, token, own, total, seen});
    for (int32_t i = 0; i < num_ranges; ++i) prepare_tally(results[i], row, desk.factors[i], total, seen);
  }
  if (!queries.is_tallied) return;
  for (int32_t i = 0; i < args_.num_tallies; ++i) tally_past(args_, sizes_, args_.tallies[i], queries, results);
}

}  // namespace

int64_t attend_decode(const AttendArgs& args, const int32_t* slices, int32_t count) {
  if (!count) return 0;
  const Sizes sizes(args);
  Plan plan;
  int64_t bytes;
  if (!Plan::make(args, sizes, slices, count, plan, bytes)) return bytes;

  // Waves of whole slices, as many as their results have room.
  const auto end_of_wave = [&](int32_t begin, int64_t& result_bytes, int64_t& cache_bytes) {
    int32_t end = begin;
    for (result_bytes = cache_bytes = 0; end < count; ++end) {
      const int64_t more = plan.job_bytes(sizes, plan.jobs[end]);
      if (end > begin && result_bytes + more > kWaveBytes) break;
      result_bytes += more;
      cache_bytes += args.past_live[slices[end]] * sizes.bytes_per_cell;
    }
    return end;
  };
  int64_t most_result_bytes = 0, result_bytes, cache_bytes;
  for (int32_t begin = 0; begin < count;) {
    begin = end_of_wave(begin, result_bytes, cache_bytes);
    most_result_bytes = std::max(most_result_bytes, result_bytes);
  }
  const int64_t desk_bytes = Desk::bytes(sizes, plan.max_rows, plan.max_ranges);
  thread_local Scratch scratch;
  bytes = most_result_bytes + args.num_threads * desk_bytes;
  char* memory = scratch.reserve(bytes);
  if (!memory) return bytes;
  char* desks = memory + most_result_bytes;

  const Decode decode(args, sizes);
  for (int32_t begin = 0, end; begin < count; begin = end) {
    end = end_of_wave(begin, result_bytes, cache_bytes);
    place_results(sizes, plan, begin, end, memory);
    int32_t next = plan.queries[plan.jobs[begin].begin_queries].begin_range;
    const int32_t end_range = plan.queries[plan.jobs[end - 1].end_queries - 1].end_range;

    const auto work = [&](int32_t thread) {
      Desk desk(desks + thread * desk_bytes, sizes, plan.max_rows, plan.max_ranges);
      const auto take = [&] { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); };
      const auto list = [&](int32_t r, int32_t turn) {
        if (r >= end_range) return RangeCells{};
        return decode.list(plan.queries[plan.ranges[r].queries], plan.ranges[r], plan.results[r], turn, desk);
      };
      // One range is taken ahead, so that its cells can be on their way while the one before it is computed.
      int32_t r = take();
      RangeCells live = list(r, 0);
      int64_t prefetched = 0;
      for (int turn = 1; r < end_range; turn ^= 1) {
        const int32_t then_r = take();
        const RangeCells then = list(then_r, turn);
        const Queries& queries = plan.queries[plan.ranges[r].queries];
        decode.compute(queries, live, then, prefetched, plan.results[r], desk);
        live = then, r = then_r;
        Job& job = plan.jobs[queries.job];
        // Whoever comes last sees what the others have written.
        if (__atomic_sub_fetch(&job.ranges_left, 1, __ATOMIC_ACQ_REL)) continue;
        for (int32_t q = job.begin_queries; q < job.end_queries; ++q)
          decode.merge(plan.queries[q], plan.results + plan.queries[q].begin_range, desk);
      }
    };
    const int64_t useful = std::min<int64_t>(cache_bytes / kBytesPerThread, end_range - next);
    const int32_t threads = std::clamp<int64_t>(useful, 1, args.num_threads);
    if (threads == 1) {
      work(0);
    } else {
#pragma omp parallel num_threads(threads)
      work(omp_get_thread_num());
    }
  }
  return 0;
}

}  // namespace vtoken
