// What attention multiplies with: products of any number of rows in strips, and how words of K and V are read from the pool.
#pragma once
#include "simd.h"

constexpr int kStripRows = 6, kStripVectors = W == 16 ? 4 : 2;

// out[rows, vectors * W] = a x b in strips of kStripRows x kStripVectors; b(k, n) is a vector.
template <class Mul, int M, int N, class Columns>
inline void strip(const typename Mul::word* a, int64_t a_row, int64_t k_words, const Columns& b, float* out, int64_t out_row) {
  vf acc[M][N];
  tile<Mul, M, N>(a, a_row, k_words, b, acc);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(out + m * out_row + n * W, acc[m][n]);
}

template <class Mul, int N, class Columns>
inline void strips(int64_t rows, const typename Mul::word* a, int64_t a_row, int64_t k_words, const Columns& b, float* out,
                   int64_t out_row) {
  for (; rows >= kStripRows; rows -= kStripRows, a += kStripRows * a_row, out += kStripRows * out_row)
    strip<Mul, kStripRows, N>(a, a_row, k_words, b, out, out_row);
  switch (rows) {
    case 1: return strip<Mul, 1, N>(a, a_row, k_words, b, out, out_row);
    case 2: return strip<Mul, 2, N>(a, a_row, k_words, b, out, out_row);
    case 3: return strip<Mul, 3, N>(a, a_row, k_words, b, out, out_row);
    case 4: return strip<Mul, 4, N>(a, a_row, k_words, b, out, out_row);
    case 5: return strip<Mul, 5, N>(a, a_row, k_words, b, out, out_row);
  }
}

template <class Mul, class Columns>
inline void multiply(int64_t rows, int64_t vectors, const typename Mul::word* a, int64_t a_row, int64_t k_words, const Columns& b,
                     float* out, int64_t out_row) {
  int64_t n = 0;
  for (; n + kStripVectors <= vectors; n += kStripVectors)
    strips<Mul, kStripVectors>(rows, a, a_row, k_words, [=](int64_t k, int i) { return b(k, n + i); }, out + n * W, out_row);
  for (; n < vectors; ++n) strips<Mul, 1>(rows, a, a_row, k_words, [=](int64_t k, int i) { return b(k, n + i); }, out + n * W, out_row);
}

// Vectors of a packed block: n_stride words from one to the next, k_stride from one k to the next.
template <class Mul>
struct Packed {
  const typename Mul::word* words;
  int64_t n_stride, k_stride;
  inline typename Mul::vec operator()(int64_t k, int64_t n) const { return Mul::load_vec(words + n * n_stride + k * k_stride); }
};

// n elements to n / per_word words.
template <class T>
inline void pack_words(const T* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(to + i, load(from + i));
}
inline void pack_words(const bf16* from, uint32_t* to, int64_t n) { __builtin_memcpy(to, from, n * sizeof(bf16)); }

// W words of one row of K from word k on.
template <class KV>
inline vf key_words(MulF32, const KV* row, int64_t k) {
  return load(row + k);
}
// W words of V, elements n * W .. of the keys that word k stands for.
template <class KV>
inline vf value_words(MulF32, const KV* const* rows, int64_t k, int64_t begin, int64_t n, int64_t) {
  return load(rows[k] + begin + n * W);
}
#ifdef __AVX512BF16__
inline vf key_words(MulBF16, const bf16* row, int64_t k) { return load_raw<vf>(row + 2 * k); }

inline vf value_words(MulBF16, const bf16* const* rows, int64_t k, int64_t begin, int64_t n, int64_t dim) {
  // Interleave 16 elements of two rows. Two neighbouring vectors share their loads where 32 elements are there to load.
  alignas(64) static constexpr uint16_t order[2][32] = {
      {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const bf16 *a = rows[2 * k] + begin, *b = rows[2 * k + 1] + begin;
  if (n / 2 * 32 + 32 <= dim) {
    const __m512i index = _mm512_load_si512(order[n % 2]);
    return (vf)_mm512_permutex2var_epi16(load_raw<__m512i>(a + n / 2 * 32), index, load_raw<__m512i>(b + n / 2 * 32));
  }
  const __m512i low = _mm512_cvtepu16_epi32(load_raw<__m256i>(a + n * 16)), high = _mm512_cvtepu16_epi32(load_raw<__m256i>(b + n * 16));
  return (vf)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
#endif
