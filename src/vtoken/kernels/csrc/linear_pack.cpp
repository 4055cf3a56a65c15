// Packing weights, finding out what packs them without loss, and giving rows back.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "linear_holding.h"

namespace vtoken {
namespace {

// A group of 32 weights as scale * code + offset; offset is 0 for 8-bit codes.
struct Group {
  uint16_t scale, offset;
  int8_t codes[kGroup32];
};

bool is_half(float x) { return half_to_float(float_to_half(x)) == x; }

bool fits(const float* w, float scale, float offset, float lowest, float highest, Group* out) {
  out->scale = float_to_half(scale);
  out->offset = float_to_half(offset);
  const float exact_scale = half_to_float(out->scale);
  if (!std::isfinite(exact_scale) || !std::isfinite(offset)) return false;
  const float inverse = exact_scale == 0 ? 0 : 1 / exact_scale;
  // Without branches, so that it becomes vector code. NaN becomes the lowest code, which does not give it back.
  bool same = true;
  for (int i = 0; i < kGroup32; ++i) {
    float code = std::nearbyint((w[i] - offset) * inverse);
    code = code >= lowest ? code : lowest;
    code = code <= highest ? code : highest;
    same &= code * exact_scale + offset == w[i];  // the product is exact: one rounding, as in the kernels
    out->codes[i] = int8_t(int(code));
  }
  return same;
}

// The scale is the largest step that the spread of the group allows; quantisers use up the range of their codes, or
// nearly, so few are tried. Codes may count upwards from the least weight or, under Q4_0, downwards from the largest.
bool find_g4(const float* w, Group* out) {
  float low = w[0], high = w[0];
  for (int i = 1; i < kGroup32; ++i) {
    low = w[i] < low ? w[i] : low;
    high = w[i] > high ? w[i] : high;
  }
  if (low == high && is_half(low)) return fits(w, 0, low, 0, 15, out);
  for (int steps = 15; steps > 0; --steps) {
    const float scale = (high - low) / float(steps);
    if (is_half(low) && fits(w, scale, low, 0, 15, out)) return true;
    if (is_half(high) && fits(w, -scale, high, 0, 15, out)) return true;
  }
  return false;
}

bool find_g8(const float* w, Group* out) {
  float largest = 0;
  for (int i = 0; i < kGroup32; ++i) largest = std::max(largest, std::fabs(w[i]));
  for (float steps : {127.0f, 128.0f}) {
    if (fits(w, largest / steps, 0, -128, 127, out)) return true;
  }
  return false;
}

// The nearest codes, whatever the weights. False only where they are too large for an fp16 scale.
bool quantise(const float* w, int64_t count, Group* out) {
  float largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::fabs(w[i]));
  out->scale = float_to_half(largest / 127);
  const float scale = half_to_float(out->scale);
  for (int i = 0; i < count; ++i) {
    out->codes[i] = scale == 0 ? 0 : int8_t(std::clamp(std::nearbyint(w[i] / scale), -127.0f, 127.0f));
  }
  return std::isfinite(scale);
}

template <class Narrow>
bool keeps(const float* w, int64_t count, Narrow narrow) {
  bool same = true;
  for (int64_t i = 0; i < count; ++i) same &= narrow(w[i]) == w[i];
  return same;
}

bool keeps_row(const float* w, int64_t in_features, int holding) {
  Group group;
  switch (holding) {
    case kHoldF16: return keeps(w, in_features, [](float x) { return half_to_float(float_to_half(x)); });
    case kHoldBF16: return keeps(w, in_features, [](float x) { return bfloat_to_float(float_to_bfloat(x)); });
    case kHoldG8:
    case kHoldG4:
      if (in_features % kGroup32) return false;
      for (int64_t k = 0; k < in_features; k += kGroup32) {
        if (!(holding == kHoldG8 ? find_g8(w + k, &group) : find_g4(w + k, &group))) return false;
      }
      return true;
    default: return holding == kHoldF32;
  }
}

// One output's share of a panel. Returns the number of groups that could not be kept.
int64_t pack_row(const float* w, int64_t in_features, int holding, uint8_t* panel, int lane) {
  int64_t failed = 0;
  switch (holding) {
    case kHoldF32:
      for (int64_t k = 0; k < in_features; ++k) ((float*)panel)[k * kPanel + lane] = w[k];
      break;
    case kHoldF16:
      for (int64_t k = 0; k < in_features; ++k) ((uint16_t*)panel)[k * kPanel + lane] = float_to_half(w[k]);
      break;
    case kHoldBF16:
      for (int64_t k = 0; k < in_features; ++k) ((uint16_t*)panel)[k * kPanel + lane] = float_to_bfloat(w[k]);
      break;
    case kHoldG8:
    case kHoldG4:
      for (int64_t k = 0; k < in_features; k += kGroup32) {
        Group group{};
        failed += !(holding == kHoldG8 ? find_g8(w + k, &group) : find_g4(w + k, &group));
        uint16_t* head = (uint16_t*)panel;
        head[lane] = group.scale;
        if (holding == kHoldG8) {
          uint8_t* codes = panel + 2 * kPanel;
          for (int i = 0; i < kGroup32; ++i) codes[HoldG8::place(i, lane)] = uint8_t(group.codes[i] + HoldG8::kBias);
          panel += HoldG8::kBytes;
        } else {
          head[kPanel + lane] = group.offset;
          uint32_t* words = (uint32_t*)(panel + 4 * kPanel);
          for (int b = 0; b < kGroup32 / 8; ++b) {
            uint32_t word = 0;
            for (int i = 0; i < 8; ++i) word |= uint32_t(group.codes[b * 8 + i]) << (4 * i);
            words[b * kPanel + lane] = word;
          }
          panel += HoldG4::kBytes;
        }
      }
      break;
    case kHoldInt8:
      for (int64_t k = 0; k < in_features; k += kGroup32, panel += kInt8GroupBytes) {
        Group group{};
        failed += !quantise(w + k, std::min<int64_t>(kGroup32, in_features - k), &group);
        ((uint16_t*)panel)[lane] = group.scale;
        for (int i = 0; i < kGroup32; ++i) {
          panel[2 * kPanel + (i / 4 * kPanel + lane) * 4 + i % 4] = uint8_t(group.codes[i] + 128);
        }
      }
      break;
  }
  return failed;
}

void unpack_row(const uint8_t* panel, int lane, int64_t in_features, int holding, float* out) {
  for (int64_t k = 0; k < in_features; ++k) {
    const int64_t at = k * kPanel + lane, i = k % kGroup32;
    switch (holding) {
      case kHoldF32: out[k] = ((const float*)panel)[at]; break;
      case kHoldF16: out[k] = half_to_float(((const uint16_t*)panel)[at]); break;
      case kHoldBF16: out[k] = bfloat_to_float(((const uint16_t*)panel)[at]); break;
      case kHoldG8: {
        const uint8_t* group = panel + k / kGroup32 * HoldG8::kBytes;
        const int code = int8_t(group[2 * kPanel + HoldG8::place(int(i), lane)] - HoldG8::kBias);
        out[k] = float(code) * half_to_float(((const uint16_t*)group)[lane]);
        break;
      }
      case kHoldG4: {
        const uint8_t* group = panel + k / kGroup32 * HoldG4::kBytes;
        const uint16_t* head = (const uint16_t*)group;
        const uint32_t word = ((const uint32_t*)(group + 4 * kPanel))[i / 8 * kPanel + lane];
        out[k] = float(word >> (i % 8 * 4) & 15) * half_to_float(head[lane]) + half_to_float(head[kPanel + lane]);
        break;
      }
      case kHoldInt8: {
        const uint8_t* group = panel + k / kGroup32 * kInt8GroupBytes;
        const int code = group[2 * kPanel + (i / 4 * kPanel + lane) * 4 + i % 4] - 128;
        out[k] = float(code) * half_to_float(((const uint16_t*)group)[lane]);
        break;
      }
    }
  }
}

int64_t bytes_of_panel(int holding, int64_t in_features) {
  switch (holding) {
    case kHoldF32: return panel_bytes<HoldF32>(in_features);
    case kHoldF16: return panel_bytes<HoldF16>(in_features);
    case kHoldBF16: return panel_bytes<HoldBF16>(in_features);
    case kHoldG8: return panel_bytes<HoldG8>(in_features);
    case kHoldG4: return panel_bytes<HoldG4>(in_features);
    case kHoldInt8: return int8_groups(in_features) * kInt8GroupBytes;
  }
  return 0;
}

}  // namespace
}  // namespace vtoken

using namespace vtoken;

int32_t vtoken_linear_exact(const float* weight, int64_t out_features, int64_t in_features, int32_t num_threads) {
  std::atomic<int32_t> found{(1 << (kHoldG4 + 1)) - 1};
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
  for (int64_t row = 0; row < out_features; ++row) {
    for (int holding = kHoldF16; holding <= kHoldG4; ++holding) {
      // Once one row has failed, no other needs to be looked at.
      if (found.load(std::memory_order_relaxed) >> holding & 1 &&
          !keeps_row(weight + row * in_features, in_features, holding)) {
        found.fetch_and(~(1 << holding), std::memory_order_relaxed);
      }
    }
  }
  return found.load();
}

int64_t vtoken_linear_bytes(int32_t holding, int64_t out_features, int64_t in_features) {
  return (out_features + kPanel - 1) / kPanel * bytes_of_panel(holding, in_features);
}

int64_t vtoken_linear_pack(const float* weight, int64_t out_features, int64_t in_features, int32_t holding,
                           uint8_t* packed, int32_t num_threads) {
  const int64_t num_panels = (out_features + kPanel - 1) / kPanel, bytes = bytes_of_panel(holding, in_features);
  int64_t failed = 0;
#pragma omp parallel for num_threads(num_threads) schedule(static) reduction(+ : failed) if (num_threads > 1)
  for (int64_t p = 0; p < num_panels; ++p) {
    uint8_t* panel = packed + p * bytes;
    if ((p + 1) * kPanel > out_features) std::memset(panel, 0, bytes);
    for (int lane = 0; lane < kPanel && p * kPanel + lane < out_features; ++lane) {
      failed += pack_row(weight + (p * kPanel + lane) * in_features, in_features, holding, panel, lane);
    }
  }
  return failed;
}

void vtoken_linear_rows(const uint8_t* packed, int64_t in_features, int32_t holding, const int64_t* ids,
                        int64_t num_ids, float* out, int32_t num_threads) {
  const int64_t bytes = bytes_of_panel(holding, in_features);
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && num_ids > 32)
  for (int64_t i = 0; i < num_ids; ++i) {
    unpack_row(packed + ids[i] / kPanel * bytes, int(ids[i] % kPanel), in_features, holding, out + i * in_features);
  }
}
