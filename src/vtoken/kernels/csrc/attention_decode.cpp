// Attention of few new tokens over a paged past: one pass over the cache, nothing gathered.
//
// A slice's past is cut into ranges of entries. A range is computed by one thread: scores of all its live cells against
// all query heads, one exponential over all of them, then weights times values; what it leaves is the peak, the sum and
// the weighted values of each query head. Whoever ends a slice's last range merges them, in order, with the slice's own
// new tokens. Ranges depend on the slice alone, so neither the number of threads nor the neighbours change a bit.
//
// In both passes all KV heads of a few cells come before the next cells, since a block is one contiguous run. What
// comes some KB later is prefetched, across the end of a pass and of a range too. Cells are found through a list of
// live ones, so that holes cost nothing and a dead cell is never touched; a full block is just a list without holes.
#include <omp.h>

#include <cfloat>
#include <cmath>

#include "attention_parts.h"

namespace vtoken {
namespace {

constexpr int32_t kRangeCells = 512;  // of one range: its scores stay in the first caches
constexpr int32_t kTile = 16;         // live cells computed together, a multiple of kLanes
constexpr int32_t kMaxRows = 4;       // query heads computed together: their accumulators fill the registers

// How far ahead of the computation the cache is prefetched.
constexpr int64_t kAheadBytes = 16 << 10;

// Scratch for results of ranges that are not merged yet. Beyond it slices are computed in waves.
constexpr int64_t kWaveBytes = 2 << 20;
// Below this many bytes of cache a second thread is not worth its start.
constexpr int64_t kBytesPerThread = 128 << 10;

// Added to a double, it rounds to multiples of 2^-28, the unit of attention mass; it holds sums up to 2^23.
constexpr double kMassRounder = 0x1.8p24;

template <KVFormat F>
Vec decode_some(const void* from, int64_t at, int32_t count) {
  float some[kLanes] = {};
  for (int32_t i = 0; i < count; ++i) some[i] = decode_one<F>(from, at + i);
  return load(some);
}

inline void store_some(float* to, Vec v, int32_t count) { std::memcpy(to, &v, count * sizeof(float)); }

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

// The sums of four vectors, next to each other.
inline void store_sums(float* to, Vec a, Vec b, Vec c, Vec d) {
#if defined(VTOKEN_AVX512)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
  const __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)),
                                    _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(VTOKEN_AVX2)
  const __m256 half = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// One tile of one KV head. `at` are the cells' first elements; `at[i]` beyond `count` repeats a live cell.
struct Tile {
  const void* from;
  int64_t at[kTile];
  int32_t count;
  int32_t head_dim;
  const char* ahead[kTile];  // what to prefetch meanwhile, cell by cell
  int64_t ahead_bytes;       // of each of them
};

// Into the second cache: the first can wait for too few lines at a time to keep the memory busy. A few at a time,
// between the products, for the same reason.
inline void prefetch(const Tile& tile, int32_t cell) {
  for (int64_t byte = 0; byte < tile.ahead_bytes; byte += Scratch::kLine)
    __builtin_prefetch(tile.ahead[cell] + byte, 0, 2);
}

// scores[row * stride + i] = q[row] . cell i, for whole fours of cells.
template <KVFormat F, int R>
void score_rows(const Tile& tile, const float* q, int64_t q_stride, float* scores, int64_t stride) {
  const int32_t whole = tile.head_dim / kLanes * kLanes, rest = tile.head_dim - whole;
  for (int32_t first = 0; first < tile.count; first += 4) {
    const int64_t* at = tile.at + first;
    for (int i = 0; i < 4; ++i) prefetch(tile, first + i);
    Vec sums[R][4] = {};
    for (int32_t d = 0; d < whole; d += kLanes) {
      const Vec k0 = decode<F>(tile.from, at[0] + d), k1 = decode<F>(tile.from, at[1] + d);
      const Vec k2 = decode<F>(tile.from, at[2] + d), k3 = decode<F>(tile.from, at[3] + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec x = held(load(q + r * q_stride + d));
        sums[r][0] = fma(x, k0, sums[r][0]);
        sums[r][1] = fma(x, k1, sums[r][1]);
        sums[r][2] = fma(x, k2, sums[r][2]);
        sums[r][3] = fma(x, k3, sums[r][3]);
      }
    }
    if (rest) {
      Vec k[4];
      for (int i = 0; i < 4; ++i) k[i] = decode_some<F>(tile.from, at[i] + whole, rest);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec x = load(q + r * q_stride + whole);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[r][i] = fma(x, k[i], sums[r][i]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      store_sums(scores + r * stride + first, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
}

template <KVFormat F>
void score_tile(Tile& tile, int32_t num_rows, const float* q, int64_t q_stride, float* scores, int64_t stride) {
  for (; num_rows >= kMaxRows; num_rows -= kMaxRows, q += kMaxRows * q_stride, scores += kMaxRows * stride) {
    score_rows<F, kMaxRows>(tile, q, q_stride, scores, stride);
    tile.ahead_bytes = 0;  // once is enough
  }
  if (num_rows == 3) score_rows<F, 3>(tile, q, q_stride, scores, stride);
  if (num_rows == 2) score_rows<F, 2>(tile, q, q_stride, scores, stride);
  if (num_rows == 1) score_rows<F, 1>(tile, q, q_stride, scores, stride);
}

// sums[row] += weights[row] . cells, C vectors of the head's width from element `d` on, or its last `rest` elements.
template <KVFormat F, int R, int C>
void weigh_columns(const Tile& tile, int32_t d, int32_t rest, const float* weights, int64_t stride, float* sums,
                   int64_t sums_stride) {
  Vec total[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) total[r][c] = load(sums + r * sums_stride + d + c * kLanes);
  for (int32_t i = 0; i < tile.count; ++i) {
    prefetch(tile, i);
    Vec v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      v[c] = rest ? decode_some<F>(tile.from, tile.at[i] + d, rest) : decode<F>(tile.from, tile.at[i] + d + c * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec w = splat(weights[r * stride + i]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) total[r][c] = fma(w, v[c], total[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(sums + r * sums_stride + d + c * kLanes, total[r][c]);
}

template <KVFormat F, int R>
void weigh_rows(Tile& tile, const float* weights, int64_t stride, float* sums, int64_t sums_stride) {
  const int32_t whole = tile.head_dim / kLanes * kLanes, rest = tile.head_dim - whole;
  int32_t d = 0;
  for (; d + 4 * kLanes <= whole; d += 4 * kLanes) {
    weigh_columns<F, R, 4>(tile, d, 0, weights, stride, sums, sums_stride);
    tile.ahead_bytes = 0;  // once is enough
  }
  for (; d < whole; d += kLanes) {
    weigh_columns<F, R, 1>(tile, d, 0, weights, stride, sums, sums_stride);
    tile.ahead_bytes = 0;
  }
  if (rest) weigh_columns<F, R, 1>(tile, d, rest, weights, stride, sums, sums_stride);
}

template <KVFormat F>
void weigh_tile(Tile& tile, int32_t num_rows, const float* weights, int64_t stride, float* sums, int64_t sums_stride) {
  for (; num_rows >= kMaxRows; num_rows -= kMaxRows, weights += kMaxRows * stride, sums += kMaxRows * sums_stride)
    weigh_rows<F, kMaxRows>(tile, weights, stride, sums, sums_stride);
  if (num_rows == 3) weigh_rows<F, 3>(tile, weights, stride, sums, sums_stride);
  if (num_rows == 2) weigh_rows<F, 2>(tile, weights, stride, sums, sums_stride);
  if (num_rows == 1) weigh_rows<F, 1>(tile, weights, stride, sums, sums_stride);
}

using ScoreTile = decltype(&score_tile<kFloat32>);
using WeighTile = decltype(&weigh_tile<kFloat32>);
constexpr ScoreTile kScoreTile[] = {score_tile<kFloat32>, score_tile<kFloat16>, score_tile<kBFloat16>,
                                    score_tile<kFp8E4M3>, score_tile<kInt8>};
constexpr WeighTile kWeighTile[] = {weigh_tile<kFloat32>, weigh_tile<kFloat16>, weigh_tile<kBFloat16>,
                                    weigh_tile<kFp8E4M3>, weigh_tile<kInt8>};

// New tokens of a slice that see the same past: all of them, or each by itself under a window.
struct Queries {
  int32_t job, slice;
  int32_t token, num_tokens;
  int64_t hidden;               // positions up to this one are out of sight
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
  float* weights;  // [rows, range_cells] those weights, or null: kept for attention mass
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
        bytes_per_cell(args.num_kv_heads * args.head_dim *
                       (bytes_per_element(KVFormat(args.key_format)) + bytes_per_element(KVFormat(args.value_format)))),
        want_mass(args.mass != nullptr) {}

  // Bytes of a Result, each of its arrays on cache lines of its own.
  int64_t result_bytes(int64_t rows) const {
    return Scratch::round_up(rows * 4) * 2 + Scratch::round_up(rows * padded_dim * 4) + Scratch::kLine +
           (want_mass ? Scratch::round_up(rows * range_cells * 4) + Scratch::round_up(range_cells * 4) : 0);
  }

  int32_t num_kv_heads, group;
  int32_t padded_dim;     // head_dim up to whole vectors
  int32_t range_entries;
  int32_t range_cells;
  int64_t bytes_per_cell;
  bool want_mass;
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

// Scratch of one thread.
struct Desk {
  static int64_t bytes(const Sizes& sizes, int64_t max_rows, int64_t max_ranges) {
    return Scratch::round_up(max_rows * sizes.padded_dim * 4) +
           2 * Scratch::round_up(max_rows * sizes.range_cells * 4) +
           2 * Scratch::round_up(int64_t(sizes.range_cells + kTile) * 8) + Scratch::round_up(max_ranges * 4) +
           Scratch::round_up(sizes.padded_dim * 4);
  }

  Desk(char* memory, const Sizes& sizes, int64_t max_rows, int64_t max_ranges) {
    Carver carver(memory);
    q = carver.take<float>(max_rows * sizes.padded_dim);
    scores = carver.take<float>(max_rows * sizes.range_cells);
    scaled = carver.take<float>(max_rows * sizes.range_cells);
    cells[0] = carver.take<int64_t>(sizes.range_cells + kTile);
    cells[1] = carver.take<int64_t>(sizes.range_cells + kTile);
    factors = carver.take<float>(max_ranges);
    sums = carver.take<float>(sizes.padded_dim);
  }

  float* q;        // [rows, padded_dim] times the softmax scale, zeros behind head_dim
  float* scores;   // [rows, range_cells]
  float* scaled;   // [rows, range_cells] weights times value scales, where the weights themselves are kept
  int64_t* cells[2];  // [range_cells + kTile] of the range that is computed and of the next one
  float* factors;  // [ranges of a slice]
  float* sums;     // [padded_dim]
};

// The keys or the values.
struct Plane {
  Plane(const AttendArgs& args, const void* from, const float* scales, int32_t format)
      : from(static_cast<const char*>(from)),
        scales(scales),
        bytes_per_cell(args.head_dim * bytes_per_element(KVFormat(format))),
        ahead(std::max<int64_t>(1, kAheadBytes / (kTile * bytes_per_cell * args.num_kv_heads)) * kTile) {}

  const char* from;
  const float* scales;  // or null
  int64_t bytes_per_cell;
  int32_t ahead;  // live cells from those that are computed to those that are prefetched
};

class Decode {
 public:
  Decode(const AttendArgs& args, const Sizes& sizes)
      : args_(args),
        sizes_(sizes),
        keys_(args, args.keys, args.key_scales, args.key_format),
        values_(args, args.values, args.value_scales, args.value_format) {}

  // The live cells of a range, in `cells` and in its result.
  LiveCells list(const Queries& queries, const Range& range, const Result& result, int64_t* cells) const;
  // `then` is what this thread will compute after it.
  void compute(const Queries& queries, const LiveCells& live, const LiveCells& then, const Result& result,
               Desk& desk) const;
  void merge(const Queries& queries, const Result* results, Desk& desk) const;
  void prefetch_start(const LiveCells& live) const;

 private:
  int32_t rows_per_head(const Queries& queries) const { return queries.num_tokens * sizes_.group; }

  // Query head and token of a row; see Result.
  void locate(const Queries& queries, int32_t row, int32_t& token, int32_t& head) const {
    const int32_t in_head = row % rows_per_head(queries);
    token = queries.token + in_head / sizes_.group;
    head = row / rows_per_head(queries) * sizes_.group + in_head % sizes_.group;
  }

  void pack_queries(const Queries& queries, float* q) const;
  void aim(Tile& tile, const Plane& plane, const LiveCells& live, int32_t first, int32_t head) const;
  void look_ahead(Tile& tile, const Plane& plane, const LiveCells& live, int32_t first, int32_t head) const;
    void score(const LiveCells& live, int32_t rows_per_head, const float* q, float* scores) const;
  void weigh(const LiveCells& live, const LiveCells& then, int32_t rows_per_head, const float* weights,
             float* sums) const;
  void scale_rows(const LiveCells& live, int32_t rows_per_head, const float* scales, const float* from,
                  float* to) const;
  float cap(float score) const {
    return args_.soft_cap > 0 ? tanh(splat(score / args_.soft_cap))[0] * args_.soft_cap : score;
  }

  const AttendArgs& args_;
  const Sizes& sizes_;
  const Plane keys_, values_;
};

void Decode::pack_queries(const Queries& queries, float* q) const {
  const int32_t num_rows = args_.num_kv_heads * rows_per_head(queries), head_dim = args_.head_dim;
  for (int32_t row = 0; row < num_rows; ++row, q += sizes_.padded_dim) {
    int32_t token, head;
    locate(queries, row, token, head);
    const float* from = args_.q + token * args_.q_stride + int64_t(head) * head_dim;
    for (int32_t d = 0; d < head_dim; ++d) q[d] = from[d] * args_.scale;
    std::fill(q + head_dim, q + sizes_.padded_dim, 0.0f);
  }
}

// The tile from live cell `first` on, of one head.
void Decode::aim(Tile& tile, const Plane& plane, const LiveCells& live, int32_t first, int32_t head) const {
  tile.from = plane.from;
  tile.count = std::min(kTile, live.count - first);
  const int64_t head_start = int64_t(head) * args_.block_size;
  for (int32_t i = 0; i < kTile; ++i) tile.at[i] = (live.cells[first + i] + head_start) * args_.head_dim;
}

// What to prefetch while a tile is computed: another such tile, or nothing where the cells end before it.
void Decode::look_ahead(Tile& tile, const Plane& plane, const LiveCells& live, int32_t first, int32_t head) const {
  tile.ahead_bytes = 0;
  if (first >= live.count) return;
  if (plane.scales) {
    const float* scales = plane.scales + int64_t(head) * args_.block_size;
    __builtin_prefetch(scales + live.cells[first]);
    __builtin_prefetch(scales + live.cells[first + kTile - 1]);
  }
  // The processor itself foresees what lies right behind the tile before, and better.
  if (first && live.cells[first] - live.cells[first - kTile] == int64_t(kTile) * args_.num_kv_heads) return;
  tile.ahead_bytes = plane.bytes_per_cell;
  const char* start = plane.from + int64_t(head) * args_.block_size * plane.bytes_per_cell;
  for (int32_t i = 0; i < kTile; ++i) tile.ahead[i] = start + live.cells[first + i] * plane.bytes_per_cell;
}

void Decode::prefetch_start(const LiveCells& live) const {
  Tile tile;
  for (int32_t first = 0; first < keys_.ahead; first += kTile)
    for (int32_t head = 0; head < args_.num_kv_heads; ++head) {
      look_ahead(tile, keys_, live, first, head);
      for (int32_t i = 0; i < kTile; ++i) prefetch(tile, i);
    }
}

void Decode::score(const LiveCells& live, int32_t rows_per_head, const float* q, float* scores) const {
  const ScoreTile score_tile = kScoreTile[args_.key_format];
  const int32_t end = Scratch::round_up(live.count, kTile);
  Tile tile;
  tile.head_dim = args_.head_dim;
  for (int32_t first = 0; first < end; first += kTile) {
    const int32_t ahead = first + keys_.ahead;
    for (int32_t head = 0; head < args_.num_kv_heads; ++head) {
      aim(tile, keys_, live, first, head);
      if (ahead < end)
        look_ahead(tile, keys_, live, ahead, head);
      else
        look_ahead(tile, values_, live, ahead - end, head);
      const int64_t row = int64_t(head) * rows_per_head;
      score_tile(tile, rows_per_head, q + row * sizes_.padded_dim, sizes_.padded_dim,
                 scores + row * sizes_.range_cells + first, sizes_.range_cells);
    }
  }
}

void Decode::weigh(const LiveCells& live, const LiveCells& then, int32_t rows_per_head, const float* weights,
                   float* sums) const {
  const WeighTile weigh_tile = kWeighTile[args_.value_format];
  const int32_t end = Scratch::round_up(live.count, kTile);
  Tile tile;
  tile.head_dim = args_.head_dim;
  for (int32_t first = 0; first < end; first += kTile) {
    const int32_t ahead = first + values_.ahead;
    for (int32_t head = 0; head < args_.num_kv_heads; ++head) {
      aim(tile, values_, live, first, head);
      if (ahead < end)
        look_ahead(tile, values_, live, ahead, head);
      else
        look_ahead(tile, keys_, then, ahead - end, head);
      const int64_t row = int64_t(head) * rows_per_head;
      weigh_tile(tile, rows_per_head, weights + row * sizes_.range_cells + first, sizes_.range_cells,
                 sums + row * sizes_.padded_dim, sizes_.padded_dim);
    }
  }
}

// to[row, i] = from[row, i] * scale of cell i.
void Decode::scale_rows(const LiveCells& live, int32_t rows_per_head, const float* scales, const float* from,
                        float* to) const {
  for (int32_t head = 0; head < args_.num_kv_heads; ++head) {
    const float* head_scales = scales + int64_t(head) * args_.block_size;
    const int64_t start = int64_t(head) * rows_per_head * sizes_.range_cells;
    for (int32_t first = 0; first < live.count; first += kTile) {
      float tile[kTile];
      const int64_t* cells = live.cells + first;
      if (cells[kTile - 1] - cells[0] == kTile - 1 && first + kTile <= live.count)  // a run without a hole
        std::memcpy(tile, head_scales + cells[0], sizeof tile);
      else
        for (int32_t i = 0; i < kTile; ++i) tile[i] = head_scales[cells[i]];
      for (int32_t r = 0; r < rows_per_head; ++r) {
        const int64_t at = start + int64_t(r) * sizes_.range_cells + first;
        for (int32_t i = 0; i < kTile; i += kLanes) store(to + at + i, load(from + at + i) * load(tile + i));
      }
    }
  }
}

// Scores to weights e^(score - peak), zeros up to the end of the last tile.
void soften(float* scores, int32_t count, float soft_cap, float& peak_out, float& total_out) {
  const int32_t padded = (count + kTile - 1) / kTile * kTile;
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
    const Vec weight = exp(load(scores + i) - splat(most));
    store(scores + i, weight);
    totals += weight;
  }
  peak_out = most;
  total_out = sum(totals);
}

LiveCells Decode::list(const Queries& queries, const Range& range, const Result& result, int64_t* cells) const {
  LiveCells live{cells, result.rows, 0};
  list_live(args_, queries.slice, range.begin, range.end, queries.hidden, live);
  *result.count = live.count;
  // The last tile is filled up with a cell that may be read; what comes of it is dropped.
  if (live.count) std::fill(cells + live.count, cells + live.count + kTile, cells[live.count - 1]);
  return live;
}

void Decode::compute(const Queries& queries, const LiveCells& live, const LiveCells& then, const Result& result,
                     Desk& desk) const {
  const int32_t per_head = rows_per_head(queries), num_rows = args_.num_kv_heads * per_head;
  std::fill(result.values, result.values + int64_t(num_rows) * sizes_.padded_dim, 0.0f);
  if (!live.count) {
    std::fill(result.peaks, result.peaks + num_rows, -FLT_MAX);
    std::fill(result.totals, result.totals + num_rows, 0.0f);
    prefetch_start(then);
    return;
  }

  pack_queries(queries, desk.q);
  float* weights = result.weights ? result.weights : desk.scores;
  score(live, per_head, desk.q, weights);
  if (args_.key_scales) scale_rows(live, per_head, args_.key_scales, weights, weights);
  for (int32_t row = 0; row < num_rows; ++row)
    soften(weights + int64_t(row) * sizes_.range_cells, live.count, args_.soft_cap, result.peaks[row],
           result.totals[row]);
  const float* scaled = weights;
  if (args_.value_scales) {
    scale_rows(live, per_head, args_.value_scales, weights, desk.scaled);
    scaled = desk.scaled;
  }
  weigh(live, then, per_head, scaled, result.values);
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
  double* mass = args_.mass ? args_.mass + queries.slice * args_.mass_stride : nullptr;
  pack_queries(queries, desk.q);
  double own_mass[kDecodeTokens] = {};

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
      own[t - first] = cap(dot(desk.q + int64_t(row) * padded_dim, key, head_dim));
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

    if (!mass) continue;
    for (int32_t t = first; t <= token; ++t)
      own_mass[t - first_token] += (kMassRounder + double(own[t - first] * inverse)) - kMassRounder;
    // From here on a range's peak is the factor that turns its weights into probabilities.
    for (int32_t i = 0; i < num_ranges; ++i) results[i].peaks[row] = desk.factors[i] * inverse;
  }
  if (!mass) return;

  for (int32_t i = 0; i < num_ranges; ++i) {
    const Result& result = results[i];
    for (int32_t begin = 0; begin < *result.count; begin += kTile) {
      double drawn[kTile];
      std::fill(drawn, drawn + kTile, kMassRounder);
      for (int32_t row = 0; row < num_rows; ++row) {
        const float* weights = result.weights + int64_t(row) * sizes_.range_cells + begin;
        const float factor = result.peaks[row];
        for (int32_t c = 0; c < kTile; ++c) drawn[c] += double(weights[c] * factor);
      }
      const int32_t count = std::min(kTile, *result.count - begin);
      for (int32_t c = 0; c < count; ++c) mass[result.rows[begin + c]] += drawn[c] - kMassRounder;
    }
  }
  for (int32_t t = first_token; t < queries.token + queries.num_tokens; ++t)
    mass[args_.write_rows[t]] += own_mass[t - first_token];
}

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
      bytes += (queries[i].end_range - queries[i].begin_range) *
               sizes.result_bytes(int64_t(sizes.num_kv_heads) * sizes.group * queries[i].num_tokens);
    return bytes;
  }
};

// False when `bytes` of memory could not be had.
bool Plan::make(const AttendArgs& args, const Sizes& sizes, const int32_t* slices, int32_t count, Plan& plan,
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
  plan = {carver.take<Job>(count), carver.take<Queries>(max_queries), carver.take<Range>(most_ranges),
          carver.take<Result>(most_ranges), count, 0, 0, 0};

  int32_t num_queries = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t slice = slices[i], end_token = args.starts[slice + 1];
    Job& job = plan.jobs[i] = {num_queries, num_queries, 0};
    const int32_t step = args.window ? 1 : end_token - args.starts[slice];
    for (int32_t token = args.starts[slice]; token < end_token; token += step) {
      Queries& queries = plan.queries[num_queries] = {i, slice, token, step, hidden_up_to(args, args.positions[token]),
                                                      plan.num_ranges, plan.num_ranges};
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
void place_results(const Sizes& sizes, Plan& plan, int32_t begin_job, int32_t end_job, char* memory) {
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
        result.weights = sizes.want_mass ? carver.take<float>(rows * sizes.range_cells) : nullptr;
        result.rows = sizes.want_mass ? carver.take<int32_t>(sizes.range_cells) : nullptr;
      }
    }
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
      const auto list = [&](int32_t r, int64_t* cells) {
        if (r >= end_range) return LiveCells{cells, nullptr, 0};
        return decode.list(plan.queries[plan.ranges[r].queries], plan.ranges[r], plan.results[r], cells);
      };
      // One range is taken ahead, so that its cells can be on their way while the one before it is computed.
      int32_t r = take();
      LiveCells live = list(r, desk.cells[0]);
      decode.prefetch_start(live);
      for (int turn = 1; r < end_range; turn ^= 1) {
        const int32_t then_r = take();
        const LiveCells then = list(then_r, desk.cells[turn]);
        const Queries& queries = plan.queries[plan.ranges[r].queries];
        decode.compute(queries, live, then, plan.results[r], desk);
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
