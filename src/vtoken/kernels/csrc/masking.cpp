// Rule out tokens by bitmask, every row by itself.
#include <algorithm>
#include <cstdint>

namespace {

// Masks are either nearly empty or nearly full: whole words of one kind take the short way.
void mask_row(float* row, int64_t size, const uint32_t* words, int64_t num_words) {
  const float out = -__builtin_inff();
  const int64_t whole = std::min(size / 32, num_words);
  for (int64_t w = 0; w < whole; ++w) {
    const uint32_t word = words[w];
    float* at = row + 32 * w;
    if (word == 0xFFFFFFFFu) continue;
    if (word == 0) {
      for (int i = 0; i < 32; ++i) at[i] = out;
    } else {
      for (int i = 0; i < 32; ++i) at[i] = word >> i & 1 ? at[i] : out;
    }
  }
  for (int64_t i = 32 * whole; i < size; ++i)
    if (i / 32 >= num_words || !(words[i / 32] >> i % 32 & 1)) row[i] = out;
}

}  // namespace

extern "C" {

// In row `rows[k]` of logits [.., size], token i stays if bit `i % 32` of `words[k, i / 32]` is set; others become -inf.
void vtoken_mask_logits(float* logits, int64_t size, const int64_t* rows, int64_t count, const uint32_t* words,
                        int64_t num_words, int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && count * size > 100000)
  for (int64_t k = 0; k < count; ++k) mask_row(logits + rows[k] * size, size, words + k * num_words, num_words);
}
}
