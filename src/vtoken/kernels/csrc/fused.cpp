// The small operations between matrix products, each one pass over its data.
#include <cmath>

#include "kv_format.h"

namespace vtoken {
namespace {

constexpr int64_t kWorthAThread = 16384;  // elements below which a second thread costs more than it brings

// In the order of `ACTIVATIONS` in fused.py.
enum Activation : int32_t { kSilu, kGelu, kGeluTanh, kQuickGelu, kRelu };

template <Activation A>
inline Vec activate(Vec x) {
  const Vec one = splat(1.0f);
  if constexpr (A == kSilu) return x / (one + exp(-x));
  if constexpr (A == kQuickGelu) return x / (one + exp(splat(-1.702f) * x));
  if constexpr (A == kRelu) return x != x || x > Vec{} ? x : Vec{};
  if constexpr (A == kGeluTanh) {  // x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3)
    const Vec minus_2u = x * (splat(-1.5957691216f) + splat(-0.0713548162726f) * (x * x));
    return x / (one + exp(minus_2u));
  }
  // x * Phi(x), where 1 - erf is (Abramowitz and Stegun 7.1.26) a polynomial in t times e^(-z^2): to 1.5e-7, as torch's.
  const Vec z = (x < Vec{} ? -x : x) * splat(0.70710678118654752f);
  const Vec t = one / (one + splat(0.3275911f) * z);
  Vec p = splat(1.061405429f);
  p = p * t + splat(-1.453152027f);
  p = p * t + splat(1.421413741f);
  p = p * t + splat(-0.284496736f);
  p = p * t + splat(0.254829592f);
  const Vec half_tail = splat(0.5f) * p * t * exp(-(z * z));
  return x * (x < Vec{} ? half_tail : one - half_tail);
}

// `out` may be `residual`.
void norm_row(float* residual, const float* x, const float* weight, float* out, int64_t width, float eps) {
  Vec squares{};
  float rest = 0;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Vec v = load(residual + i);
    if (x) {
      v += load(x + i);
      store(residual + i, v);
    }
    squares = fma(v, v, squares);
  }
  for (; i < width; ++i) {
    if (x) residual[i] += x[i];
    rest += residual[i] * residual[i];
  }
  const float factor = 1.0f / std::sqrt((sum(squares) + rest) / float(width) + eps);
  for (i = 0; i + kLanes <= width; i += kLanes) store(out + i, load(residual + i) * splat(factor) * load(weight + i));
  for (; i < width; ++i) out[i] = residual[i] * factor * weight[i];
}

void layer_norm_row(float* residual, const float* x, const float* weight, const float* bias, float* out, int64_t width,
                    float eps) {
  Vec sums{};
  float rest = 0;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Vec v = load(residual + i);
    if (x) {
      v += load(x + i);
      store(residual + i, v);
    }
    sums += v;
  }
  for (; i < width; ++i) {
    if (x) residual[i] += x[i];
    rest += residual[i];
  }
  const float mean = (sum(sums) + rest) / float(width);
  Vec squares{};
  rest = 0;
  for (i = 0; i + kLanes <= width; i += kLanes) {
    const Vec v = load(residual + i) - splat(mean);
    squares = fma(v, v, squares);
  }
  for (; i < width; ++i) rest += (residual[i] - mean) * (residual[i] - mean);
  const float factor = 1.0f / std::sqrt((sum(squares) + rest) / float(width) + eps);
  for (i = 0; i + kLanes <= width; i += kLanes) {
    Vec v = (load(residual + i) - splat(mean)) * splat(factor);
    if (weight) v = v * load(weight + i);
    if (bias) v = v + load(bias + i);
    store(out + i, v);
  }
  for (; i < width; ++i) {
    float v = (residual[i] - mean) * factor;
    if (weight) v *= weight[i];
    if (bias) v += bias[i];
    out[i] = v;
  }
}

// `up` is null where nothing is gated; `out` may be `x`.
template <Activation A>
void activate_row(const float* x, const float* up, float* out, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec v = activate<A>(load(x + i));
    store(out + i, up ? v * load(up + i) : v);
  }
  for (; i < width; ++i) {
    const float v = activate<A>(splat(x[i]))[0];
    out[i] = up ? v * up[i] : v;
  }
}

typedef void (*ActivateRow)(const float*, const float*, float*, int64_t);
constexpr ActivateRow kActivations[] = {activate_row<kSilu>, activate_row<kGelu>, activate_row<kGeluTanh>,
                                        activate_row<kQuickGelu>, activate_row<kRelu>};

// Element i with element i + half, in place.
void rotate_head(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

// What becomes the largest code; NaN where a number is not finite, see `quant.kv_format`.
float peak_of(const float* x, int64_t width) {
  Vec most{}, odd{};  // x - x is 0 for numbers and NaN for the rest
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec v = load(x + i);
    most = max(v < Vec{} ? -v : v, most);
    odd += v - v;
  }
  float top = peak(most), rest = sum(odd);
  for (; i < width; ++i) {
    top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top;
    rest += x[i] - x[i];
  }
  return top + rest;
}

// Finite numbers of at most the largest code in magnitude, as codes in the low byte of each lane: to nearest even.
template <KVFormat F>
VecInt code_of(Vec v) {
  if constexpr (F == kInt8) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: its last place is 1
    return bitcast(v + magic) - bitcast(magic);
  } else {
    const VecInt bits = bitcast(v), magnitude = bits & 0x7fffffff;
    const VecInt normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    const VecInt small = bitcast(bitcast(magnitude) + splat(0x1p14f)) & 0xff;  // multiples of 2^-9
    const VecInt code = magnitude < 0x3c800000 ? small : normal;               // below 2^-6
    return (bits >> 24 & 0x80) | (code > 0x7e ? VecInt{} + 0x7e : code);
  }
}

template <KVFormat F>
void encode_head(float* x, void* cells, int64_t at, float* scale, int64_t width) {
  if constexpr (F == kFloat32) {
    std::memcpy(static_cast<float*>(cells) + at, x, width * sizeof(float));
  } else if constexpr (F == kFloat16 || F == kBFloat16) {
    uint16_t* to = static_cast<uint16_t*>(cells) + at;
    for (int64_t i = 0; i < width; ++i) {
      to[i] = F == kFloat16 ? float_to_half(x[i]) : float_to_bfloat(x[i]);
      x[i] = decode_one<F>(to, i);
    }
  } else {
    const float largest = F == kInt8 ? kInt8Max : kFp8Max;
    const float s = peak_of(x, width) / largest;
    *scale = s;
    uint8_t* to = static_cast<uint8_t*>(cells) + at;
    if (!(s > 0)) {  // zeros, numbers too small for a scale, or a fault: the scale alone tells what they decode to
      std::memset(to, 0, width);
      for (int64_t i = 0; i < width; ++i) x[i] = 0.0f * s;
      return;
    }
    typedef uint8_t Narrow __attribute__((vector_size(kLanes)));
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      Vec v = load(x + i) / splat(s);  // a subnormal scale may have lost bits, so codes are kept within bounds
      v = v > splat(largest) ? splat(largest) : v < splat(-largest) ? splat(-largest) : v;
      const Narrow codes = __builtin_convertvector(code_of<F>(v), Narrow);
      std::memcpy(to + i, &codes, sizeof codes);
      store(x + i, decode<F>(to, i) * splat(s));
    }
    for (; i < width; ++i) {
      const float v = x[i] / s;
      to[i] = uint8_t(code_of<F>(splat(v > largest ? largest : v < -largest ? -largest : v))[0]);
      x[i] = decode_one<F>(to, i) * s;
    }
  }
}

typedef void (*EncodeHead)(float*, void*, int64_t, float*, int64_t);
constexpr EncodeHead kEncoders[] = {encode_head<kFloat32>, encode_head<kFloat16>, encode_head<kBFloat16>,
                                    encode_head<kFp8E4M3>, encode_head<kInt8>};

}  // namespace
}  // namespace vtoken

extern "C" {

// All return 0, as calls that may be recorded do.

struct NormArgs {
  float* residual;      // [rows, width]; the sum is left here
  const float* x;       // [rows, width], or null
  const float* weight;  // [width]; of a layer norm it may be null
  const float* bias;    // [width], or null; layer norm only
  float* out;           // [rows, width] = norm(residual + x) * weight + bias
  int64_t rows, width;
  float eps;
  int32_t num_threads;
};

int64_t vtoken_add_rms_norm(const NormArgs* args) {
  const NormArgs& a = *args;
#pragma omp parallel for num_threads(a.num_threads) if (a.num_threads > 1 && a.rows * a.width > vtoken::kWorthAThread)
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t at = r * a.width;
    vtoken::norm_row(a.residual + at, a.x ? a.x + at : nullptr, a.weight, a.out + at, a.width, a.eps);
  }
  return 0;
}

int64_t vtoken_add_layer_norm(const NormArgs* args) {
  const NormArgs& a = *args;
#pragma omp parallel for num_threads(a.num_threads) if (a.num_threads > 1 && a.rows * a.width > vtoken::kWorthAThread)
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t at = r * a.width;
    vtoken::layer_norm_row(a.residual + at, a.x ? a.x + at : nullptr, a.weight, a.bias, a.out + at, a.width, a.eps);
  }
  return 0;
}

struct HeadNormArgs {
  float* qkv;             // [T, row_heads, head_dim]; the queries and keys of a token become their norms
  const float* q_weight;  // [head_dim]
  const float* k_weight;  // [head_dim]
  int64_t num_tokens, row_heads, num_heads, num_kv_heads, head_dim;
  float eps;
  int32_t num_threads;
};

int64_t vtoken_norm_heads(const HeadNormArgs* args) {
  const HeadNormArgs& a = *args;
  const int64_t normed = a.num_heads + a.num_kv_heads, all = a.num_tokens * normed;
#pragma omp parallel for num_threads(a.num_threads) if (a.num_threads > 1 && all * a.head_dim > vtoken::kWorthAThread)
  for (int64_t i = 0; i < all; ++i) {
    const int64_t head = i % normed;
    float* x = a.qkv + (i / normed * a.row_heads + head) * a.head_dim;
    vtoken::norm_row(x, nullptr, head < a.num_heads ? a.q_weight : a.k_weight, x, a.head_dim, a.eps);
  }
  return 0;
}

struct ActivateArgs {
  const float* x;  // [rows, width]; gated [rows, 2 * width], the gate first
  float* out;      // [rows, width] = f(x), gated f(gate) * up
  int64_t rows, width;
  int32_t activation, is_gated, num_threads;
};

int64_t vtoken_activate(const ActivateArgs* args) {
  const ActivateArgs& a = *args;
  const vtoken::ActivateRow activate_row = vtoken::kActivations[a.activation];
#pragma omp parallel for num_threads(a.num_threads) if (a.num_threads > 1 && a.rows * a.width > vtoken::kWorthAThread)
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * (a.is_gated ? 2 : 1) * a.width;
    activate_row(x, a.is_gated ? x + a.width : nullptr, a.out + r * a.width, a.width);
  }
  return 0;
}

struct WriteArgs {
  float* qkv;       // [T, (num_heads + 2 * num_kv_heads) * head_dim]; keys and values become what the cache holds
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size;
  const float* cos;  // [T, rotary_dim / 2], or null
  const float* sin;
  int64_t rotary_dim;
  const int64_t* slots;  // [T]
  void* keys;            // [num_blocks, num_kv_heads, block_size, head_dim]
  void* values;
  float* key_scales;  // [num_blocks, num_kv_heads, block_size], or null
  float* value_scales;
  int32_t key_format, value_format, num_threads;
};

// Turn queries and keys, and store keys and values in their slots.
int64_t vtoken_rotate_and_write(const WriteArgs* args) {
  const WriteArgs& a = *args;
  const int64_t row = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim, half = a.rotary_dim / 2;
  const vtoken::EncodeHead encode_key = vtoken::kEncoders[a.key_format];
  const vtoken::EncodeHead encode_value = vtoken::kEncoders[a.value_format];
#pragma omp parallel for num_threads(a.num_threads) if (a.num_threads > 1 && a.num_tokens * row > vtoken::kWorthAThread)
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    float* heads = a.qkv + t * row;
    if (a.cos)
      for (int64_t h = 0; h < a.num_heads + a.num_kv_heads; ++h)
        vtoken::rotate_head(heads + h * a.head_dim, a.cos + t * half, a.sin + t * half, half);
    const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      const int64_t cell = (block * a.num_kv_heads + h) * a.block_size + offset;
      float* key = heads + (a.num_heads + h) * a.head_dim;
      float* value = key + a.num_kv_heads * a.head_dim;
      encode_key(key, a.keys, cell * a.head_dim, a.key_scales ? a.key_scales + cell : nullptr, a.head_dim);
      encode_value(value, a.values, cell * a.head_dim, a.value_scales ? a.value_scales + cell : nullptr, a.head_dim);
    }
  }
  return 0;
}
}
