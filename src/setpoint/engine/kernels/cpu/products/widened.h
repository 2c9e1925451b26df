// Products of bf16 by multiply-adds of fp32, for rows of x that were widened to fp32 before: their
// elements are then broadcast from memory, which needs no unit that multiplies or shuffles. On some
// processors this is twice as fast as the instruction for bf16 pairs; the bits are the same.
#pragma once
#include "base/buffer.h"
#include "products/panels.h"

struct WidenedPair {
  float low, high;
};

// MulBF16 on widened pairs.
struct MulWidened {
  typedef WidenedPair word;
  typedef uint32_t packed;
  struct vec {
    vf low, high;
  };
  typedef vf sum;
  static inline vec load_vec(const packed* b) {
    const vu pairs = load_raw<vu>(b);
    return {(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)};
  }
#if defined(__AVX512BF16__) && SP_WIDTH == 16
  // The order of vdpbf16ps (Intel's manual, VDPBF16PS): the upper products first, each added with
  // one rounding.
  static inline vf step(vf acc, const word& a, const vec& b) {
    return fma(splat(a.low), b.low, fma(splat(a.high), b.high, acc));
  }
#else
  static inline vf step(vf acc, const word& a, const vec& b) {
    return splat(a.high) * b.high + (splat(a.low) * b.low + acc);
  }
#endif
};

#if defined(__AVX512BF16__) && SP_WIDTH == 16
// vdpbf16ps takes subnormal numbers for zeros, in its operands and in its results; so do these
// multiply-adds.
template <>
class SumMode<MulWidened> {
 public:
  SumMode() : before_(_mm_getcsr()) {
    const unsigned flushing = before_ | 0x8040;
    asm volatile("ldmxcsr %0" ::"m"(flushing) : "memory");
  }
  template <int M, int N>
  inline __attribute__((always_inline)) void end(vf (&sums)[M][N]) const {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) asm volatile("" : "+v"(sums[m][n]));
    asm volatile("ldmxcsr %0" ::"m"(before_) : "memory");
  }

 private:
  const unsigned before_;
};
#endif

inline void widen(const bf16* x, int64_t words, WidenedPair* to) {
  for (int64_t i = 0; i < words; ++i) {
    uint32_t low = (uint32_t)x[2 * i].bits << 16, high = (uint32_t)x[2 * i + 1].bits << 16;
    __builtin_memcpy(&to[i].low, &low, 4);
    __builtin_memcpy(&to[i].high, &high, 4);
  }
}

// Calls body(part, x) for batches of the rows of a call that stay in the L2 cache when they are
// widened. part: the call for these rows alone; x: the same rows, widened.
template <class Body>
inline void in_widened_batches(const LinearCall& call, const Body& body) {
  thread_local Buffer buffer;
  const int64_t row_bytes = call.k_words * (int64_t)sizeof(WidenedPair);
  const int64_t fitting = kBatchBytes / row_bytes > kUnitRows ? kBatchBytes / row_bytes : kUnitRows;
  const int64_t batches = (call.rows + fitting - 1) / fitting;
  for (int64_t batch = 0; batch < batches; ++batch) {
    const Range rows = Range{0, call.rows}.part(batch, batches);
    WidenedPair* widened = (WidenedPair*)buffer.at_least(rows.size() * row_bytes);
    LinearCall part = call;
    part.x = (const bf16*)call.x + rows.begin * call.k_words * 2;
    part.out = (bf16*)call.out + rows.begin * call.out_row;
    part.rows = rows.size();
    for_rows(part.rows, call.k_words * 2, call.threads, [&](int64_t row) {
      widen((const bf16*)part.x + row * call.k_words * 2, call.k_words,
            widened + row * call.k_words);
    });
    body(part, widened);
  }
}
