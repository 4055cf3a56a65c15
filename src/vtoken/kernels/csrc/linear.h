// Linear layers on packed weights: the arguments that `kernels/gemm.py` fills in.
#pragma once

#include <cstdint>

extern "C" {

// Numbers of `kernels.gemm.HOLDINGS`.
enum LinearHolding : int32_t { kHoldF32 = 0, kHoldF16 = 1, kHoldBF16 = 2, kHoldG8 = 3, kHoldG4 = 4, kHoldInt8 = 5 };

struct LinearArgs {
  const float* x;        // [num_rows, in_features]
  const uint8_t* packed; // by vtoken_linear_pack; up to 64 bytes behind it may be read
  const float* bias;     // [out_features] or null
  float* out;            // [num_rows, out_features]
  int64_t num_rows, in_features, out_features;
  int64_t x_stride, out_stride;  // floats from one row to the next
  int32_t holding, num_threads;
  int32_t accumulate;  // 1: add to what `out` holds
  uint8_t* scratch;    // int8 only: 40 bytes for every 32 (or fewer) numbers of each row
};

int64_t vtoken_linear(const LinearArgs* args);  // 0, as calls that may be recorded do

// Bit h is set if holding h gives every number of weight [out_features, in_features] back.
int32_t vtoken_linear_exact(const float* weight, int64_t out_features, int64_t in_features, int32_t num_threads);

int64_t vtoken_linear_bytes(int32_t holding, int64_t out_features, int64_t in_features);

// 0, or the number of groups of weights that the holding cannot keep.
int64_t vtoken_linear_pack(const float* weight, int64_t out_features, int64_t in_features, int32_t holding,
                           uint8_t* packed, int32_t num_threads);

// out [num_ids, in_features] = rows `ids` of the weight, as the holding gives them back.
void vtoken_linear_rows(const uint8_t* packed, int64_t in_features, int32_t holding, const int64_t* ids,
                        int64_t num_ids, float* out, int32_t num_threads);
}
