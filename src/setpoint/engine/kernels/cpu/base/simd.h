// Vectors of W floats in the compiler's own vector types: one source for every level (build.py),
// whose flags decide W.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define SP_WIDTH 16
#elif defined(__AVX2__)
#define SP_WIDTH 8
#else
#define SP_WIDTH 4  // SSE2, NEON
#endif

enum DType : int32_t { kF32 = 0, kBF16 = 1, kE4M3 = 2, kE5M2 = 3 };

typedef float vf __attribute__((vector_size(SP_WIDTH * 4)));
typedef int32_t vi __attribute__((vector_size(SP_WIDTH * 4)));
typedef uint32_t vu __attribute__((vector_size(SP_WIDTH * 4)));
typedef uint16_t vh __attribute__((vector_size(SP_WIDTH * 2)));
constexpr int W = SP_WIDTH;

struct bf16 {
  uint16_t bits;
};

template <class V>
static inline V load_raw(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <class V>
static inline void store_raw(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

// x - 0 is x, so the compiler broadcasts it from memory. x + 0 is another number for -0: it would
// add first, and broadcast from a register.
static inline vf splat(float x) { return x - vf{}; }
static inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }
#if SP_WIDTH == 16
static inline vf vmax(vf a, vf b) {
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}  // a > b ? a : b
static inline vf fma(vf a, vf b, vf c) {
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif SP_WIDTH == 8
static inline vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vf fma(vf a, vf b, vf c) {
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#else
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
#endif

static inline vf load(const float* p) { return load_raw<vf>(p); }
static inline vf load(const bf16* p) {
  return (vf)(__builtin_convertvector(load_raw<vh>(p), vu) << 16);
}
static inline void store(float* p, vf v) { store_raw(p, v); }

// Round to nearest even; NaN stays NaN.
static inline vh to_bf16(vf v) {
#if defined(__AVX512BF16__) && SP_WIDTH == 16
  return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : vu{} + 0x7fc0, vh);
#endif
}
static inline void store(bf16* p, vf v) { store_raw(p, to_bf16(v)); }

// v after a round trip through T.
static inline vf rounded(const float*, vf v) { return v; }
static inline vf rounded(const bf16*, vf v) {
  return (vf)(__builtin_convertvector(to_bf16(v), vu) << 16);
}

static inline vi lane_index() {
  vi v;
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

// The first n lanes only, where n may be less than W.
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

// body(i, n) for the elements [i, i + n) of each vector of `total` elements; n is the constant W
// but for a last, shorter one.
template <class Body>
static inline __attribute__((always_inline)) void for_vectors(int64_t total, const Body& body) {
  int64_t i = 0;
  for (; i + W <= total; i += W) body(i, (int64_t)W);
  if (i < total) body(i, total - i);
}

// Sum and maximum over the lanes, always in the same tree order.
#if SP_WIDTH == 16
static inline float sum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
static inline float max(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
static inline float sum(vf v) {
  for (int half = W / 2; half; half /= 2) v = v + __builtin_shuffle(v, lane_index() ^ half);
  return v[0];
}
static inline float max(vf v) {
  for (int half = W / 2; half; half /= 2) v = vmax(v, __builtin_shuffle(v, lane_index() ^ half));
  return v[0];
}
#endif

// 2^x: exactly 1 at 0 and exactly 0 at -inf, which is what makes merging an empty block exact; NaN
// stays NaN. The relative error is below 2e-7, with kCoarse below 1e-4, which is little compared
// with a rounding to bf16.
#if SP_WIDTH == 16
// 2^f on [0, 1) is 1 + f q(f) with q fitted for the least relative error (weighted least squares,
// repeated); scalef multiplies by 2^floor(x).
template <bool kCoarse = false>
static inline vf exp2(vf x) {
  const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p;
  if constexpr (kCoarse) {
    p = f * 7.70670846e-2f + 2.27644950e-1f;
    p = p * f + 6.95116818e-1f;
  } else {
    p = f * 1.86713075e-3f + 9.01702885e-3f;
    p = p * f + 5.57999127e-2f;
    p = p * f + 2.40164444e-1f;
    p = p * f + 6.93151295e-1f;
  }
  return (vf)_mm512_scalef_ps((__m512)(p * f + 1.f), (__m512)x);
}
#else
// On [-1/2, 1/2] 2^f is the Taylor series of exp(f ln 2), to the 7th power or (kCoarse) the 4th.
template <bool kCoarse = false>
static inline vf exp2(vf x) {
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf clamped = x < -126.f ? splat(-126.f) : (x > 127.f ? splat(127.f) : x);
  const vf shifted = clamped + magic;
  const vf f = clamped - (shifted - magic);
  vf p = splat(9.6181291e-3f);
  if constexpr (!kCoarse) {
    p = splat(1.5252734e-5f);
    p = p * f + 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
  }
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
  return x < -126.f ? vf{} : (vf)((vi)p + (((vi)shifted - (vi)magic) << 23));
}
#endif

// a / b, for kCoarse to 14 bits.
template <bool kCoarse = false>
static inline vf divided(vf a, vf b) {
#if SP_WIDTH == 16
  if constexpr (kCoarse) return a * (vf)_mm512_rcp14_ps((__m512)b);
#endif
  return a / b;
}

// tanh(x) = m / (m + 2) with m = e^2x - 1, and m from 2^n (2^f - 1) + (2^n - 1), so that small
// results keep their relative accuracy: it is below 5e-7 everywhere. 1 beyond 10 (1 - tanh(9.02) is
// half a unit of fp32); NaN stays NaN.
static inline vf tanh(vf x) {
  const vf magic = splat(12582912.f);
  const vf y = (x < -10.f ? splat(-10.f) : (x > 10.f ? splat(10.f) : x)) * 2.88539008f;
  const vf shifted = y + magic;
  const vf f = y - (shifted - magic);
  const vf power = (vf)((((vi)shifted - (vi)magic) + 127) << 23);
  vf p = splat(1.5252734e-5f);
  p = p * f + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  const vf m = p * f * power + (power - 1.f);
  return m / (m + 2.f);
}

// How products are summed: `word` is an element of A, `packed` a 4-byte element of B as it lies in
// memory, `vec` a vector of B ready to be multiplied, `sum` a vector of sums.
struct MulF32 {
  typedef float word, packed;
  typedef vf vec, sum;
  static constexpr int per_word = 1;
  static inline vec as_vec(vf words) { return words; }
  static inline vec load_vec(const packed* b) { return load(b); }
  static inline vf step(vf acc, word a, vec b) { return splat(a) * b + acc; }
};
// A word is a pair of bf16; both products are added.
#if defined(__AVX512BF16__) && SP_WIDTH == 16
struct MulBF16 {
  typedef uint32_t word, packed;
  typedef __m512bh vec;
  typedef vf sum;
  static constexpr int per_word = 2;
  static inline vec as_vec(vf words) { return (vec)words; }
  static inline vec load_vec(const packed* b) { return load_raw<vec>(b); }
  static inline vf step(vf acc, word a, vec b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), b);
  }
};
#else
struct MulBF16 {
  typedef uint32_t word, packed;
  struct vec {
    vf low, high;
  };
  typedef vf sum;
  static constexpr int per_word = 2;
  static inline vec load_vec(const packed* b) {
    const vu pairs = load_raw<vu>(b);
    return {(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)};
  }
  static inline vf step(vf acc, word a, const vec& b) {
    acc = (vf)(vu{} + (a << 16)) * b.low + acc;
    return (vf)(vu{} + (a & 0xffff0000u)) * b.high + acc;
  }
};
#endif

// acc[m][n] = sum over k of a[m * a_row + k] * b(k, n), b giving vectors: each sum in the order of
// k, whatever M and N are.
template <class Mul, int M, int N, class Columns>
static inline __attribute__((always_inline)) void tile(const typename Mul::word* a, int64_t a_row,
                                                       int64_t k_words, const Columns& b,
                                                       typename Mul::sum (&acc)[M][N]) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = typename Mul::sum{};
  for (int64_t k = 0; k < k_words; ++k) {
    typename Mul::vec columns[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) columns[n] = b(k, n);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const typename Mul::word word = a[m * a_row + k];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = Mul::step(acc[m][n], word, columns[n]);
    }
  }
}

// In-register transpose of a W x W square of words.
static inline __attribute__((always_inline)) void transpose(vf (&r)[W]) {
#if SP_WIDTH == 16
  __m512 t[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // 4 x 4 squares inside the 128-bit lanes
    const __m512 a = _mm512_unpacklo_ps((__m512)r[i], (__m512)r[i + 1]),
                 b = _mm512_unpackhi_ps((__m512)r[i], (__m512)r[i + 1]);
    const __m512 c = _mm512_unpacklo_ps((__m512)r[i + 2], (__m512)r[i + 3]),
                 d = _mm512_unpackhi_ps((__m512)r[i + 2], (__m512)r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // then the 4 x 4 square of lanes
    const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88),
                 b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88),
                 d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    r[i] = (vf)_mm512_shuffle_f32x4(a, c, 0x88);
    r[i + 4] = (vf)_mm512_shuffle_f32x4(b, d, 0x88);
    r[i + 8] = (vf)_mm512_shuffle_f32x4(a, c, 0xdd);
    r[i + 12] = (vf)_mm512_shuffle_f32x4(b, d, 0xdd);
  }
#elif SP_WIDTH == 8
  __m256 t[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m256 a = _mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]),
                 b = _mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
    const __m256 c = _mm256_unpacklo_ps((__m256)r[i + 2], (__m256)r[i + 3]),
                 d = _mm256_unpackhi_ps((__m256)r[i + 2], (__m256)r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = (vf)_mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = (vf)_mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
#else
  const vf a = __builtin_shuffle(r[0], r[1], vi{0, 4, 1, 5}),
           b = __builtin_shuffle(r[0], r[1], vi{2, 6, 3, 7});
  const vf c = __builtin_shuffle(r[2], r[3], vi{0, 4, 1, 5}),
           d = __builtin_shuffle(r[2], r[3], vi{2, 6, 3, 7});
  r[0] = __builtin_shuffle(a, c, vi{0, 1, 4, 5});
  r[1] = __builtin_shuffle(a, c, vi{2, 3, 6, 7});
  r[2] = __builtin_shuffle(b, d, vi{0, 1, 4, 5});
  r[3] = __builtin_shuffle(b, d, vi{2, 3, 6, 7});
#endif
}
