// What the two halves of paged attention, few new tokens a slice and many, have in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "attention.h"

namespace vtoken {

// Slices of at most so many new tokens are decoded: bound by reading the cache, not by arithmetic.
constexpr int32_t kDecodeTokens = 4;

// Both return 0, or the number of bytes of scratch memory that could not be had. `slices` are indices of `count`
// slices, in ascending order. They fill `out` and add to the tallies; `slots_read` is counted by their caller.
int64_t attend_decode(const AttendArgs& args, const int32_t* slices, int32_t count);  // 1 .. kDecodeTokens new tokens
int64_t attend_chunks(const AttendArgs& args, const int32_t* slices, int32_t count);  // more than kDecodeTokens

// The first of a slice's tokens whose query a tally counts; the end of its tokens where there is none.
inline int32_t first_counted(const AttendArgs& args, const Tally& tally, int32_t slice) {
  const int32_t begin = args.starts[slice], end = args.starts[slice + 1];
  const int64_t first = tally.first[slice], position = args.positions[begin];
  return first <= position ? begin : first < position + (end - begin) ? begin + int32_t(first - position) : end;
}

constexpr int64_t kNothingHidden = INT64_MIN;

// Positions up to this one are outside the window of a query at `position`.
inline int64_t hidden_up_to(const AttendArgs& args, int64_t position) {
  return args.window ? position - args.window : kNothingHidden;
}

// A run of a slice's live cells. Cell c holds elements [c * head_dim, (c + 1) * head_dim) of head 0 and the scale c;
// each further KV head lies `block_size` cells on.
struct LiveCells {
  int64_t* cells;
  int32_t* rows;  // or null where nobody asks
  int32_t count;
};

// Those of a mask word's bits whose positions lie beyond `hidden`. `row` is that of bit 0.
inline uint32_t in_window(const AttendArgs& args, int32_t slice, int32_t row, uint32_t bits, int64_t hidden) {
  if (!args.row_positions && row > hidden) return bits;
  const int64_t num_rows = int64_t(args.num_entries) * args.block_size;
  const int32_t* positions = args.row_positions ? args.row_positions + slice * num_rows : nullptr;
  uint32_t seen = 0;
  for (uint32_t left = bits; left; left &= left - 1) {
    const int32_t i = __builtin_ctz(left);
    seen |= uint32_t((positions ? positions[row + i] : row + i) > hidden) << i;
  }
  return seen;
}

// Appends the live cells of entries [begin, end) of a slice whose positions lie beyond `hidden`, in order of rows. Both
// arrays need room for (end - begin) * block_size more. Only masks, tables and positions are read: no dead cell is
// touched, and nothing at all of an EMPTY entry.
inline void list_live(const AttendArgs& args, int32_t slice, int32_t begin, int32_t end, int64_t hidden,
                      LiveCells& live) {
  const int32_t block_size = args.block_size, words = (block_size + 31) / 32;
  const int64_t first_entry = int64_t(slice) * args.num_entries;
  int32_t count = live.count;
  for (int32_t entry = begin; entry < end; ++entry) {
    const int32_t block = args.tables[first_entry + entry];
    if (block < 0) continue;
    const uint32_t* mask = args.masks + (first_entry + entry) * words;
    const int64_t block_cells = int64_t(block) * args.num_kv_heads * block_size;
    for (int32_t word = 0; word < words; ++word) {
      uint32_t bits = mask[word];
      if (!bits) continue;
      const int32_t offset = word * 32, slots = std::min(32, block_size - offset);
      const int64_t cell = block_cells + offset;
      const int32_t row = entry * block_size + offset;
      if (hidden != kNothingHidden) bits = in_window(args, slice, row, bits, hidden);
      if (bits == uint32_t((uint64_t(1) << slots) - 1)) {
        for (int32_t i = 0; i < slots; ++i) live.cells[count + i] = cell + i;
        if (live.rows)
          for (int32_t i = 0; i < slots; ++i) live.rows[count + i] = row + i;
        count += slots;
        continue;
      }
      for (; bits; bits &= bits - 1) {
        const int32_t i = __builtin_ctz(bits);
        live.cells[count] = cell + i;
        if (live.rows) live.rows[count] = row + i;
        ++count;
      }
    }
  }
  live.count = count;
}

// Whether entries [begin, end) of a slice hold a live cell at all, windows aside.
inline bool any_live(const AttendArgs& args, int32_t slice, int32_t begin, int32_t end) {
  const int64_t words = (args.block_size + 31) / 32, first = int64_t(slice) * args.num_entries;
  const uint32_t* masks = args.masks;
  return std::any_of(masks + (first + begin) * words, masks + (first + end) * words, [](uint32_t m) { return m != 0; });
}

// Memory that is grown when a call needs more than any before it, and otherwise reused. Keep one a thread.
class Scratch {
 public:
  // `bytes` aligned to a cache line with undefined contents, or null. What was handed out before is gone.
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      // Never less than a quarter more, so that a context that grows token by token does not allocate at each.
      const int64_t wanted = round_up(bytes + bytes / 4);
      memory_.reset(static_cast<char*>(std::aligned_alloc(kLine, wanted)));
      if (!memory_) return nullptr;
      size_ = wanted;
    }
    return memory_.get();
  }

  static constexpr int64_t kLine = 64;
  static constexpr int64_t round_up(int64_t bytes, int64_t unit = kLine) { return (bytes + unit - 1) / unit * unit; }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

}  // namespace vtoken
