// Embedding, RMSNorm (with residual), rotary embedding with the store into the KV cache, gated
// activations, soft caps. Arithmetic in fp32, rounded once.
#include "base/activations.h"
#include "step/calls.h"
#include "base/fp8.h"
#include "base/simd.h"
#include "base/threads.h"

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

// activated: of a vector of gate and one of up.
template <class T, class Activated>
void gated(const GatedCall& call, const Activated& activated) {
  const int64_t cols = call.cols;
  for_rows(call.rows, 4 * cols, call.threads, [=, &call, &activated](int64_t row) {
    const T* gate = (const T*)call.gate_up + row * 2 * cols;
    const T* up = gate + cols;
    T* target = (T*)call.out + row * cols;
    for_vectors(cols, [=, &activated](int64_t c, int64_t n) {
      store_part(target + c, activated(load_part(gate + c, n), load_part(up + c, n)), n);
    });
  });
}

template <class Activation, class T>
void gated(const GatedCall& call) {
  gated<T>(call, [](vf g, vf u) { return Activation::template of<kRoundedToBF16<T>>(g) * u; });
}

template <class T>
void clamped_swiglu(const GatedCall& call) {
  gated<T>(call, [alpha = call.alpha, limit = call.limit](vf g, vf u) {
    return ClampedSwiglu::of<kRoundedToBF16<T>>(g, u, alpha, limit);
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

// n numbers v to the target: to a cache in fp8 divided by the scale.
template <class S>
inline void put(S* target, vf v, int64_t n, float scale) {
  if constexpr (sizeof(S) == 1) v /= scale;
  store_part(target, v, n);
}

template <class T, class S>
inline void rotate(const T* x, S* target, const float* cos, const float* sin, int64_t half,
                   int64_t dim, float scale) {
  for_vectors(half, [=](int64_t i, int64_t n) {
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n), c = load_part(cos + i, n),
             s = load_part(sin + i, n);
    // Rounded to the activations' type first: the reference does, and a cache of another type must
    // hold the same values.
    put(target + i, rounded(x, a * c - b * s), n, scale);
    put(target + half + i, rounded(x, b * c + a * s), n, scale);
  });
  for_vectors(dim - 2 * half, [=](int64_t i, int64_t n) {
    put(target + 2 * half + i, load_part(x + 2 * half + i, n), n, scale);
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
               rotate(q + h * dim, q + h * dim, cos, cos + half, half, dim, 1.f);
             const T* k = (const T*)call.k + t * call.k_stride;
             S* k_row = (S*)call.k_cache + call.kv_index[t] * kv_row;
             for (int64_t h = 0; h < call.num_kv_heads; ++h)
               rotate(k + h * dim, k_row + h * dim, cos, cos + half, half, dim, call.k_scale);
             const T* v = (const T*)call.v + t * call.v_stride;
             S* v_row = (S*)call.v_cache + call.kv_index[t] * kv_row;
             for_vectors(kv_row, [=, &call](int64_t i, int64_t n) {
               put(v_row + i, load_part(v + i, n), n, call.v_scale);
             });
           });
}

// n numbers of x, each the second from the one before.
template <class T>
inline vf every_second(const T* x, int64_t n) {
  vf found = vf{};
  for (int64_t i = 0; i < n; ++i) found[i] = load_part(x + 2 * i, 1)[0];
  return found;
}

// As rotate, with neighbours 2 i and 2 i + 1 of x as the pair i and i + half of the target.
template <class T, class S>
inline void rotate_neighbours(const T* x, S* target, const float* cos, const float* sin,
                              int64_t half, float scale) {
  for_vectors(half, [=](int64_t i, int64_t n) {
    const vf a = every_second(x + 2 * i, n), b = every_second(x + 2 * i + 1, n),
             c = load_part(cos + i, n), s = load_part(sin + i, n);
    put(target + i, rounded(x, a * c - b * s), n, scale);
    put(target + half + i, rounded(x, b * c + a * s), n, scale);
  });
}

template <class T, class S>
void latent_rope(const LatentRopeCall& call) {
  const int64_t rank = call.rank, half = call.rope / 2, size = rank + call.rope;
  for_rows(call.rows, (call.heads + 1) * size, call.threads, [=, &call](int64_t t) {
    const float* cos = call.cos_sin + call.positions[t] * call.rope;
    auto join = [=, &call](const T* first, const T* second, auto* target) {
      const float scale = call.scale;  // q is in no cache, so that it has none
      for_vectors(
          rank, [=](int64_t i, int64_t n) { put(target + i, load_part(first + i, n), n, scale); });
      call.interleaved ? rotate_neighbours(second, target + rank, cos, cos + half, half, scale)
                       : rotate(second, target + rank, cos, cos + half, half, 2 * half, scale);
    };
    for (int64_t h = 0; h < call.heads; ++h)
      join((const T*)call.q_latent + (t * call.heads + h) * rank,
           (const T*)call.q_rope + t * call.q_row + h * call.q_head,
           (T*)call.q + (t * call.heads + h) * size);
    join((const T*)call.latent + t * rank, (const T*)call.k_rope + t * call.k_row,
         (S*)call.cache + call.kv_index[t] * size);
  });
}

// run(a number of the cache's type).
template <class Run>
void with_cache_type(int32_t kv_dtype, const Run& run) {
  switch (kv_dtype) {
    case kF32:
      return run(float());
    case kBF16:
      return run(bf16());
    case kE4M3:
      return run(e4m3());
    case kE5M2:
      return run(e5m2());
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

void setpoint_clamped_swiglu_mul(const GatedCall* call) {
  call->dtype == kBF16 ? clamped_swiglu<bf16>(*call) : clamped_swiglu<float>(*call);
}

void setpoint_soft_cap(const SoftCapCall* call) {
  call->dtype == kBF16 ? soft_cap<bf16>(*call) : soft_cap<float>(*call);
}

void setpoint_rope_and_store(const RopeCall* call) {
  with_cache_type(call->kv_dtype, [=](auto number) {
    typedef decltype(number) S;
    call->dtype == kBF16 ? rope_and_store<bf16, S>(*call) : rope_and_store<float, S>(*call);
  });
}

void setpoint_latent_rope(const LatentRopeCall* call) {
  with_cache_type(call->kv_dtype, [=](auto number) {
    typedef decltype(number) S;
    call->dtype == kBF16 ? latent_rope<bf16, S>(*call) : latent_rope<float, S>(*call);
  });
}

}  // extern "C"
