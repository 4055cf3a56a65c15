// A past without masks, as a cache of blocks alone would have it: rows are positions, and of a sequence's blocks all
// cells up to `past_live` are read. Stands in for the functions of the same names in attention_parts.h. No windows.
#pragma once

namespace vtoken {

inline void list_live(const AttendArgs& args, int32_t slice, int32_t begin, int32_t end, int64_t, LiveCells& live) {
  const int32_t block_size = args.block_size, past = args.past_live[slice];
  const int32_t* table = args.tables + int64_t(slice) * args.num_entries;
  int32_t count = live.count;
  for (int32_t entry = begin; entry < end; ++entry) {
    const int32_t row = entry * block_size, slots = std::min(block_size, past - row);
    if (slots <= 0) break;
    const int64_t cell = int64_t(table[entry]) * args.num_kv_heads * block_size;
    for (int32_t i = 0; i < slots; ++i) live.cells[count + i] = cell + i;
    if (live.rows)
      for (int32_t i = 0; i < slots; ++i) live.rows[count + i] = row + i;
    count += slots;
  }
  live.count = count;
}

inline bool any_live(const AttendArgs& args, int32_t slice, int32_t begin, int32_t) {
  return begin * args.block_size < args.past_live[slice];
}

}  // namespace vtoken
