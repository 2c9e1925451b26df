// The layout of blocks in panels, and the conversion of their columns to the bf16 pairs that are
// multiplied.
#pragma once
#include "products/panels.h"

namespace {

constexpr int kBlock = 32, kHalfWords = 8;  // a block is two halves of 8 pairs of K

// ggml's numbers, and from 100 on those of quantised folders (decision 0080).
enum Kind : int32_t {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kMXFP4 = 39,
  kINT4Z = 104,
  kINT8Z = 108,
  kFP8 = 109
};

template <int kKind, int... kOf>
constexpr bool is_one_of = ((kKind == kOf) || ...);

#if defined(__AVX512BF16__) && SP_WIDTH == 16
constexpr bool kInterleaved =
    true;  // k and k + 1 of a column lie in neighbouring lanes, as in a word of bf16
#else
constexpr bool kInterleaved = false;  // 32 columns of k, then those of k + 1
#endif

constexpr int place(int column, int parity) {
  return kInterleaved ? 2 * column + parity : kPanel * parity + column;
}

// A panel in memory is a row of groups, each of the blocks of K for which a file has scales:
//
//   [kPanel] fp16 scales (MXFP4: exponents of 8 bits, INT8Z and FP8: fp32), for kinds with a
//   minimum [kPanel] fp16 minimums,
//   kGroup blocks of
//     in kinds with factors: [kSets][kPanel] int8 factors of the scales (one for the block, or one
//     for each half), then [kMinimumSets][kPanel] of the minimums;
//     in kinds with a zero: [kPanel] int8, the code that means 0;
//     in all kinds: codes.
//
// Codes of 2, 3 and 5 bits take 4 and 6, so that they are read as those are: in words of 4 bits
// Q2_K has q and Q3_K q + 8, in words of 6 bits Q5_0 has q + 32, and Q5_1 and Q5_K have q.
//
// Codes of 8 bits: [kBlock / 2][place(column, k % 2)] int8 (FP8: E4M3). Shorter ones: [kBits /
// 2][place(column, k % 2)] words. Of 4 bits word i has k = 16 i + 2 s + parity in bits 4 s … 4 s
// + 3. Of 6 bits words 0 and 1 have the same k, s below 5 in bits 6 s … 6 s + 5, the two low bits
// of s = 7 in bits 30 and 31; word 2 has the rest of them, in 16 bits for each half: s = 5, s = 6,
// four high bits of s = 7.
template <int kKind>
struct Layout {
  static constexpr bool kMinimum = is_one_of<kKind, kQ4_1, kQ5_1, kQ2_K, kQ4_K, kQ5_K>,
                        kFactors = is_one_of<kKind, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_XS>,
                        kTable = is_one_of<kKind, kIQ4_NL, kIQ4_XS, kMXFP4>,
                        kZero = is_one_of<kKind, kINT4Z, kINT8Z>,
                        kWide = is_one_of<kKind, kINT8Z, kFP8>;
  static constexpr int kBits = is_one_of<kKind, kQ8_0, kINT8Z, kFP8>          ? 8
                               : is_one_of<kKind, kQ5_0, kQ5_1, kQ5_K, kQ6_K> ? 6
                                                                              : 4;
  static constexpr int kGroup = kFactors ? 8 : 1,
                       kSets = is_one_of<kKind, kQ2_K, kQ3_K, kQ6_K> ? 2 : 1,
                       kMinimumSets = kMinimum ? kSets : 0;
  static constexpr int kNumberSize = kKind == kMXFP4 ? 1
                                     : kWide         ? 4
                                                     : 2,
                       kNumberBytes = kPanel * kNumberSize * (kMinimum ? 2 : 1),
                       kFactorBytes = kFactors ? kPanel * (kSets + kMinimumSets)
                                      : kZero  ? kPanel
                                               : 0,
                       kBlockBytes = kFactorBytes + kPanel * kBlock * kBits / 8,
                       kGroupBytes = kNumberBytes + kGroup * kBlockBytes;

  const uint8_t* numbers;
  const uint8_t* factors;
  const uint8_t* codes;

  // Block i of a group.
  inline __attribute__((always_inline)) Layout(const uint8_t* group, int i)
      : numbers(group),
        factors(group + kNumberBytes + i * kBlockBytes),
        codes(factors + kFactorBytes) {}

  static Layout of_panel(const uint8_t* panel, int64_t b) {
    return {panel + b / kGroup * kGroupBytes, (int)(b % kGroup)};
  }

  static int64_t panel_bytes(int64_t blocks) { return blocks / kGroup * kGroupBytes; }

  // Brings share i of kGroup even shares of a group to the second-level cache.
  static inline __attribute__((always_inline)) void fetch(const uint8_t* group, int i) {
    constexpr int kShare = kGroupBytes / kGroup;
    const uint8_t* share = group + i * kShare;
#pragma GCC unroll 32
    for (int line = 0; line * 64 < kShare; ++line) __builtin_prefetch(share + line * 64, 0, 2);
  }
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

// W int8. In two steps where there is no instruction: GCC 12 widens bytes to four times their size
// one by one.
inline __attribute__((always_inline)) vf signed_bytes(const uint8_t* p) {
#if SP_WIDTH == 16
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_raw<__m128i>(p)));
#else
  typedef int8_t bytes __attribute__((vector_size(W)));
  typedef int16_t shorts __attribute__((vector_size(2 * W)));
  const shorts wide = __builtin_convertvector(load_raw<bytes>(p), shorts);
  return __builtin_convertvector(__builtin_convertvector(wide, vi), vf);
#endif
}

// W numbers in E4M3, in units of kE4M3Unit. None is a NaN.
#if SP_WIDTH == 16
constexpr float kE4M3Unit = 256;
inline __attribute__((always_inline)) vf e4m3_numbers(const uint8_t* p) {
  // Seven bits higher it is an fp16 whose exponent's bias is 8 more, but for a second sign.
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_raw<__m128i>(p)), 7);
  return (vf)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbfff)));
}
#else
constexpr float kE4M3Unit = 1;
inline __attribute__((always_inline)) vf e4m3_numbers(const uint8_t* p) {
  typedef int8_t bytes __attribute__((vector_size(W)));
  typedef int16_t shorts __attribute__((vector_size(2 * W)));
  const shorts wide = __builtin_convertvector(load_raw<bytes>(p), shorts);
  const vu bits = (vu) __builtin_convertvector(wide, vi);
  return (vf)((bits << 20 & 0x07f00000) | (bits & 0x80000000u)) * 0x1p120f;
}
#endif

// 2^(e - 127), also where that is subnormal.
inline float power(uint8_t e) {
  const uint32_t bits = e ? (uint32_t)e << 23 : 0x400000;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline __attribute__((always_inline)) vf powers(const uint8_t* p) {
#if SP_WIDTH == 16
  const vu bits = (vu)_mm512_cvtepu8_epi32(load_raw<__m128i>(p)) << 23;
#else
  typedef uint8_t bytes __attribute__((vector_size(W)));
  const vu bits = __builtin_convertvector(__builtin_convertvector(load_raw<bytes>(p), vh), vu)
                  << 23;
#endif
  return (vf)(bits < 0x400000u ? vu{} + 0x400000u : bits);
}

// The values of codes of MXFP4, which has a sign, two bits of exponent and one of mantissa
// (OCP Microscaling Formats 1.0, E2M1); the upper bits of q are anything.
constexpr float kE2M1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6};
inline __attribute__((always_inline)) vf e2m1(vu q) {
#if SP_WIDTH == 16
  return (vf)_mm512_permutexvar_ps((__m512i)q, load_raw<__m512>(kE2M1));
#elif SP_WIDTH == 8
  return (vf)((vu)_mm256_permutevar8x32_ps(load_raw<__m256>(kE2M1), (__m256i)q) | (q & 8) << 28);
#else
  const vu code = q & 7;
  const vf from_one = (vf)((code << 22) + 0x3f000000), below = __builtin_convertvector(code, vf);
  return (vf)((vu)(code < 2 ? below * 0.5f : from_one) | (q & 8) << 28);
#endif
}

// The values of codes of IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl).
constexpr float kIQ4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// The values of codes of 4 bits of a kind with a table; the upper bits of q are anything.
template <int kKind>
inline __attribute__((always_inline)) vf looked_up(vu q) {
  if constexpr (kKind == kMXFP4) return e2m1(q);
#if SP_WIDTH == 16
  return (vf)_mm512_permutexvar_ps((__m512i)q, load_raw<__m512>(kIQ4));
#elif SP_WIDTH == 8
  const __m256 low = _mm256_permutevar8x32_ps(load_raw<__m256>(kIQ4), (__m256i)q),
               high = _mm256_permutevar8x32_ps(load_raw<__m256>(kIQ4 + 8), (__m256i)q);
  return (vf)_mm256_blendv_ps(low, high, (__m256)(q << 28));
#else
  vf v = {};
  for (int i = 0; i < W; ++i) v[i] = kIQ4[q[i] & 15];
  return v;
#endif
}

// W numbers, each times its factor.
template <int kKind>
inline __attribute__((always_inline)) vf products(const uint8_t* numbers, const uint8_t* factors) {
  if constexpr (kKind == kMXFP4) return powers(numbers);
  if constexpr (kKind == kFP8) return load_raw<vf>(numbers) * kE4M3Unit;
  if constexpr (kKind == kINT8Z) return load_raw<vf>(numbers);
  if constexpr (Layout<kKind>::kFactors) return halves(numbers) * signed_bytes(factors);
  return halves(numbers);
}

// What is added: K-quants have what is subtracted. Of a zero z it is - d z, which is exact as d q
// is, so that their sum is d (q - z), rounded as often as that.
template <int kKind>
inline __attribute__((always_inline)) vf minimums(const uint8_t* numbers, const uint8_t* factors) {
  if constexpr (kKind == kINT4Z) return -halves(numbers) * signed_bytes(factors);
  if constexpr (Layout<kKind>::kFactors) return -products<kKind>(numbers, factors);
  return products<kKind>(numbers, factors);
}

constexpr int kWordBytes = 2 * kPanel * 4;  // of one word for each place

// Codes q of 6 bits as 64 + q: bits of a word become the upper ones of a mantissa.
inline __attribute__((always_inline)) vf mantissas(const uint8_t* codes, int half, int w) {
  const vu own = load_raw<vu>(codes + half * kWordBytes);
  const vu rest = load_raw<vu>(codes + 2 * kWordBytes) << (16 - 16 * half);  // in the upper 16 bits
  const vu bits = w < 3    ? own << (17 - 6 * w)
                  : w < 5  ? own >> (6 * w - 17)
                  : w == 5 ? rest << 1
                  : w == 6 ? rest >> 5
                           : (rest >> 9 & 0x780000) | (own >> 13 & 0x060000);
#if SP_WIDTH == 16
  const vu mask = vu{} + 0x7e0000, base = vu{} + 0x42800000;
  return (vf)_mm512_ternarylogic_epi32((__m512i)bits, (__m512i)mask, (__m512i)base, 0xea);
#else
  return (vf)((bits & 0x7e0000) | 0x42800000);
#endif
}

#if defined(__AVX512BF16__) && SP_WIDTH == 16

// W columns (vector v) of a block.
template <int kKind>
struct Columns {
  typedef Layout<kKind> L;
  const uint8_t* codes;
  // Of columns 0 … 7 and 8 … 15, each twice. INT8Z: the minimum is the zero itself.
  __m512 scale[L::kSets][2], minimum[L::kSets][2];

  inline __attribute__((always_inline)) Columns(const L& block, int v)
      : codes(block.codes + v * (L::kBits == 8 ? 32 : 128)) {
    const uint8_t *numbers = block.numbers + v * W * L::kNumberSize,
                  *factors = block.factors + v * W;
    for (int set = 0; set < L::kSets; ++set) {
      twice(products<kKind>(numbers, factors + set * kPanel), scale[set]);
      if constexpr (kKind == kINT4Z)
        twice(minimums<kKind>(numbers, factors), minimum[set]);
      else if constexpr (kKind == kINT8Z)
        twice(signed_bytes(factors), minimum[set]);
      else if constexpr (L::kMinimum)
        twice(minimums<kKind>(numbers + kPanel * 2, factors + (L::kSets + set) * kPanel),
              minimum[set]);
      else if constexpr (L::kBits == 6)
        for (int i = 0; i < 2; ++i) minimum[set][i] = scale[set][i] * -96;
    }
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
    const int set = L::kSets == 1 ? 0 : half;
    const __m512 scale = this->scale[set][i];
    if constexpr (L::kBits == 6) {
      // Without a minimum (64 + q) d - 96 d = (q - 32) d, exact but for the sign of zero.
      const vf code = mantissas(codes + i * 64, half, w);
      return _mm512_fmadd_ps((__m512)(L::kMinimum ? code - 64 : code), scale, minimum[set][i]);
    } else if constexpr (L::kBits == 8) {
      const uint8_t* at = codes + (half * kHalfWords + w) * 2 * kPanel + i * 16;
      if constexpr (kKind == kFP8) return _mm512_mul_ps((__m512)e4m3_numbers(at), scale);
      const __m512 q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_raw<__m128i>(at)));
      return _mm512_mul_ps(kKind == kINT8Z ? _mm512_sub_ps(q, minimum[set][i]) : q, scale);
    } else {
      const __m512i q =
          _mm512_srli_epi32(load_raw<__m512i>(codes + half * kWordBytes + i * 64), w * 4);
      // A permutation looks at the low 4 bits of an index only, so the other codes of the word need
      // not be masked off.
      if constexpr (L::kTable) {
        return _mm512_mul_ps((__m512)looked_up<kKind>((vu)q), scale);
      } else if constexpr (L::kMinimum || L::kZero) {
        const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_fmadd_ps(_mm512_permutexvar_ps(q, table), scale, minimum[set][i]);
      } else {
        const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return _mm512_mul_ps(_mm512_permutexvar_ps(q, table), scale);
      }
    }
  }
};

inline void store_words(uint32_t* to, MulBF16::vec words) { store_raw(to, words); }

#else

template <int kKind>
struct Columns {
  typedef Layout<kKind> L;
  const uint8_t* codes;
  vf scale[L::kSets], minimum[L::kSets];  // INT8Z: the minimum is the zero itself

  inline __attribute__((always_inline)) Columns(const L& block, int v)
      : codes(block.codes + v * W * (L::kBits == 8 ? 1 : 4)) {
    const uint8_t *numbers = block.numbers + v * W * L::kNumberSize,
                  *factors = block.factors + v * W;
    for (int set = 0; set < L::kSets; ++set) {
      scale[set] = products<kKind>(numbers, factors + set * kPanel);
      if constexpr (kKind == kINT4Z)
        minimum[set] = minimums<kKind>(numbers, factors);
      else if constexpr (kKind == kINT8Z)
        minimum[set] = signed_bytes(factors);
      else if constexpr (L::kMinimum)
        minimum[set] = minimums<kKind>(numbers + kPanel * 2, factors + (L::kSets + set) * kPanel);
    }
  }

  inline __attribute__((always_inline)) MulBF16::vec word(int half, int w) const {
    return {value(half, w, 0), value(half, w, 1)};
  }

 private:
  inline __attribute__((always_inline)) vf value(int half, int w, int parity) const {
    const int set = L::kSets == 1 ? 0 : half;
    const vf scale = this->scale[set];
    vf v;
    if constexpr (L::kBits == 6) {
      const vf code = mantissas(codes + parity * 4 * kPanel, half, w);
      if constexpr (L::kMinimum)
        v = (code - 64) * scale + minimum[set];
      else
        v = (code - 96) * scale;
    } else if constexpr (L::kBits == 8) {
      const uint8_t* at = codes + (half * kHalfWords + w) * 2 * kPanel + parity * kPanel;
      if constexpr (kKind == kFP8)
        v = e4m3_numbers(at) * scale;
      else if constexpr (kKind == kINT8Z)
        v = (signed_bytes(at) - minimum[set]) * scale;
      else
        v = signed_bytes(at) * scale;
    } else {
      const uint8_t* words = codes + half * kWordBytes + parity * 4 * kPanel;
      const vi q = (vi)(load_raw<vu>(words) >> (w * 4) & 15);
      if constexpr (L::kTable)
        v = looked_up<kKind>((vu)q) * scale;
      else if constexpr (L::kMinimum || L::kZero)
        v = __builtin_convertvector(q, vf) * scale + minimum[set];
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
