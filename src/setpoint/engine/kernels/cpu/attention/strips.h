// Products of a few rows, as attention needs them, and the reading of words of K and V from the
// pool.
#pragma once
#include "base/fp8.h"
#include "attention/plan.h"
#include "base/simd.h"

constexpr int kStripVectors = W == 16 ? 4 : 2;

// M rows of a x b, vectors [n, n + N) of the result: to(m, n + i, sum). b(k, n, i, N) is the vector
// n + i of b; N and i are constants, and n is even, for who wants to read vectors in pairs.
template <class Mul, int M, int N, class Columns, class To>
inline void strip(const typename Mul::word* a, int64_t a_row, int64_t k_words, int64_t n,
                  const Columns& b, const To& to) {
  vf acc[M][N];
  tile<Mul, M, N>(
      a, a_row, k_words,
      [&](int64_t k, int i) __attribute__((always_inline)) { return b(k, n, i, N); }, acc);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) to(m, n + i, acc[m][i]);
}

template <class Mul, int M, class Columns, class To>
inline void strips(const typename Mul::word* a, int64_t a_row, int64_t k_words, int64_t n,
                   int64_t end, const Columns& b, const To& to) {
  for (; n + kStripVectors <= end; n += kStripVectors)
    strip<Mul, M, kStripVectors>(a, a_row, k_words, n, b, to);
  if constexpr (kStripVectors > 2)
    for (; n + 2 <= end; n += 2) strip<Mul, M, 2>(a, a_row, k_words, n, b, to);
  for (; n < end; ++n) strip<Mul, M, 1>(a, a_row, k_words, n, b, to);
}

// Up to kStripRows rows of a x b, vectors [n, end) of the result.
template <class Mul, class Columns, class To>
inline void multiply(int64_t rows, const typename Mul::word* a, int64_t a_row, int64_t k_words,
                     int64_t n, int64_t end, const Columns& b, const To& to) {
  switch (rows) {
    case 1:
      return strips<Mul, 1>(a, a_row, k_words, n, end, b, to);
    case 2:
      return strips<Mul, 2>(a, a_row, k_words, n, end, b, to);
    case 3:
      return strips<Mul, 3>(a, a_row, k_words, n, end, b, to);
    case 4:
      return strips<Mul, 4>(a, a_row, k_words, n, end, b, to);
    case 5:
      return strips<Mul, 5>(a, a_row, k_words, n, end, b, to);
    case 6:
      return strips<Mul, 6>(a, a_row, k_words, n, end, b, to);
  }
}

// Vectors of a packed block: n_stride words from one to the next, k_stride from one k to the next.
template <class Mul>
struct Packed {
  const typename Mul::word* words;
  int64_t n_stride, k_stride;
  inline typename Mul::vec operator()(int64_t k, int64_t n, int i, int) const {
    return Mul::load_vec(words + (n + i) * n_stride + k * k_stride);
  }
};
// n elements to n / per_word words.
template <class T>
inline void pack_words(const T* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(to + i, load(from + i));
}
inline void pack_words(const bf16* from, uint32_t* to, int64_t n) {
  __builtin_memcpy(to, from, n * sizeof(bf16));
}

// Reads numbers of the pool.
template <class KV>
struct PoolReader {
  explicit PoolReader(int32_t) {}
  inline vf numbers(const KV* p) const { return load(p); }
};
template <>
struct PoolReader<fp8> {
  const FP8Format format;
  explicit PoolReader(int32_t dtype) : format(dtype == kE4M3 ? e4m3::kFormat : e5m2::kFormat) {}
  inline vf numbers(const fp8* p) const { return load(format, p); }
};

// W words of one row of K from word k on.
template <class KV>
inline vf key_words(MulF32, const PoolReader<KV>& reader, const KV* row, int64_t k) {
  return reader.numbers(row + k);
}
// W words of V, elements (n + i) * W .. of the keys that word k stands for; i of N that are read
// together.
template <class KV>
inline vf value_words(MulF32, const PoolReader<KV>& reader, const KV* const* rows, int64_t k,
                      int64_t begin, int64_t n, int i, int) {
  return reader.numbers(rows[k] + begin + (n + i) * W);
}
#ifdef __AVX512BF16__
inline vf key_words(MulBF16, const PoolReader<bf16>&, const bf16* row, int64_t k) {
  return load_raw<vf>(row + 2 * k);
}
inline vf key_words(MulBF16, const PoolReader<fp8>& reader, const fp8* row, int64_t k) {
  return to_bf16(reader.format, _mm512_cvtepu8_epi16(load_raw<__m256i>(row + 2 * k)));
}

inline __attribute__((always_inline)) vf value_words(MulBF16, const PoolReader<bf16>&,
                                                     const bf16* const* rows, int64_t k,
                                                     int64_t begin, int64_t n, int i, int N) {
  const bf16 *a = rows[2 * k] + begin + n * W, *b = rows[2 * k + 1] + begin + n * W;
  if (N == 1) {
    const __m512i low = _mm512_cvtepu16_epi32(load_raw<__m256i>(a)),
                  high = _mm512_cvtepu16_epi32(load_raw<__m256i>(b));
    return (vf)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  // Interleave 16 elements of two rows. Two neighbouring vectors share their loads.
  alignas(64) static constexpr uint16_t order[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const __m512i index = _mm512_load_si512(order[i % 2]);
  return (vf)_mm512_permutex2var_epi16(load_raw<__m512i>(a + i / 2 * 32), index,
                                       load_raw<__m512i>(b + i / 2 * 32));
}

inline __attribute__((always_inline)) vf value_words(MulBF16, const PoolReader<fp8>& reader,
                                                     const fp8* const* rows, int64_t k,
                                                     int64_t begin, int64_t n, int i, int N) {
#ifdef __AVX512VBMI__
  if (N == 4)
    return interleaved(reader.format, rows[2 * k] + begin + n * W, rows[2 * k + 1] + begin + n * W,
                       i);
#endif
  const int64_t at = begin + (n + i) * W;
  const __m512i low = _mm512_cvtepu8_epi32(load_raw<__m128i>(rows[2 * k] + at)),
                high = _mm512_cvtepu8_epi32(load_raw<__m128i>(rows[2 * k + 1] + at));
  return to_bf16(reader.format, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
#endif
