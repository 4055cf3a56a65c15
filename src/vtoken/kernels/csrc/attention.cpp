// Entry of paged attention: sorts the slices of a plan by how many new tokens they have.
#include "attention_parts.h"

namespace {

using namespace vtoken;

int64_t slots_read(const AttendArgs& args, int32_t slice) {
  if (!args.window) return args.past_live[slice];
  // The first of the new tokens sees the most of the past.
  const int64_t hidden = hidden_up_to(args, args.positions[args.starts[slice]]);
  const int32_t words = (args.block_size + 31) / 32;
  int64_t count = 0;
  for (int32_t entry = 0; entry < args.num_entries; ++entry) {
    const uint32_t* mask = args.masks + (int64_t(slice) * args.num_entries + entry) * words;
    for (int32_t word = 0; word < words; ++word)
      if (mask[word])
        count += __builtin_popcount(in_window(args, slice, entry * args.block_size + word * 32, mask[word], hidden));
  }
  return count;
}

}  // namespace

extern "C" int64_t vtoken_attend(AttendArgs* args) {
  thread_local Scratch scratch;
  const int64_t bytes = int64_t(args->num_slices) * sizeof(int32_t);
  int32_t* slices = reinterpret_cast<int32_t*>(scratch.reserve(bytes));
  if (!slices) return bytes;

  const int32_t* starts = args->starts;
  int32_t num_decode = 0, num_chunks = 0;
  args->slots_read = 0;
  for (int32_t s = 0; s < args->num_slices; ++s) {
    args->slots_read += slots_read(*args, s);
    if (starts[s + 1] - starts[s] <= kDecodeTokens) slices[num_decode++] = s;
  }
  for (int32_t s = 0; s < args->num_slices; ++s)
    if (starts[s + 1] - starts[s] > kDecodeTokens) slices[num_decode + num_chunks++] = s;

  if (const int64_t missing = attend_decode(*args, slices, num_decode)) return missing;
  return attend_chunks(*args, slices + num_decode, num_chunks);
}
