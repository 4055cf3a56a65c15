// Paged attention under live masks: the arguments that `attention/cpu.py` fills in, mirrored by `kernels.library`.
#pragma once

#include <cstdint>

#include "kv_format.h"

extern "C" {

// What is added up about the rows of slices, for each query, query head and layer: a row's probability, as a multiple
// of 2^-28; or 1 if that is below 1 / t where the query sees t tokens, the row among them.
struct Tally {
  double* values;        // [S, stride] by row
  int64_t stride;
  const int64_t* first;  // [S] queries at lower positions are not counted
  int32_t counts_low;    // which of the two
};

// A plan's S slices, T new tokens in all. Slice s owns tokens [starts[s], starts[s + 1]), at consecutive positions. Its
// past lies in blocks tables[s, e]; bit i % 32 of masks[s, e, i / 32] says that slot i of entry e holds a token that the
// slice may read. Its own tokens are in no mask: each sees those of its chunk up to itself.
struct AttendArgs {
  // Of one layer.
  const float* q;      // [T, num_heads, head_dim] rotated
  const float* k_new;  // [T, num_kv_heads, head_dim] as the cache holds them, decoded
  const float* v_new;  // [T, num_kv_heads, head_dim]
  float* out;          // [T, num_heads, head_dim] contiguous
  int64_t q_stride, k_stride, v_stride;  // floats from one token to the next; heads and elements are contiguous
  const void* keys;            // [num_blocks, num_kv_heads, block_size, head_dim] in key_format
  const void* values;          // the same in value_format
  const float* key_scales;     // [num_blocks, num_kv_heads, block_size], or null where the format has none
  const float* value_scales;
  int32_t key_format, value_format;
  int32_t num_heads, num_kv_heads, head_dim;
  float scale;
  float soft_cap;  // 0 = off
  int32_t window;  // 0 = off: a query at p sees positions > p - window

  // Of the plan, the same for all layers; `attend.py` copies them from here to the end as one.
  const int32_t* starts;         // [S + 1]
  const int64_t* positions;      // [T]
  const int32_t* tables;         // [S, E] block ids, -1 = EMPTY
  const uint32_t* masks;         // [S, E, ceil(block_size / 32)]
  const int32_t* past_live;      // [S] set bits of each slice's masks
  const int32_t* row_positions;  // [S, E * block_size], or null where row = position; read only under a window
  const int32_t* write_rows;     // [T] row of each new token
  const Tally* tallies;
  int32_t num_tallies;
  int32_t num_slices;
  int32_t num_entries;  // E
  int32_t block_size, num_threads;
  int64_t slots_read;  // out: live slots of the past that were read, counted once a slice
};

// 0, or the number of bytes of scratch memory that could not be had.
int64_t vtoken_attend(AttendArgs* args);
}
