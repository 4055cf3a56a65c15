// Move cells: relocation and copy on write within a store, whole blocks between stores.
#include <cstdint>
#include <cstring>

extern "C" {

// For each plane p, a tensor [num_blocks, num_heads, block_size] of cells of `cell_bytes[p]` bytes: cell `src[i]` of every
// head goes to cell `dst[i]`, one pair after the other. Planes are independent, so threads share them out.
void vtoken_copy_slots(char* const* planes, const int64_t* cell_bytes, int64_t num_planes, int64_t num_heads,
                       int64_t block_size, const int64_t* src, const int64_t* dst, int64_t count,
                       int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_planes * count > 256)
  for (int64_t p = 0; p < num_planes; ++p) {
    const int64_t bytes = cell_bytes[p];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = src[i] / block_size * num_heads * block_size + src[i] % block_size;
      const int64_t to = dst[i] / block_size * num_heads * block_size + dst[i] % block_size;
      for (int64_t h = 0; h < num_heads; ++h)
        std::memcpy(planes[p] + (to + h * block_size) * bytes, planes[p] + (from + h * block_size) * bytes, bytes);
    }
  }
}

// For each pair of planes: block `src[i]` of the source goes to block `dst[i]` of the target.
void vtoken_copy_blocks(const char* const* sources, char* const* targets, const int64_t* block_bytes,
                        int64_t num_planes, const int64_t* src, const int64_t* dst, int64_t count,
                        int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_planes * count > 16)
  for (int64_t p = 0; p < num_planes; ++p)
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(targets[p] + dst[i] * block_bytes[p], sources[p] + src[i] * block_bytes[p], block_bytes[p]);
}
}
