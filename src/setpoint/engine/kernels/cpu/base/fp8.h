// Floating point in 8 bits, as a KV cache may hold it: a sign, an exponent, a mantissa.
#pragma once
#include "base/simd.h"

typedef uint8_t vb __attribute__((vector_size(SP_WIDTH)));

// A code, whose value depends on its format.
struct fp8 {
  uint8_t bits;
};

struct FP8Format {
  int32_t mantissa, bias;
  int32_t largest;            // code of the largest value; above it are infinities and NaN
  const uint16_t* bf16;       // [128] the values of the positive codes, which bf16 holds exactly
  const uint8_t *low, *high;  // [128] their bytes
};

// A code in the format that its type names. Numbers are stored by type, so that the constants are
// known; they are read by FP8Format, so that one kernel reads both formats.
template <int kMantissa, int kBias, int kLargest>
struct FP8Code {
  uint8_t bits;

  struct Table {
    alignas(64) uint16_t bf16[128] = {};
    alignas(64) uint8_t low[128] = {}, high[128] = {};
    constexpr Table() {
      for (int code = 0; code < 128; ++code) {
        if (code > kLargest) {
          bf16[code] = 0x7f80 | (code & ((1 << kMantissa) - 1)) << (7 - kMantissa);
        } else if (code >= 1 << kMantissa) {
          bf16[code] = (code << (7 - kMantissa)) + ((127 - kBias) << 7);
        } else if (code) {
          int power = 0;  // code has its highest bit there
          while (code >> (power + 1)) ++power;
          bf16[code] = ((128 - kBias - kMantissa + power) << 7) | ((code << (7 - power)) & 0x7f);
        }
        low[code] = bf16[code] & 0xff;
        high[code] = bf16[code] >> 8;
      }
    }
  };
  static constexpr Table kTable{};
  static constexpr FP8Format kFormat{kMantissa,   kBias,      kLargest,
                                     kTable.bf16, kTable.low, kTable.high};
};
typedef FP8Code<3, 7, 0x7e> e4m3;   // torch.float8_e4m3fn: up to 448, no infinity
typedef FP8Code<2, 15, 0x7b> e5m2;  // torch.float8_e5m2: up to 57344

// Round to nearest even; beyond the largest value, infinity included, that one; NaN stays NaN.
template <int kMantissa, int kBias, int kLargest>
static inline void store(FP8Code<kMantissa, kBias, kLargest>* p, vf v) {
  constexpr int kDropped = 23 - kMantissa;  // bits of a mantissa in fp32
  const vi bits = (vi)v, size = bits & 0x7fffffff;
  const vi odd = (size >> kDropped) & 1;
  const vi normal =
      ((size + ((1 << (kDropped - 1)) - 1) + odd) >> kDropped) - ((127 - kBias) << kMantissa);
  // Added to this, a number is rounded to a multiple of the least value, and the lowest bits of the
  // sum count them.
  const vf shift = splat(1 << (24 - kBias - kMantissa));
  const vi small = (vi)((vf)size + shift) - (vi)shift;
  vi code = size >= (128 - kBias) << 23 ? normal : small;
  code = code > kLargest ? vi{} + kLargest : code;
  code = size > 0x7f800000 ? vi{} + 0x7f : code;
  store_raw(p, __builtin_convertvector(code | ((bits >> 24) & 0x80), vb));
}

static inline vf load(const FP8Format& format, const fp8* p) {
#if SP_WIDTH == 16 || defined(__F16C__)
  // Shifted, an e5m2 is an fp16, and an e4m3 a 256th of its value.
  typedef int16_t vs __attribute__((vector_size(SP_WIDTH * 2)));
  const int16_t excess = format.mantissa - 2, nan = 0x7f00 >> excess,
                keep = excess ? 0xbfff : 0xffff;  // the sign is shifted in twice
  vs half = (vs)(__builtin_convertvector(load_raw<vb>(p), vh) << 8) >> excess & keep;
  half |= (half & 0x7fff) == nan;
#if SP_WIDTH == 16
  const vf value = (vf)_mm512_cvtph_ps((__m256i)half);
#else
  const vf value = (vf)_mm256_cvtph_ps((__m128i)half);
#endif
  return value * (float)(1 << 8 * excess);
#else
  const vi bits = __builtin_convertvector(load_raw<vb>(p), vi), size = bits & 0x7f;
  const int dropped = 23 - format.mantissa;
  const vi normal = (size << dropped) + ((127 - format.bias) << 23);
  const float least = 1.f / (float)(1 << (format.bias + format.mantissa - 1));
  const vi small = (vi)(__builtin_convertvector(size, vf) * least);
  const vi strange = ((size << dropped) & 0x7fffff) | 0x7f800000;
  const vi value = size > format.largest ? strange : (size >> format.mantissa ? normal : small);
  return (vf)(value | (bits & 0x80) << 24);
#endif
}

#if defined(__AVX512BF16__) && SP_WIDTH == 16
// 32 codes, each in 16 bits, to bf16.
inline __attribute__((always_inline)) vf to_bf16(const FP8Format& format, __m512i codes) {
  const __m512i* table = (const __m512i*)format.bf16;
  // The permutation reads six bits of an index: which half of the table, the next bit says.
  const __m512i low = _mm512_permutex2var_epi16(table[0], codes, table[1]),
                high = _mm512_permutex2var_epi16(table[2], codes, table[3]);
  const __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
  const __m512i sizes = _mm512_mask_blend_epi16(upper, low, high);
  const __m512i signs = _mm512_slli_epi16(codes, 8);
  return (vf)_mm512_ternarylogic_epi32(sizes, signs, _mm512_set1_epi16((short)0x8000),
                                       0xf8);  // sizes | (signs & 0x8000)
}

#ifdef __AVX512VBMI__
// The low and the high bytes of 64 codes as bf16.
struct BF16Bytes {
  __m512i low, high;
  inline __attribute__((always_inline)) BF16Bytes(const FP8Format& format, __m512i codes) {
    auto find = [=](const uint8_t* table) __attribute__((always_inline)) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes,
                                      _mm512_load_si512(table + 64));
    };
    low = find(format.low);
    high = _mm512_ternarylogic_epi32(find(format.high), codes, _mm512_set1_epi8((char)0x80),
                                     0xf8);  // high | (codes & 0x80)
  }
};

// Which bytes of BF16Bytes make the words of the codes 0 and 1, or 2 and 3, of every four.
struct PairOrder {
  alignas(64) uint8_t bytes[2][64] = {};
  constexpr PairOrder() {
    for (int pair = 0; pair < 2; ++pair)
      for (int i = 0; i < 64; ++i)  // 64 and above: of the high bytes
        bytes[pair][i] = i / 4 * 4 + 2 * pair + i % 4 / 2 + i % 2 * 64;
  }
};
constexpr PairOrder kPairOrder{};

// 32 codes of each of 16 rows as words of bf16, turned: square[k] has word k of all rows.
inline __attribute__((always_inline)) void turn_codes(const FP8Format& format,
                                                      const fp8* const* rows, int64_t begin,
                                                      vf (&square)[16]) {
  __m512i r[8], t[8];  // rows i and i + 8 side by side; four codes are an element
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load_raw<__m256i>(rows[i] + begin)),
                              load_raw<__m256i>(rows[i + 8] + begin), 1);
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // 4 x 4 squares inside the 128-bit lanes
    const __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]),
                  b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]),
                  d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c);
    t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d);
    t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  const __m512i first = _mm512_load_si512(kPairOrder.bytes[0]),
                second = _mm512_load_si512(kPairOrder.bytes[1]);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // codes 4 i ... 4 i + 3 of all rows
    const BF16Bytes bytes(format,
                          _mm512_permutex2var_epi64(t[i % 4], i < 4 ? even : odd, t[4 + i % 4]));
    square[2 * i] = (vf)_mm512_permutex2var_epi8(bytes.low, first, bytes.high);
    square[2 * i + 1] = (vf)_mm512_permutex2var_epi8(bytes.low, second, bytes.high);
  }
}

// Vector i of four of words: element j is code 16 i + j of two rows of 64 codes. The four share
// what they have in common.
inline __attribute__((always_inline)) vf interleaved(const FP8Format& format, const fp8* a,
                                                     const fp8* b, int i) {
  // A lane gets four neighbouring codes of each vector.
  const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i x = _mm512_permutexvar_epi32(turn, load_raw<__m512i>(a)),
                y = _mm512_permutexvar_epi32(turn, load_raw<__m512i>(b));
  const BF16Bytes bytes(format, i < 2 ? _mm512_unpacklo_epi8(x, y) : _mm512_unpackhi_epi8(x, y));
  return (vf)(i % 2 ? _mm512_unpackhi_epi8(bytes.low, bytes.high)
                    : _mm512_unpacklo_epi8(bytes.low, bytes.high));
}
#endif
#endif
