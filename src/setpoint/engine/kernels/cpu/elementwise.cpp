// Embedding, RMSNorm (with residual), rotary embedding with the store into the KV cache, gated
// activations, soft caps. Arithmetic in fp32, rounded once.
#include "activations.h"
#include "calls.h"
#include "fp8.h"
#include "simd.h"
#include "threads.h"

namespace {

template <class T>
void embedding(const EmbeddingCall& call) {
  const int64_t cols = call.cols;
  const vf scale = rounded((const T*)nullptr, splat(call.scale));
  for_rows(call.rows, cols, call.threads, [=, &call](int64_t row) {
    const T* source = (const T*)call.weight + call.ids[row] * cols;
    T* target = (T*)call.out + row * cols;
    for_vectors(cols, [=](int64_t c, int64_t n) {
      store_part(target + c, load_part(source + c, n) * scale, n);
    });
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
      for_vectors(cols, [&](int64_t c, int64_t n) {
        const vf v = rounded(sums, load_part(source + c, n) + load_part(sums + c, n));
        squares = v * v + squares;
        store_part(sums + c, v, n);
      });
      source = sums;
    } else {
      for_vectors(cols, [&](int64_t c, int64_t n) {
        const vf v = load_part(source + c, n);
        squares = v * v + squares;
      });
    }
    const vf factor = splat(1.f / __builtin_sqrtf(sum(squares) / (float)cols + call.eps));
    for_vectors(cols, [&](int64_t c, int64_t n) {
      store_part(target + c,
                 load_part(source + c, n) * factor * (load_part(weight + c, n) + call.offset), n);
    });
  });
}

template <class Activation, class T>
void gated(const GatedCall& call) {
  const int64_t cols = call.cols;
  for_rows(call.rows, 4 * cols, call.threads, [=, &call](int64_t row) {
    const T* gate = (const T*)call.gate_up + row * 2 * cols;
    const T* up = gate + cols;
    T* target = (T*)call.out + row * cols;
    for_vectors(cols, [=](int64_t c, int64_t n) {
      store_part(
          target + c,
          Activation::template of<kRoundedToBF16<T>>(load_part(gate + c, n)) * load_part(up + c, n),
          n);
    });
  });
}

template <class T>
void soft_cap(const SoftCapCall& call) {
  const int64_t cols = call.cols;
  const float cap = call.cap;
  for_rows(call.rows, 4 * cols, call.threads, [=, &call](int64_t row) {
    T* x = (T*)call.x + row * cols;
    for_vectors(cols, [=](int64_t c, int64_t n) {
      store_part(x + c, tanh(load_part(x + c, n) / cap) * cap, n);
    });
  });
}

template <class T, class S>
inline void rotate(const T* x, S* target, const float* cos, const float* sin, int64_t half,
                   int64_t dim) {
  for_vectors(half, [=](int64_t i, int64_t n) {
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n), c = load_part(cos + i, n),
             s = load_part(sin + i, n);
    // Rounded to the activations' type first: the reference does, and a cache of another type must
    // hold the same values.
    store_part(target + i, rounded(x, a * c - b * s), n);
    store_part(target + half + i, rounded(x, b * c + a * s), n);
  });
  for_vectors(dim - 2 * half, [=](int64_t i, int64_t n) {
    store_part(target + 2 * half + i, load_part(x + 2 * half + i, n), n);
  });
}

template <class T, class S>
void rope_and_store(const RopeCall& call) {
  const int64_t dim = call.head_dim, half = call.rotary_dim / 2, kv_row = call.num_kv_heads * dim;
  for_rows(call.rows, (call.num_heads + 2 * call.num_kv_heads) * dim, call.threads,
           [=, &call](int64_t t) {
             const float* cos = call.cos_sin + call.positions[t] * call.rotary_dim;
             T* q = (T*)call.q + t * call.q_stride;
             for (int64_t h = 0; h < call.num_heads; ++h)
               rotate(q + h * dim, q + h * dim, cos, cos + half, half, dim);
             const T* k = (const T*)call.k + t * call.k_stride;
             S* k_row = (S*)call.k_cache + call.kv_index[t] * kv_row;
             for (int64_t h = 0; h < call.num_kv_heads; ++h)
               rotate(k + h * dim, k_row + h * dim, cos, cos + half, half, dim);
             const T* v = (const T*)call.v + t * call.v_stride;
             S* v_row = (S*)call.v_cache + call.kv_index[t] * kv_row;
             for_vectors(kv_row, [=](int64_t i, int64_t n) {
               store_part(v_row + i, load_part(v + i, n), n);
             });
           });
}

template <class T>
void rope_and_store_as(const RopeCall& call) {
  switch (call.kv_dtype) {
    case kF32:
      return rope_and_store<T, float>(call);
    case kBF16:
      return rope_and_store<T, bf16>(call);
    case kE4M3:
      return rope_and_store<T, e4m3>(call);
    case kE5M2:
      return rope_and_store<T, e5m2>(call);
  }
}

}  // namespace

extern "C" {

void setpoint_embedding(const EmbeddingCall* call) {
  call->dtype == kBF16 ? embedding<bf16>(*call) : embedding<float>(*call);
}

void setpoint_rms_norm(const NormCall* call) {
  call->dtype == kBF16 ? rms_norm<bf16>(*call) : rms_norm<float>(*call);
}

void setpoint_silu_mul(const GatedCall* call) {
  call->dtype == kBF16 ? gated<Silu, bf16>(*call) : gated<Silu, float>(*call);
}

void setpoint_gelu_tanh_mul(const GatedCall* call) {
  call->dtype == kBF16 ? gated<GeluTanh, bf16>(*call) : gated<GeluTanh, float>(*call);
}

void setpoint_soft_cap(const SoftCapCall* call) {
  call->dtype == kBF16 ? soft_cap<bf16>(*call) : soft_cap<float>(*call);
}

void setpoint_rope_and_store(const RopeCall* call) {
  call->dtype == kBF16 ? rope_and_store_as<bf16>(*call) : rope_and_store_as<float>(*call);
}

}  // extern "C"
