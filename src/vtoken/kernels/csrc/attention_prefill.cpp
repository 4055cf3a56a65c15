// Attention of slices with many new tokens: bound by arithmetic, so keys and values are unpacked once for many queries.
//
// A work item is some panels of query rows (all heads of a group, query after query) of one slice and KV head. It walks
// the slice's keys in tiles of kTile: the live past in order of rows, then the slice's own tokens up to its last query.
// Each tile is unpacked to float32 and met by every panel, with an online softmax (arXiv:2205.14135). Unpacking is done
// again by every item: with so many rows it costs a few per cent, and memory does not grow with the context.
//
// Tiles lie at fixed places of that sequence and rows do not mix, so a row's bits depend on nothing but its query and
// the keys before it: not on threads, neighbours, block size or, while rows keep the order of positions, the cut of the
// chunks (those of kDecodeTokens and fewer aside, which are decoded).
#include <omp.h>

#include <optional>

#include "attention_parts.h"
#include "prefill_tile.h"

namespace vtoken {
namespace {

using namespace prefill;

// Rows of one item: enough that unpacking a tile costs little beside using it, few enough that queries and results of
// the item's panels stay in the second-level cache.
constexpr int32_t kItemRows = 384;
constexpr int64_t kItemBytes = 512 << 10;
// Items a thread should find at least, so that none is idle while another has much to do. How rows are dealt out to
// items does not change a bit of the result.
constexpr int32_t kItemsPerThread = 4;

struct Chunk {
  int32_t slice;
  int32_t num_tokens;
  int64_t first_token;  // index among the plan's tokens
  LiveCells past;
};

struct Item {
  const Chunk* chunk;
  int32_t kv_head, first_panel, num_panels;
  int64_t cost;  // keys times rows
};

// What all threads share.
struct Lists {
  Chunk* chunks;
  Item* items;
  int64_t* cells;
  int32_t* rows;
};

// A thread's working memory.
struct Workspace {
  float *keys, *values;              // [kTile, stride]
  float *scores;                     // [kTile, kPanel]
  float *queries, *results;          // [panels, stride, kPanel]
  float *peaks, *totals, *limits;    // [panels, kPanel]; the last is for tallies
  int32_t *lasts, *hiddens, *seen;   // [panels, kPanel]; the last is for tallies
  int32_t* positions;                // [kTile]
  double* mass;                      // [kTile, kDoubles]
  int32_t* low;                      // [kTile, kLanes]
};

// Hands out consecutive arrays; with no memory under it, it only counts.
class Carver {
 public:
  explicit Carver(char* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* at = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += Scratch::round_up(count * int64_t(sizeof(T)));
    return at;
  }

  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

int32_t stride_of(const AttendArgs& args) { return round_up(args.head_dim, kBlock); }

int32_t most_panels(const AttendArgs& args) {
  const int64_t panel_bytes = 2 * int64_t(stride_of(args)) * kPanel * sizeof(float);
  return int32_t(std::clamp<int64_t>(kItemBytes / panel_bytes, 1, kItemRows / kPanel));
}

Workspace carve(const AttendArgs& args, Carver& carver) {
  const int64_t stride = stride_of(args), panels = most_panels(args);
  Workspace w;
  w.keys = carver.take<float>(kTile * stride);
  w.values = carver.take<float>(kTile * stride);
  w.scores = carver.take<float>(kTile * kPanel);
  w.queries = carver.take<float>(panels * stride * kPanel);
  w.results = carver.take<float>(panels * stride * kPanel);
  w.peaks = carver.take<float>(panels * kPanel);
  w.totals = carver.take<float>(panels * kPanel);
  w.limits = carver.take<float>(panels * kPanel);
  w.lasts = carver.take<int32_t>(panels * kPanel);
  w.hiddens = carver.take<int32_t>(panels * kPanel);
  w.seen = carver.take<int32_t>(panels * kPanel);
  w.positions = carver.take<int32_t>(kTile);
  w.mass = carver.take<double>(kTile * kDoubles);
  w.low = carver.take<int32_t>(kTile * kLanes);
  return w;
}

template <KVFormat F>
void unpack_as(const void* cache, const float* scales, const int64_t* cells, int64_t head_cells, int32_t count,
               int32_t head_dim, int32_t stride, float* to) {
  for (int32_t i = 0; i < count; ++i, to += stride) {
    const int64_t cell = cells[i] + head_cells, first = cell * head_dim;
    const float scale = has_scales(F) ? scales[cell] : 1.0f;
    int32_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
      const Vec v = decode<F>(cache, first + d);
      store(to + d, has_scales(F) ? v * vtoken::splat(scale) : v);
    }
    for (; d < head_dim; ++d) to[d] = decode_one<F>(cache, first + d) * scale;
    for (; d < stride; ++d) to[d] = 0;
  }
}

// `count` cells of a KV head, decoded, into rows of `stride` floats.
void unpack(int32_t format, const void* cache, const float* scales, const int64_t* cells, int64_t head_cells,
            int32_t count, int32_t head_dim, int32_t stride, float* to) {
  const auto as = format == kFloat32    ? unpack_as<kFloat32>
                  : format == kFloat16  ? unpack_as<kFloat16>
                  : format == kBFloat16 ? unpack_as<kBFloat16>
                  : format == kFp8E4M3  ? unpack_as<kFp8E4M3>
                                        : unpack_as<kInt8>;
  as(cache, scales, cells, head_cells, count, head_dim, stride, to);
}

bool all_finite(const float* values, int64_t count) {
  Vec differences{};  // x - x is 0, or NaN
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) differences += load(values + i) - load(values + i);
  float difference = sum(differences);
  for (; i < count; ++i) difference += values[i] - values[i];
  return difference == 0;
}

// One item at work. Positions are relative to the slice's first new token, so its own tokens count from 0.
class Walk {
 public:
  Walk(const AttendArgs& args, const Item& item, const Workspace& space)
      : args_(args), item_(item), chunk_(*item.chunk), space_(space), stride_(stride_of(args)) {}

  void run() const {
    for (int32_t p = 0; p < item_.num_panels; ++p) load_queries(p);
    for (int32_t begin = 0; begin < num_keys(); begin += kTile) {
      Tile tile = open(begin, 0);
      if (tile.num_keys == 0) continue;
      fetch_keys(begin, tile.num_keys);
      fetch(begin, tile.num_keys, args_.value_format, args_.values, args_.value_scales, args_.v_new, args_.v_stride,
            space_.values);
      for (int32_t p = 0; p < item_.num_panels; ++p) each_width(p, [&]<int C>() { attend<C>(p, begin, tile); });
    }
    for (int32_t p = 0; p < item_.num_panels; ++p) store_results(p);
    for (int32_t i = 0; i < args_.num_tallies; ++i) run_tally(args_.tallies[i]);
  }

 private:
  struct Tile {
    int32_t num_keys;             // that some query of the item may see
    int32_t lowest, highest;      // positions
    std::optional<bool> finite{};  // whether all its values are, once somebody asked
  };

  int32_t group() const { return args_.num_heads / args_.num_kv_heads; }
  int32_t first_row(int32_t p) const { return (item_.first_panel + p) * kPanel; }
  int32_t num_rows(int32_t p) const { return std::min(kPanel, chunk_.num_tokens * group() - first_row(p)); }
  int32_t first_query(int32_t p) const { return first_row(p) / group(); }
  int32_t last_query(int32_t p) const { return (first_row(p) + num_rows(p) - 1) / group(); }
  // Keys that the queries up to `query` may see, windows aside: the first so many.
  int32_t keys_up_to(int32_t query) const { return chunk_.past.count + query + 1; }
  int32_t num_keys() const { return keys_up_to(last_query(item_.num_panels - 1)); }
  float soft_cap() const { return args_.soft_cap * kLog2E; }

  // Calls `act<C>()` for the number of vectors in which the panel has rows.
  template <class Act>
  void each_width(int32_t p, Act act) const {
    const int32_t vectors = (num_rows(p) + kLanes - 1) / kLanes;
    if (vectors == 3) return act.template operator()<3>();
    if (vectors == 2) return act.template operator()<2>();
    act.template operator()<1>();
  }

  Panel panel(int32_t p) const {
    const int64_t lanes = int64_t(p) * kPanel, block = lanes * stride_;
    return {space_.queries + block, space_.results + block, space_.peaks + lanes,
            space_.totals + lanes,  space_.lasts + lanes,   space_.hiddens + lanes};
  }

  void load_queries(int32_t p) const {
    // Scores come out in units of log2(e), or of the soft cap, before the tanh.
    const float factor = args_.soft_cap ? args_.scale / args_.soft_cap : args_.scale * kLog2E;
    const int64_t lanes = int64_t(p) * kPanel;
    float* queries = space_.queries + lanes * stride_;
    if (num_rows(p) < kPanel) std::fill_n(queries, int64_t(args_.head_dim) * kPanel, 0.0f);
    for (int32_t i = 0; i < kPanel; ++i) {
      const int32_t row = first_row(p) + std::min(i, num_rows(p) - 1), query = row / group();
      space_.lasts[lanes + i] = query;
      space_.hiddens[lanes + i] = args_.window ? query - args_.window : INT_MIN;
      if (i >= num_rows(p)) continue;
      const float* q = args_.q + (chunk_.first_token + query) * args_.q_stride +
                       (int64_t(item_.kv_head) * group() + row % group()) * args_.head_dim;
      for (int32_t d = 0; d < args_.head_dim; ++d) queries[d * kPanel + i] = q[d] * factor;
    }
    std::fill_n(space_.results + lanes * stride_, int64_t(stride_) * kPanel, 0.0f);
    std::fill_n(space_.peaks + lanes, kPanel, -FLT_MAX);
    std::fill_n(space_.totals + lanes, kPanel, 0.0f);
  }

  // Positions of the tile's keys; no keys where a window hides them all from panels `first_panel` and later.
  Tile open(int32_t begin, int32_t first_panel) const {
    const int32_t past = chunk_.past.count, count = std::min(kTile, num_keys() - begin);
    const int64_t first = args_.positions[chunk_.first_token];
    const int64_t num_rows = int64_t(args_.num_entries) * args_.block_size;
    const int32_t* moved = args_.row_positions ? args_.row_positions + chunk_.slice * num_rows : nullptr;
    Tile tile{count, INT_MAX, INT_MIN};
    for (int32_t i = 0; i < count; ++i) {
      int32_t position = begin + i - past;
      if (position < 0) {
        // Without a window only the order of own tokens counts: the past is before them.
        if (args_.window) {
          const int32_t row = chunk_.past.rows[begin + i];
          position = int32_t((moved ? moved[row] : row) - first);
        }
      }
      space_.positions[i] = position;
      tile.lowest = std::min(tile.lowest, position);
      tile.highest = std::max(tile.highest, position);
    }
    for (int32_t i = count; i < kTile; ++i) space_.positions[i] = INT_MAX;
    if (args_.window && tile.highest <= first_query(first_panel) - args_.window) tile.num_keys = 0;
    return tile;
  }

  void fetch(int32_t begin, int32_t count, int32_t format, const void* cache, const float* scales, const float* fresh,
             int64_t fresh_stride, float* to) const {
    const int32_t head_dim = args_.head_dim, past = std::clamp(chunk_.past.count - begin, 0, count);
    if (past)
      unpack(format, cache, scales, chunk_.past.cells + begin, int64_t(item_.kv_head) * args_.block_size, past,
             head_dim, stride_, to);
    for (int32_t i = past; i < count; ++i) {
      const int64_t token = chunk_.first_token + begin + i - chunk_.past.count;
      const float* from = fresh + token * fresh_stride + int64_t(item_.kv_head) * head_dim;
      std::copy_n(from, head_dim, to + i * stride_);
      std::fill(to + i * stride_ + head_dim, to + (i + 1) * stride_, 0.0f);
    }
  }

  void fetch_keys(int32_t begin, int32_t count) const {
    fetch(begin, count, args_.key_format, args_.keys, args_.key_scales, args_.k_new, args_.k_stride, space_.keys);
  }

  // How many of the tile's keys the panel meets, and whether some row of it does not see one of them.
  struct Meeting {
    int32_t num_keys;
    bool hides;
  };

  Meeting meet(int32_t p, int32_t begin, const Tile& tile) const {
    const int32_t first = first_query(p), last = last_query(p);
    const int32_t count = std::min(tile.num_keys, keys_up_to(last) - begin);
    if (count <= 0 || (args_.window && tile.highest <= first - args_.window)) return {0, false};
    const bool later = begin + count > keys_up_to(first), earlier = args_.window && tile.lowest <= last - args_.window;
    return {count, later || earlier || count % kBlock != 0};
  }

  // Scores of a panel for the keys it meets in the tile, and the peak [kPanel] they raise.
  template <int C>
  void find_scores(const Panel& panel, const Meeting& met, float* peak) const {
    // Keys up to `padded` are whatever lies there: they have no position that any row sees.
    const int32_t padded = round_up(met.num_keys, kBlock);
    std::copy_n(panel.peak, kPanel, peak);
    if (!met.hides && args_.soft_cap == 0)
      return score<C>(panel, space_.keys, stride_, args_.head_dim, padded, space_.scores, peak);
    float unused[kPanel] = {};
    score<C>(panel, space_.keys, stride_, args_.head_dim, padded, space_.scores, unused);
    cap_and_hide<C>(panel, space_.positions, padded, soft_cap(), met.hides, space_.scores, peak);
  }

  template <int C>
  void attend(int32_t p, int32_t begin, Tile& tile) const {
    const Meeting met = meet(p, begin, tile);
    if (met.num_keys == 0) return;
    const Panel own = panel(p);
    float peak[kPanel], shrink[kPanel];
    find_scores<C>(own, met, peak);
    soften<C>(own, met.num_keys, peak, space_.scores, shrink);
    if (met.hides && !tile.finite) tile.finite = all_finite(space_.values, int64_t(tile.num_keys) * stride_);
    if (met.hides && !*tile.finite)
      weigh_seen<C>(own, space_.positions, space_.scores, space_.values, stride_, args_.head_dim, met.num_keys, shrink);
    else
      weigh<C>(own, space_.scores, space_.values, stride_, args_.head_dim, met.num_keys, shrink);
  }

  void store_results(int32_t p) const {
    const Panel own = panel(p);
    for (int32_t i = 0; i < num_rows(p); ++i) {
      const int32_t row = first_row(p) + i;
      const int64_t head = int64_t(item_.kv_head) * group() + row % group();
      float* out = args_.out + ((chunk_.first_token + row / group()) * args_.num_heads + head) * args_.head_dim;
      const float share = 1 / own.total[i];
      for (int32_t d = 0; d < args_.head_dim; ++d) out[d] = own.result[d * kPanel + i] * share;
    }
  }

  // A second walk over the keys, now that peaks and totals are final: it needs memory for one tile, however long the
  // prompt. Panels without a query that counts are left out. Sums of whole numbers are exact, so the order in which
  // threads add theirs cannot matter.
  void run_tally(const Tally& tally) const {
    const int32_t counted = int32_t(first_counted(args_, tally, chunk_.slice) - chunk_.first_token);
    int32_t first_panel = 0;
    while (first_panel < item_.num_panels && last_query(first_panel) < counted) ++first_panel;
    if (first_panel == item_.num_panels) return;
    if (tally.counts_low) find_seen(first_panel);
    for (int32_t p = first_panel; p < item_.num_panels; ++p)
      for (int32_t i = 0; i < kPanel; ++i) {
        const int32_t at = p * kPanel + i;
        const bool counts = i < num_rows(p) && (first_row(p) + i) / group() >= counted;
        // Units of mass in a weight of 1, or the weight that is a fair share: 1 to the bit where all weigh 1, so that
        // none of these is less.
        space_.limits[at] = !counts            ? 0.0f
                            : tally.counts_low ? space_.totals[at] / float(space_.seen[at])
                                               : kMassUnits / space_.totals[at];
      }

    double* sums = tally.values + chunk_.slice * tally.stride;
    for (int32_t begin = 0; begin < num_keys(); begin += kTile) {
      const Tile tile = open(begin, first_panel);
      if (tile.num_keys == 0) continue;
      fetch_keys(begin, tile.num_keys);
      std::fill_n(space_.mass, kTile * kDoubles, 0.0);
      std::fill_n(space_.low, kTile * kLanes, 0);
      for (int32_t p = first_panel; p < item_.num_panels; ++p)
        each_width(p, [&]<int C>() {
          const Meeting met = meet(p, begin, tile);
          if (met.num_keys == 0) return;
          float peak[kPanel];
          find_scores<C>(panel(p), met, peak);
          const float* limits = space_.limits + p * kPanel;
          if (tally.counts_low)
            count_low<C>(panel(p), limits, space_.positions, met.hides, space_.scores, met.num_keys, space_.low);
          else
            add_mass<C>(panel(p), limits, space_.scores, met.num_keys, space_.mass);
        });
      for (int32_t i = 0; i < tile.num_keys; ++i) {
        const int32_t own = begin + i - chunk_.past.count;
        const int32_t row = own < 0 ? chunk_.past.rows[begin + i] : args_.write_rows[chunk_.first_token + own];
        double drawn = 0;
        for (int32_t lane = 0; lane < kDoubles; ++lane) drawn += space_.mass[i * kDoubles + lane];
        drawn /= double(kMassUnits);
        for (int32_t lane = 0; lane < kLanes; ++lane) drawn += space_.low[i * kLanes + lane];
#pragma omp atomic
        sums[row] += drawn;
      }
    }
  }

  // How many keys each row sees.
  void find_seen(int32_t first_panel) const {
    for (int32_t p = first_panel; p < item_.num_panels; ++p)
      for (int32_t i = 0; i < kPanel; ++i)
        space_.seen[p * kPanel + i] = args_.window ? 0 : keys_up_to(space_.lasts[p * kPanel + i]);
    for (int32_t begin = 0; args_.window && begin < num_keys(); begin += kTile) {
      const Tile tile = open(begin, first_panel);
      for (int32_t p = first_panel; p < item_.num_panels; ++p)
        each_width(p, [&]<int C>() {
          const int32_t met = tile.num_keys ? meet(p, begin, tile).num_keys : 0;
          count_seen<C>(panel(p), space_.positions, met, space_.seen + p * kPanel);
        });
    }
  }

  const AttendArgs& args_;
  const Item& item_;
  const Chunk& chunk_;
  const Workspace& space_;
  const int32_t stride_;
};

int32_t num_panels(const AttendArgs& args, int32_t slice) {
  const int64_t rows = int64_t(args.starts[slice + 1] - args.starts[slice]) * (args.num_heads / args.num_kv_heads);
  return int32_t((rows + kPanel - 1) / kPanel);
}

int64_t count_live(const AttendArgs& args, int32_t slice) {
  const int64_t words = int64_t(args.num_entries) * ((args.block_size + 31) / 32);
  const uint32_t* masks = args.masks + slice * words;
  int64_t count = 0;
  for (int64_t i = 0; i < words; ++i) count += __builtin_popcount(masks[i]);
  return count;
}

// Cuts the chunks into items of at most `panels_per_item` panels; writes them unless `items` is null. Returns how many.
int32_t cut(const AttendArgs& args, const int32_t* slices, int32_t count, const Chunk* chunks, int32_t panels_per_item,
            Item* items) {
  const int32_t group = args.num_heads / args.num_kv_heads;
  int32_t num_items = 0;
  for (int32_t c = 0; c < count; ++c) {
    const int32_t panels = num_panels(args, slices[c]);
    for (int32_t first = 0; first < panels; first += panels_per_item, num_items += args.num_kv_heads) {
      if (!items) continue;
      const int32_t taken = std::min(panels_per_item, panels - first);
      const int64_t keys = chunks[c].past.count + int64_t(first + taken) * kPanel / group;
      for (int32_t head = 0; head < args.num_kv_heads; ++head)
        items[num_items + head] = {chunks + c, head, first, taken, keys * taken};
    }
  }
  return num_items;
}

}  // namespace

int64_t attend_chunks(const AttendArgs& args, const int32_t* slices, int32_t count) {
  if (count == 0) return 0;
  int64_t num_live = 0, panels = 0;
  for (int32_t c = 0; c < count; ++c) {
    num_live += count_live(args, slices[c]);
    panels += int64_t(num_panels(args, slices[c])) * args.num_kv_heads;
  }
  const int64_t share = args.num_threads == 1 ? panels : panels / (kItemsPerThread * args.num_threads);
  const int32_t panels_per_item = int32_t(std::clamp<int64_t>(share, 1, most_panels(args)));
  const int32_t num_items = cut(args, slices, count, nullptr, panels_per_item, nullptr);
  const int32_t num_threads = std::min(args.num_threads, num_items);

  const auto lay_out = [&](Carver& carver) {
    return Lists{carver.take<Chunk>(count), carver.take<Item>(num_items), carver.take<int64_t>(num_live),
                 carver.take<int32_t>(num_live)};
  };
  Carver space_size(nullptr), lists_size(nullptr);
  carve(args, space_size);
  lay_out(lists_size);
  const int64_t bytes = lists_size.used() + num_threads * space_size.used();
  thread_local Scratch scratch;
  char* const memory = scratch.reserve(bytes);
  if (!memory) return bytes;

  Carver carver(memory);
  const Lists lists = lay_out(carver);
  int64_t listed = 0;
  for (int32_t c = 0; c < count; ++c) {
    const int32_t s = slices[c];
    Chunk& chunk = lists.chunks[c] = {s, args.starts[s + 1] - args.starts[s], args.starts[s], {}};
    chunk.past.cells = lists.cells + listed;
    chunk.past.rows = lists.rows + listed;
    list_live(args, s, 0, args.num_entries, kNothingHidden, chunk.past);
    listed += chunk.past.count;
  }
  cut(args, slices, count, lists.chunks, panels_per_item, lists.items);
  // The heaviest first, so that no thread is left with a large one at the end.
  std::sort(lists.items, lists.items + num_items, [](const Item& a, const Item& b) { return a.cost > b.cost; });

#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Carver own(memory + lists_size.used() + omp_get_thread_num() * space_size.used());
    const Workspace space = carve(args, own);
#pragma omp for schedule(dynamic, 1)
    for (int32_t i = 0; i < num_items; ++i) Walk(args, lists.items[i], space).run();
  }
  return 0;
}

}  // namespace vtoken
