// The layout of a GGUF file's blocks in panels, and the conversion of their columns to the bf16
// pairs that are multiplied.
#pragma once
#include "panels.h"

namespace {

constexpr int kBlock = 32, kHalfWords = 8;  // a block is two halves of 8 pairs of K

enum Kind : int32_t { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8 };  // ggml's numbers

#if defined(__AVX512BF16__) && SP_WIDTH == 16
constexpr bool kInterleaved =
    true;  // k and k + 1 of a column lie in neighbouring lanes, as in a word of bf16
#else
constexpr bool kInterleaved = false;  // 32 columns of k, then those of k + 1
#endif

constexpr int place(int column, int parity) {
  return kInterleaved ? 2 * column + parity : kPanel * parity + column;
}

// A block of K for the columns of a panel: [kPanel] scales, for Q4_1 [kPanel] minimums, codes.
// Codes of 8 bits: [kBlock / 2][place(column, k % 2)] int8. Codes of 4 bits: [2][place(column, k %
// 2)] words, of which word i has k = 16 i + 2 s + parity in bits 4 s … 4 s + 3.
template <int kKind>
struct Layout {
  static constexpr bool kMinimum = kKind == kQ4_1, kWide = kKind == kQ8_0;
  static constexpr int kScales = kPanel * 2 * (kMinimum ? 2 : 1);
  static constexpr int kBytes = kScales + kPanel * kBlock / (kWide ? 1 : 2);
  static constexpr int kRawScales = kMinimum ? 4 : 2,
                       kRawBytes = kRawScales + kBlock / (kWide ? 1 : 2);
};

inline float half(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
  float magnitude;  // the exponents' biases differ by 112; a product makes subnormal numbers
                    // normal. No infinity: conversion refuses it
  const uint32_t shifted = (bits & 0x7fffu) << 13;
  __builtin_memcpy(&magnitude, &shifted, 4);
  return (bits & 0x8000 ? -0x1p112f : 0x1p112f) * magnitude;
}

inline vf halves(const uint8_t* p) {
#if SP_WIDTH == 16
  return (vf)_mm512_cvtph_ps(load_raw<__m256i>(p));
#else
  const vu bits = __builtin_convertvector(load_raw<vh>(p), vu);
  return (vf)((vu)((vf)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
#endif
}

#if defined(__AVX512BF16__) && SP_WIDTH == 16

// W columns (vector v) of a block.
template <int kKind>
struct Columns {
  typedef Layout<kKind> L;
  const uint8_t* codes;
  __m512 scale[2], minimum[2];  // of columns 0 … 7 and 8 … 15, each twice

  inline __attribute__((always_inline)) Columns(const uint8_t* block, int v)
      : codes(block + L::kScales + v * (L::kWide ? 32 : 128)) {
    twice(halves(block + v * 32), scale);
    if constexpr (L::kMinimum) twice(halves(block + kPanel * 2 + v * 32), minimum);
  }

  // Pair w of a half.
  inline __attribute__((always_inline)) MulBF16::vec word(int half, int w) const {
    return _mm512_cvtne2ps_pbh(values(half, w, 1), values(half, w, 0));
  }

 private:
  static inline __attribute__((always_inline)) void twice(vf columns, __m512 (&out)[2]) {
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    out[0] = _mm512_permutexvar_ps(low, (__m512)columns);
    out[1] = _mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), (__m512)columns);
  }

  inline __attribute__((always_inline)) __m512 values(int half, int w, int i) const {
    if constexpr (L::kWide) {
      const __m512i q = _mm512_cvtepi8_epi32(
          load_raw<__m128i>(codes + (half * kHalfWords + w) * 2 * kPanel + i * 16));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(q), scale[i]);
    } else {
      // A permutation looks at the low 4 bits of an index only, so the other codes of the word need
      // not be masked off.
      const __m512i q =
          _mm512_srli_epi32(load_raw<__m512i>(codes + half * 8 * kPanel + i * 64), w * 4);
      if constexpr (L::kMinimum) {
        const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_fmadd_ps(_mm512_permutexvar_ps(q, table), scale[i], minimum[i]);
      } else {
        const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return _mm512_mul_ps(_mm512_permutexvar_ps(q, table), scale[i]);
      }
    }
  }
};

inline void store_words(uint32_t* to, MulBF16::vec words) { store_raw(to, words); }

#else

template <int kKind>
struct Columns {
  typedef Layout<kKind> L;
  typedef int8_t bytes __attribute__((vector_size(W)));
  const uint8_t* codes;
  vf scale, minimum;

  inline __attribute__((always_inline)) Columns(const uint8_t* block, int v)
      : codes(block + L::kScales + v * W * (L::kWide ? 1 : 4)), scale(halves(block + v * W * 2)) {
    if constexpr (L::kMinimum) minimum = halves(block + kPanel * 2 + v * W * 2);
  }

  inline __attribute__((always_inline)) MulBF16::vec word(int half, int w) const {
    return {value(half, w, 0), value(half, w, 1)};
  }

 private:
  inline __attribute__((always_inline)) vf value(int half, int w, int parity) const {
    vf v;
    if constexpr (L::kWide) {
      const bytes q =
          load_raw<bytes>(codes + (half * kHalfWords + w) * 2 * kPanel + parity * kPanel);
      v = __builtin_convertvector(__builtin_convertvector(q, vi), vf) * scale;
    } else {
      const vi q = (vi)((load_raw<vu>(codes + (half * 2 + parity) * 4 * kPanel) >> (w * 4)) & 15);
      if constexpr (L::kMinimum)
        v = __builtin_convertvector(q, vf) * scale + minimum;
      else
        v = __builtin_convertvector(q - 8, vf) * scale;
    }
    const vu bits = (vu)v;  // finite: to_bf16 without its care for NaN
    return (vf)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
  }
};

inline void store_words(uint32_t* to, const MulBF16::vec& words) {
  store_raw(to, ((vu)words.low >> 16) | (vu)words.high);
}

#endif

}  // namespace
