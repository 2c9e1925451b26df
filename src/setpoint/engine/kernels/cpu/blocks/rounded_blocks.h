// The layout of a GGUF file's blocks for products of integers, and of the rows that they meet.
//
// The instructions that multiply bytes want four neighbours in K of one column in a word. That is
// how a file's blocks have them, so a panel is its columns' blocks, word by word side by side.
#pragma once
#include <type_traits>

#include "products/gated.h"
#include "base/integers.h"
#include "blocks/raw_blocks.h"

namespace {

// A panel in memory is a row of groups, each of the kGroup blocks of K that share numbers:
//
//   [kPanel] fp16 scales, for kinds with a minimum [kPanel] fp16 minimums,
//   in K-quants: [kGroup * kSets][kPanel] int8 factors of the scales, then for kinds with a minimum
//   [kGroup][kPanel] those of the minimums,
//   [kWords][kPanel] words: the file's codes; those of 8 bits plus 128.
//
// kOffset is what is subtracted from the codes, which count as unsigned.
template <int kKind>
struct CodeLayout {
  typedef Layout<kKind> L;
  static constexpr bool kMinimum = L::kMinimum, kFactors = L::kFactors;
  static constexpr int kBits = L::kBits, kGroup = L::kGroup, kSets = L::kSets;
  static constexpr int kScales = kGroup * kSets;  // runs of K with a factor of their own
  static constexpr int kOffset = kMinimum ? 0 : 1 << (kBits - 1);
  static constexpr int kNumberBytes = L::kNumberBytes,
                       kFactorBytes = kFactors ? kPanel * (kScales + (kMinimum ? kGroup : 0)) : 0,
                       kWords = kGroup * kBlock * kBits / 32,
                       kGroupBytes = kNumberBytes + kFactorBytes + kWords * kPanel * 4;
  static_assert(kGroupBytes == L::kGroupBytes);

  static constexpr int kFileBytes = RawBlock<kKind>::kBytes;  // of a group
  // Where a group has its codes in a file.
  static constexpr int kFileCodes = kKind == kQ6_K   ? 0
                                    : kKind == kQ4_K ? 16
                                                     : kNumberBytes / kPanel;
};

// From so many rows on the codes are rounded, too (rotated_blocks.cpp): that is faster for kinds
// that scale sums after each 32 neighbours, and no slower for the others.
constexpr int kManyRows = 24;

constexpr int kRun = 16;  // neighbours of a row of x that share a step

// A group of K of a row of x. The numbers of run r are about codes * steps[r] * scale.
template <int kKind>
struct RowGroup {
  typedef CodeLayout<kKind> L;
  static constexpr int kRuns = L::kGroup * kBlock / kRun;
  // Largest step. The sums of a group fit into 32 bits: in Q6_K 16 * 16 * 127 * 32 * 128 * 15.
  static constexpr int kSteps = 15;

  int8_t codes[kRuns * kRun];
  int32_t steps[kRuns];
  // In kinds with a minimum: of each block, the sum of codes times steps. In Q6_K: of each run, the
  // sum of its codes, times -kOffset. In others: of the block, that of codes times steps, times
  // -kOffset.
  int32_t sums[kKind == kQ6_K ? kRuns : L::kGroup];
  float scale;

  inline int32_t word(int i) const { return load_raw<int32_t>(codes + 4 * i); }
};

constexpr uint32_t kLow4 = 0x0f0f0f0f, kHigh2 = 0x30303030;

// W signed bytes as integers.
inline __attribute__((always_inline)) vi integers(const uint8_t* p) {
#if SP_WIDTH == 16
  return (vi)_mm512_cvtepi8_epi32(load_raw<__m128i>(p));
#elif SP_WIDTH == 8
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  typedef int8_t bytes __attribute__((vector_size(W)));
  typedef int16_t shorts __attribute__((vector_size(2 * W)));
  return __builtin_convertvector(__builtin_convertvector(load_raw<bytes>(p), shorts), vi);
#endif
}

// The product, rounded: the compiler may not make a multiply-add of it.
inline __attribute__((always_inline)) vf rounded_product(vf a, vf b) {
  vf product = a * b;
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#else
  asm("" : "+w"(product));
#endif
  return product;
}

// One code for a plain and for a gated product, up to here.
template <int M>
__attribute__((noinline)) void store_tile(const LinearCall& call, int64_t row, int64_t at,
                                          const vf (&acc)[M][kTileVectors]) {
  call.gate == kNoGate ? store_sums<bf16>(call, row, at, acc)
                       : store_sums<bf16>(GatedLinearCall(call), row, at, acc);
}

// Calls body with the kind as a constant.
template <class Body>
void with_kind(int32_t kind, const Body& body) {
  switch (kind) {
    case kQ4_0:
      return body(std::integral_constant<int, kQ4_0>());
    case kQ4_1:
      return body(std::integral_constant<int, kQ4_1>());
    case kQ8_0:
      return body(std::integral_constant<int, kQ8_0>());
    case kQ4_K:
      return body(std::integral_constant<int, kQ4_K>());
    case kQ6_K:
      return body(std::integral_constant<int, kQ6_K>());
  }
}

}  // namespace
