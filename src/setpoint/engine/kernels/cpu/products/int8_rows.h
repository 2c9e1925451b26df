// Rows of x in 8 bits: each run of kRotated neighbours is rotated, and numbers are rounded to bytes
// q + 128, because the instructions that multiply bytes want one unsigned factor.
#pragma once
#include "base/buffer.h"
#include "base/integers.h"

namespace {

// A word is four bytes: unsigned ones of x, signed ones of the weight.
#if defined(__AVX512VNNI__) && SP_WIDTH == 16
struct MulInt8 {
  typedef uint32_t word, packed;
  typedef __m512i vec;
  typedef vi sum;
  static inline vec load_vec(const packed* b) { return load_raw<vec>(b); }
  static inline vi step(vi acc, word a, vec b) {
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32((int)a), b);
  }
};
#elif defined(__AVXVNNI__) && SP_WIDTH == 8
struct MulInt8 {
  typedef uint32_t word, packed;
  typedef __m256i vec;
  typedef vi sum;
  static inline vec load_vec(const packed* b) { return load_raw<vec>(b); }
  static inline vi step(vi acc, word a, vec b) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, _mm256_set1_epi32((int)a), b);
  }
};
#else
// Without an instruction for four bytes: those at even and at odd places apart, as int16. One that
// multiplies bytes to int16 sums would lose the upper end of large ones.
struct MulInt8 {
  typedef uint32_t word, packed;
  struct vec {
    vs even, odd;
  };
  typedef vi sum;
  static inline vec load_vec(const packed* b) {
    const vs bytes = load_raw<vs>(b);
    return {bytes << 8 >> 8, bytes >> 8};
  }
  static inline vi step(vi acc, word a, const vec& b) {
    const vus bytes = (vus)(vu{} + a);
    return acc + pair_products((vs)(bytes & 0xff), b.even) + pair_products((vs)(bytes >> 8), b.odd);
  }
};
#endif

constexpr float kLargest = 127.f, kTiny = 1e-30f;  // w8a8_int8.py, LARGEST and TINY
constexpr int kRotated = 64;                       // and BLOCK

// Sum and difference of the lanes h apart.
inline vf sums_and_differences(vf v, int h) {
  const vi lane = lane_index();
  return __builtin_shuffle(v, lane ^ h) + v * ((lane & h) ? splat(-1.f) : splat(1.f));
}

// Each run of kRun neighbours in a row of x times the Hadamard matrix of that size, to `out`,
// filled up with zeros to whole vectors;
// -> largest magnitudes as integers, which order as the numbers do, with infinity and then NaN at
// the end.
template <int kRun, class T>
vi rotate(const T* x, int64_t k, float* out) {
  constexpr int N = kRun > W ? kRun / W : 1;
  vi top{};
  for (int64_t i = 0; i < k; i += N * W) {
    vf v[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      v[n] = load_part(x + i + n * W, k - i - n * W);
#pragma GCC unroll 4
      for (int h = 1; h < W && h < kRun; h *= 2) v[n] = sums_and_differences(v[n], h);
    }
#pragma GCC unroll 4
    for (int h = 1; h < N; h *= 2)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n)
        if (!(n & h)) {
          const vf a = v[n], b = v[n + h];
          v[n] = a + b;
          v[n + h] = a - b;
        }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      store(out + i + n * W, v[n]);
      const vi magnitude = (vi)v[n] & 0x7fffffff;
      top = magnitude > top ? magnitude : top;
    }
  }
  return top;
}

// By the largest power of two up to kRotated that divides k.
template <class T, int kRun = kRotated>
vi rotate_row(const T* x, int64_t k, float* out) {
  if constexpr (kRun > 1) {
    if (k % kRun) return rotate_row<T, kRun / 2>(x, k, out);
  }
  return rotate<kRun>(x, k, out);
}

// Rounds numbers whose largest magnitude has these bits to q + 128 -> their scale. Reads whole
// vectors.
inline float round_numbers(const float* x, int32_t bits, uint8_t* out, int64_t bytes) {
  typedef uint8_t vb __attribute__((vector_size(W)));
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  const bool finite = bits < 0x7f800000;
  const float inverse = finite && largest >= kTiny ? kLargest / largest : 0.f;
  for (int64_t i = 0; i < bytes; i += W) {
    const vb q = __builtin_convertvector(nearest(load(x + i) * inverse) + 128, vb);
    __builtin_memcpy(out + i, &q, bytes - i < W ? bytes - i : W);
  }
  return finite ? (largest < kTiny ? 0.f : largest / kLargest) : __builtin_nanf("");
}

}  // namespace
