// RMSNorm (with residual), rotary embedding with the store into the KV cache, SiLU-mul. Included by isa.cpp.
// Columns need not be a multiple of the vector width; head_dim / 2 must be (api.cpp refuses others) or falls to a scalar tail.

template <class T>
static inline vf load_part(const T* p, int64_t n) {
  if (n >= W) return load(p);
  T lanes[W] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <class T>
static inline void store_part(T* p, vf v, int64_t n) {
  if (n >= W) return store(p, v);
  T lanes[W];
  store(lanes, v);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

template <class T>
static void rms_norm_t(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t cols, float eps, int threads) {
  for_rows(rows, cols, threads, [=](int64_t row) {
    const T* source = x + row * cols;
    T* target = out + row * cols;
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
    const vf factor = splat(1.f / __builtin_sqrtf(sum(squares) / (float)cols + eps));
    for (int64_t c = 0; c < cols; c += W)
      store_part(target + c, load_part(source + c, cols - c) * factor * load_part(weight + c, cols - c), cols - c);
  });
}

template <class T>
static void silu_mul_t(const T* gate_up, T* out, int64_t rows, int64_t cols, int threads) {
  for_rows(rows, 4 * cols, threads, [=](int64_t row) {
    const T* gate = gate_up + row * 2 * cols;
    const T* up = gate + cols;
    for (int64_t c = 0; c < cols; c += W) {
      const vf g = load_part(gate + c, cols - c);
      const vf silu = g / (exp2(g * -1.44269504f) + 1.f);
      store_part(out + row * cols + c, silu * load_part(up + c, cols - c), cols - c);
    }
  });
}

template <class T, class S>
static inline void rotate(const T* x, S* target, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += W) {
    const int64_t n = half - i;
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n), c = load_part(cos + i, n), s = load_part(sin + i, n);
    // Rounded to the activations' type first: the reference does, and a cache of another type must hold the same values.
    store_part(target + i, rounded(x, a * c - b * s), n);
    store_part(target + half + i, rounded(x, b * c + a * s), n);
  }
}

template <class T, class S>
static void rope_and_store_t(const RopeCall& call) {
  const int64_t dim = call.head_dim, half = dim / 2, kv_row = call.num_kv_heads * dim;
  for_rows(call.tokens, (call.num_heads + 2 * call.num_kv_heads) * dim, call.threads, [=, &call](int64_t t) {
    const float* cos = call.cos_sin + call.positions[t] * dim;
    T* q = (T*)call.q + t * call.q_stride;
    for (int64_t h = 0; h < call.num_heads; ++h) rotate(q + h * dim, q + h * dim, cos, cos + half, half);
    const T* k = (const T*)call.k + t * call.k_stride;
    S* k_row = (S*)call.k_cache + call.kv_index[t] * kv_row;
    for (int64_t h = 0; h < call.num_kv_heads; ++h) rotate(k + h * dim, k_row + h * dim, cos, cos + half, half);
    const T* v = (const T*)call.v + t * call.v_stride;
    S* v_row = (S*)call.v_cache + call.kv_index[t] * kv_row;
    for (int64_t i = 0; i < kv_row; i += W) store_part(v_row + i, load_part(v + i, kv_row - i), kv_row - i);
  });
}

static void rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t cols, float eps, int32_t dtype,
                     int32_t threads) {
  if (dtype == kBF16)
    rms_norm_t((const bf16*)x, (bf16*)residual, (const bf16*)weight, (bf16*)out, rows, cols, eps, threads);
  else
    rms_norm_t((const float*)x, (float*)residual, (const float*)weight, (float*)out, rows, cols, eps, threads);
}

static void silu_mul(const void* gate_up, void* out, int64_t rows, int64_t cols, int32_t dtype, int32_t threads) {
  if (dtype == kBF16)
    silu_mul_t((const bf16*)gate_up, (bf16*)out, rows, cols, threads);
  else
    silu_mul_t((const float*)gate_up, (float*)out, rows, cols, threads);
}

static void rope_and_store(const RopeCall& call) {
  if (call.dtype == kBF16)
    call.kv_dtype == kBF16 ? rope_and_store_t<bf16, bf16>(call) : rope_and_store_t<bf16, float>(call);
  else
    call.kv_dtype == kBF16 ? rope_and_store_t<float, bf16>(call) : rope_and_store_t<float, float>(call);
}
