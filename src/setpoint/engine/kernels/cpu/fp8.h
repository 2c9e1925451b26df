// Floating point in 8 bits, as a KV cache may hold it: a sign, an exponent, a mantissa.
#pragma once
#include "simd.h"

typedef uint8_t vb __attribute__((vector_size(SP_WIDTH)));

// A code, whose value depends on its format.
struct fp8 {
  uint8_t bits;
};

struct FP8Format {
  int32_t mantissa, bias;
  int32_t largest;       // code of the largest value; above it are infinities and NaN
  const uint16_t* bf16;  // [128] the values of the positive codes, which bf16 holds exactly
};

// A code in the format that its type names. Numbers are stored by type, so that the constants are
// known; they are read by FP8Format, so that one kernel reads both formats.
template <int kMantissa, int kBias, int kLargest>
struct FP8Code {
  uint8_t bits;

  struct Table {
    alignas(64) uint16_t bf16[128] = {};
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
      }
    }
  };
  static constexpr Table kTable{};
  static constexpr FP8Format kFormat{kMantissa, kBias, kLargest, kTable.bf16};
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
  const vi bits = __builtin_convertvector(load_raw<vb>(p), vi), size = bits & 0x7f;
  const int dropped = 23 - format.mantissa;
  const vi normal = (size << dropped) + ((127 - format.bias) << 23);
  const float least = 1.f / (float)(1 << (format.bias + format.mantissa - 1));
  const vi small = (vi)(__builtin_convertvector(size, vf) * least);
  const vi strange = ((size << dropped) & 0x7fffff) | 0x7f800000;
  const vi value = size > format.largest ? strange : (size >> format.mantissa ? normal : small);
  return (vf)(value | (bits & 0x80) << 24);
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
#endif
