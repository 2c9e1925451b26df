// Vectors of integers, for products of bytes.
#pragma once
#include "base/simd.h"

namespace {

typedef int16_t vs __attribute__((vector_size(W * 4)));
typedef uint16_t vus __attribute__((vector_size(W * 4)));

// Products of int16 neighbours, added in pairs.
inline vi pair_products(vs a, vs b) {
#if SP_WIDTH == 16
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif SP_WIDTH == 8
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((vi)a << 16 >> 16) * ((vi)b << 16 >> 16) + ((vi)a >> 16) * ((vi)b >> 16);
#endif
}

// Rounds to the nearest integer, halves to even; |v| is small.
inline vi nearest(vf v) {
#if SP_WIDTH == 16
  return (vi)_mm512_cvtps_epi32((__m512)v);
#elif SP_WIDTH == 8
  return (vi)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
  return (vi)_mm_cvtps_epi32((__m128)v);
#else
  vi rounded;
  for (int i = 0; i < W; ++i) rounded[i] = (int32_t)__builtin_rintf(v[i]);
  return rounded;
#endif
}

inline int32_t most_of(vi v) {
#if SP_WIDTH == 16
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t most = v[0];
  for (int i = 1; i < W; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// a * b / 2^15, rounded to the nearest integer, halves upwards.
inline __attribute__((always_inline)) vs rounded_shares(vs a, vs b) {
#if SP_WIDTH == 16
  return (vs)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#elif SP_WIDTH == 8
  return (vs)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b);
#else
  const vi low = ((vi)a << 16 >> 16) * ((vi)b << 16 >> 16), high = ((vi)a >> 16) * ((vi)b >> 16);
  return (vs)(((low + 0x4000) >> 15 & 0xffff) | (high + 0x4000) >> 15 << 16);
#endif
}

// Larger and smaller ones of int16.
inline __attribute__((always_inline)) vs larger(vs a, vs b) {
#if SP_WIDTH == 16
  return (vs)_mm512_max_epi16((__m512i)a, (__m512i)b);
#elif SP_WIDTH == 8
  return (vs)_mm256_max_epi16((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}
inline __attribute__((always_inline)) vs smaller(vs a, vs b) {
#if SP_WIDTH == 16
  return (vs)_mm512_min_epi16((__m512i)a, (__m512i)b);
#elif SP_WIDTH == 8
  return (vs)_mm256_min_epi16((__m256i)a, (__m256i)b);
#else
  return a < b ? a : b;
#endif
}

}  // namespace
