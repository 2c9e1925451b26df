// Embedding, RMSNorm (with residual), rotary embedding with the store into the KV cache, gated activations. Arithmetic in fp32, rounded
// once.
#include "simd.h"
#include "threads.h"

struct EmbeddingCall {
  const int32_t* ids;
  const void* weight;  // [V, cols]
  void* out;           // [rows, cols]
  int64_t rows, cols;
  float scale;  // rounded to the weight's type before it multiplies
  int32_t dtype, threads;
};

// Row r of x begins at x + r / group * stride + r % group * cols: groups of rows side by side, the heads of a token.
struct NormCall {
  const void* x;
  void* residual;  // [rows, cols] or null; else residual += x first, and that sum is normalised
  const void* weight;
  void* out;  // [rows, cols]; may be x
  int64_t rows, cols, group, stride;
  float eps, offset;
  int32_t dtype, threads;
};

struct GatedCall {
  const void* gate_up;  // [rows, 2 cols]
  void* out;            // [rows, cols]
  int64_t rows, cols;
  int32_t dtype, threads;
};

struct RopeCall {
  void* q;  // [T, H, D], rotated in place; token strides in elements
  const void* k;
  const void* v;
  const float* cos_sin;  // [max positions, rotary_dim]
  const int64_t* positions;
  void* k_cache;
  void* v_cache;
  const int64_t* kv_index;
  int64_t rows, num_heads, num_kv_heads, head_dim, rotary_dim, q_stride, k_stride, v_stride;
  int32_t dtype, kv_dtype, threads;
};

namespace {

template <class T>
void embedding(const EmbeddingCall& call) {
  const int64_t cols = call.cols;
  const vf scale = rounded((const T*)nullptr, splat(call.scale));
  for_rows(call.rows, cols, call.threads, [=, &call](int64_t row) {
    const T* source = (const T*)call.weight + call.ids[row] * cols;
    T* target = (T*)call.out + row * cols;
    for (int64_t c = 0; c < cols; c += W) store_part(target + c, load_part(source + c, cols - c) * scale, cols - c);
  });
}

template <class T>
void rms_norm(const NormCall& call) {
  const int64_t cols = call.cols;
  T* residual = (T*)call.residual;
  const T* weight = (const T*)call.weight;
  for_rows(call.rows, cols, call.threads, [=, &call](int64_t row) {
    const T* source = (const T*)call.x + row / call.group * call.stride + row % call.group * cols;
    T* target = (T*)call.out + row * cols;
    vf squares = vf{};
    if (residual) {
      T* sums = residual + row * cols;
      for (int64_t c = 0; c < cols; c += W) {
        const vf v = rounded(sums, load_part(source + c, cols - c) + load_part(sums + c, cols - c));
        squares = v * v + squares;
        store_part(sums + c, v, cols - c);
      }
      source = sums;
    } else {
      for (int64_t c = 0; c < cols; c += W) {
        const vf v = load_part(source + c, cols - c);
        squares = v * v + squares;
      }
    }
    const vf factor = splat(1.f / __builtin_sqrtf(sum(squares) / (float)cols + call.eps));
    for (int64_t c = 0; c < cols; c += W)
      store_part(target + c, load_part(source + c, cols - c) * factor * (load_part(weight + c, cols - c) + call.offset), cols - c);
  });
}

struct Silu {
  static inline vf of(vf g) { return g / (exp2(g * -1.44269504f) + 1.f); }
};

// x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static inline vf of(vf g) { return g / (exp2((g * g * 0.044715f + 1.f) * g * -2.30220820f) + 1.f); }
};

template <class Activation, class T>
void gated(const GatedCall& call) {
  const int64_t cols = call.cols;
  for_rows(call.rows, 4 * cols, call.threads, [=, &call](int64_t row) {
    const T* gate = (const T*)call.gate_up + row * 2 * cols;
    const T* up = gate + cols;
    T* target = (T*)call.out + row * cols;
    for (int64_t c = 0; c < cols; c += W)
      store_part(target + c, Activation::of(load_part(gate + c, cols - c)) * load_part(up + c, cols - c), cols - c);
  });
}

template <class T, class S>
inline void rotate(const T* x, S* target, const float* cos, const float* sin, int64_t half, int64_t dim) {
  for (int64_t i = 0; i < half; i += W) {
    const int64_t n = half - i;
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n), c = load_part(cos + i, n), s = load_part(sin + i, n);
    // Rounded to the activations' type first: the reference does, and a cache of another type must hold the same values.
    store_part(target + i, rounded(x, a * c - b * s), n);
    store_part(target + half + i, rounded(x, b * c + a * s), n);
  }
  for (int64_t i = 2 * half; i < dim; i += W) store_part(target + i, load_part(x + i, dim - i), dim - i);
}

template <class T, class S>
void rope_and_store(const RopeCall& call) {
  const int64_t dim = call.head_dim, half = call.rotary_dim / 2, kv_row = call.num_kv_heads * dim;
  for_rows(call.rows, (call.num_heads + 2 * call.num_kv_heads) * dim, call.threads, [=, &call](int64_t t) {
    const float* cos = call.cos_sin + call.positions[t] * call.rotary_dim;
    T* q = (T*)call.q + t * call.q_stride;
    for (int64_t h = 0; h < call.num_heads; ++h) rotate(q + h * dim, q + h * dim, cos, cos + half, half, dim);
    const T* k = (const T*)call.k + t * call.k_stride;
    S* k_row = (S*)call.k_cache + call.kv_index[t] * kv_row;
    for (int64_t h = 0; h < call.num_kv_heads; ++h) rotate(k + h * dim, k_row + h * dim, cos, cos + half, half, dim);
    const T* v = (const T*)call.v + t * call.v_stride;
    S* v_row = (S*)call.v_cache + call.kv_index[t] * kv_row;
    for (int64_t i = 0; i < kv_row; i += W) store_part(v_row + i, load_part(v + i, kv_row - i), kv_row - i);
  });
}

}  // namespace

extern "C" {

void setpoint_embedding(const EmbeddingCall* call) { call->dtype == kBF16 ? embedding<bf16>(*call) : embedding<float>(*call); }

void setpoint_rms_norm(const NormCall* call) { call->dtype == kBF16 ? rms_norm<bf16>(*call) : rms_norm<float>(*call); }

void setpoint_silu_mul(const GatedCall* call) { call->dtype == kBF16 ? gated<Silu, bf16>(*call) : gated<Silu, float>(*call); }

void setpoint_gelu_tanh_mul(const GatedCall* call) { call->dtype == kBF16 ? gated<GeluTanh, bf16>(*call) : gated<GeluTanh, float>(*call); }

void setpoint_rope_and_store(const RopeCall* call) {
  if (call->dtype == kBF16)
    call->kv_dtype == kBF16 ? rope_and_store<bf16, bf16>(*call) : rope_and_store<bf16, float>(*call);
  else
    call->kv_dtype == kBF16 ? rope_and_store<float, bf16>(*call) : rope_and_store<float, float>(*call);
}

}  // extern "C"
