// y = x Wᵀ + bias on the blocks of a GGUF file in products of integers (--quantization
// blocks_int8), for few rows: x is rounded to 8 bits, the codes of W stay as they are.
//
// Within a group, the blocks of K that share a number d in the file (and in some kinds a minimum
// m), all is integers: codes of W, codes of x, the file's factors, and the steps of x, each for a
// run of K. With a scale s of the row for the group, y is the sum over groups of
//
//   (d s) * sum over runs of factor * step * (codes of W times codes of x)
// + (m s) * sum over blocks of factor * step * (sum of the codes of x)
//
// in fp32 in the order of K, each product rounded before it is added. So a row's bits depend
// neither on its batch, as long as that has fewer than kManyRows, nor on the level.
// tests/golden/test_rounded_blocks.py says the same in numpy.
#include "blocks/rounded_blocks.h"

#include "base/buffer.h"

namespace {

constexpr int kRows = SP_WIDTH == 16 ? 8 : 4;  // of x that meet a panel at once

// Four products of unsigned codes and signed x, added to acc. kWide: codes may exceed 127.
template <bool kWide>
inline __attribute__((always_inline)) vi dot(vi acc, vu codes, int32_t x) {
#if defined(__AVX512VNNI__) && SP_WIDTH == 16
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && SP_WIDTH == 8
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, _mm256_set1_epi32(x));
#else
#if SP_WIDTH >= 8
  if constexpr (!kWide) {  // two products fit into 16 bits
#if SP_WIDTH == 16
    const vs pairs = (vs)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(x));
#else
    const vs pairs = (vs)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x));
#endif
    return acc + pair_products(pairs, vs{} + 1);
  }
#endif
  const vs bytes = (vs)(vi{} + x);
  const vus u = (vus)codes;
  return acc + pair_products((vs)(u & 0xff), bytes << 8 >> 8) +
         pair_products((vs)(u >> 8), bytes >> 8);
#endif
}

// Adds the products of M rows with a group to acc, for the W columns from `column` of the panel on.
template <int kKind, int M>
struct GroupProduct {
  typedef CodeLayout<kKind> L;
  typedef RowGroup<kKind> X;
  const X* x;
  int64_t stride;  // in groups, from one row to the next
  const uint8_t* factors;
  const uint8_t* words;
  const uint8_t* share;  // this product's half of a group that is multiplied later
  vi total[M], minimum[M];

  inline __attribute__((always_inline)) GroupProduct(const X* x, int64_t stride,
                                                     const uint8_t* group, int column,
                                                     const uint8_t* share)
      : x(x),
        stride(stride),
        factors(group + L::kNumberBytes + column),
        words(group + L::kNumberBytes + L::kFactorBytes + column * 4),
        share(share),
        total{},
        minimum{} {
    if constexpr (kKind == kQ4_K) {
#pragma GCC unroll 1
      for (int pair = 0; pair < 4; ++pair) {
        fetch<4>(pair);
        add_q4_k(pair);
      }
    } else if constexpr (kKind == kQ6_K) {
#pragma GCC unroll 1
      for (int part = 0; part < 4; ++part) {
        fetch<4>(part);
        for (int i = 0; i < 2; ++i) add_q6_k(part / 2, part % 2, i);
      }
    } else {
      fetch<1>(0);
      add_block();
    }
  }

  inline __attribute__((always_inline)) void to(const uint8_t* group, int column, vf (&acc)[M][2],
                                                int v) const {
    const vf scale = halves(group + column * 2),
             low = L::kMinimum ? halves(group + (kPanel + column) * 2) : vf{};
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const vf row = splat(x[m * stride].scale);
      vf sum = acc[m][v];
      sum =
          sum + rounded_product(rounded_product(scale, row), __builtin_convertvector(total[m], vf));
      if constexpr (L::kMinimum)
        sum = sum +
              rounded_product(rounded_product(low, row), __builtin_convertvector(minimum[m], vf));
      acc[m][v] = sum;
    }
  }

 private:
  // Brings a part of the share to the second-level cache. A core has some 20 lines on their way
  // from memory at once, so the whole share in one go would have to wait for itself.
  template <int kParts>
  inline __attribute__((always_inline)) void fetch(int part) const {
    constexpr int kLines = (L::kGroupBytes / 2 + 63) / 64, kEach = (kLines + kParts - 1) / kParts;
#pragma GCC unroll 16
    for (int line = 0; line < kEach; ++line)
      __builtin_prefetch(share + (part * kEach + line) * 64, 0, 2);
  }

  inline __attribute__((always_inline)) vu word(int i) const {
    return load_raw<vu>(words + i * kPanel * 4);
  }
  inline __attribute__((always_inline)) vi factor(int i) const {
    return integers(factors + i * kPanel);
  }

  // Two blocks, whose codes are the halves of the same bytes.
  inline __attribute__((always_inline)) void add_q4_k(int pair) {
    for (int run = 0; run < 2; ++run) {
      vi low[M] = {}, high[M] = {};
#pragma GCC unroll 4
      for (int w = 4 * run; w < 4 * run + 4; ++w) {
        const vu codes = word(pair * 8 + w), first = codes & kLow4, second = codes >> 4 & kLow4;
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          low[m] = dot<false>(low[m], first, x[m * stride].word(pair * 16 + w));
          high[m] = dot<false>(high[m], second, x[m * stride].word(pair * 16 + 8 + w));
        }
      }
      add(factor(2 * pair), 4 * pair + run, low);
      add(factor(2 * pair + 1), 4 * pair + 2 + run, high);
    }
    const vi least[] = {factor(8 + 2 * pair), factor(8 + 2 * pair + 1)};
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)  // K-quants have what is subtracted
      for (int i = 0; i < 2; ++i) minimum[m] -= least[i] * x[m * stride].sums[2 * pair + i];
  }

  // Two runs: of the four blocks of a half, whose codes share bytes, those that have the two halves
  // of the same low bits (i); `run` of the two in each.
  inline __attribute__((always_inline)) void add_q6_k(int half, int run, int i) {
    vi low[M], high[M];
    const int block = 4 * half + i, first_run = 2 * block + run, second_run = first_run + 4;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      low[m] = vi{} + x[m * stride].sums[first_run];
      high[m] = vi{} + x[m * stride].sums[second_run];
    }
#pragma GCC unroll 4
    for (int w = 4 * run; w < 4 * run + 4; ++w) {
      const vu four = word(half * 16 + i * 8 + w), two = word(32 + half * 8 + w);
      const vu first = (four & kLow4) | ((i ? two << 2 : two << 4) & kHigh2),
               second = (four >> 4 & kLow4) | ((i ? two >> 2 : two) & kHigh2);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        low[m] = dot<false>(low[m], first, x[m * stride].word(block * 8 + w));
        high[m] = dot<false>(high[m], second, x[m * stride].word((block + 2) * 8 + w));
      }
    }
    add(factor(first_run), first_run, low);
    add(factor(second_run), second_run, high);
  }

  inline __attribute__((always_inline)) void add_block() {
    vi low[M] = {}, high[M] = {};
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      const vu codes = word(w), more = L::kBits == 8 ? word(4 + w) : vu{};
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        if constexpr (L::kBits == 8) {
          low[m] = dot<true>(low[m], codes, x[m * stride].word(w));
          high[m] = dot<true>(high[m], more, x[m * stride].word(4 + w));
        } else {
          low[m] = dot<false>(low[m], codes & kLow4, x[m * stride].word(w));
          high[m] = dot<false>(high[m], codes >> 4 & kLow4, x[m * stride].word(4 + w));
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const X& row = x[m * stride];
      (L::kMinimum ? minimum : total)[m] = vi{} + row.sums[0];
      total[m] += low[m] * row.steps[0] + high[m] * row.steps[1];
    }
  }

  inline __attribute__((always_inline)) void add(vi factor, int run, const vi (&sums)[M]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) total[m] += sums[m] * (factor * x[m * stride].steps[run]);
  }
};

template <int kKind, int M>
void block_rows(const LinearCall& call, const RowGroup<kKind>* x, int64_t row, int64_t panel,
                const uint8_t* groups, int64_t num_groups) {
  typedef CodeLayout<kKind> L;
  constexpr int64_t kAhead = L::kGroup > 1 ? 2 : 16;
  x += row * num_groups;
  for (int n = 0; n < kPanel; n += kTileVectors * W) {
    vf acc[M][kTileVectors] = {};
    for (int64_t g = 0; g < num_groups; ++g) {
      const uint8_t* group = groups + g * L::kGroupBytes;
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) {
        const uint8_t* share = group + kAhead * L::kGroupBytes + v * (L::kGroupBytes / 2);
        const int column = n + v * W;
        const GroupProduct<kKind, M> product(x + g, num_groups, group, column, share);
        product.to(group, column, acc, v);
      }
    }
    store_tile<M>(call, row, panel * kPanel + n, acc);
  }
}

template <int kKind, int M = 1>
void some_rows(const LinearCall& call, const RowGroup<kKind>* x, Range rows, int64_t panel,
               const uint8_t* groups, int64_t num_groups) {
  if (rows.size() == M) return block_rows<kKind, M>(call, x, rows.begin, panel, groups, num_groups);
  if constexpr (M < kRows) some_rows<kKind, M + 1>(call, x, rows, panel, groups, num_groups);
}

// The largest code of x; a group whose largest magnitude is below kTiny counts as zeros.
constexpr float kLargest = 127.f, kTiny = 1e-30f;

// The largest magnitude of a run; infinity and NaN come after all numbers.
inline int32_t largest(const bf16* x) {
  vi top{};
  for (int i = 0; i < kRun; i += W) {
    const vi magnitude = (vi)load(x + i) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  return most_of(top);
}

inline float as_float(int32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Rounds a run to 8 bits -> the sum of its codes.
inline int32_t round_run(const bf16* x, float inverse, int8_t* codes) {
  typedef int8_t vb __attribute__((vector_size(W)));
  for (int i = 0; i < kRun; i += W)
    store_raw(codes + i, __builtin_convertvector(nearest(load(x + i) * inverse), vb));
  int32_t sum = 0;
  for (int i = 0; i < kRun; ++i) sum += codes[i];
  return sum;
}

template <int kKind>
void round_group(const bf16* x, RowGroup<kKind>& to) {
  typedef CodeLayout<kKind> L;
  typedef RowGroup<kKind> X;
  int32_t tops[X::kRuns], top = 0;
  for (int r = 0; r < X::kRuns; ++r) {
    tops[r] = largest(x + r * kRun);
    top = tops[r] > top ? tops[r] : top;
  }
  const bool is_finite = top < 0x7f800000, is_used = is_finite && as_float(top) >= kTiny;
  const float most = is_used ? as_float(top) : 0.f, steps_of = is_used ? X::kSteps / most : 0.f;
  to.scale = is_finite ? most / (kLargest * X::kSteps) : __builtin_nanf("");
  if constexpr (kKind != kQ6_K) __builtin_memset(to.sums, 0, sizeof(to.sums));
  for (int r = 0; r < X::kRuns; ++r) {
    const float exact = is_used ? as_float(tops[r]) * steps_of : 0.f;
    int32_t step = (int32_t)exact, sum = 0;
    step += step < exact && step < X::kSteps;  // upwards, but that a rounding may exceed kSteps
    int8_t* codes = to.codes + r * kRun;
    if (step)
      sum = round_run(x + r * kRun, 1.f / (step * to.scale), codes);
    else
      __builtin_memset(codes, 0, kRun);
    to.steps[r] = step;
    if constexpr (kKind == kQ6_K)
      to.sums[r] = -L::kOffset * sum;
    else
      to.sums[r / 2] += (L::kMinimum ? 1 : -L::kOffset) * sum * step;
  }
}

template <int kKind>
void linear(const LinearCall& call) {
  typedef CodeLayout<kKind> L;
  typedef RowGroup<kKind> X;
  thread_local Buffer scratch;
  const int64_t k = call.k_words * 2, num_groups = k / (L::kGroup * kBlock);
  X* x = (X*)scratch.at_least(call.rows * num_groups * sizeof(X));
  for_rows(call.rows, k, call.threads, [=, &call](int64_t row) {
    for (int64_t g = 0; g < num_groups; ++g)
      round_group<kKind>((const bf16*)call.x + row * k + g * L::kGroup * kBlock,
                         x[row * num_groups + g]);
  });
  const auto multiply = [=, &call](int, int64_t panel, Range rows, bool) {
    const uint8_t* groups = (const uint8_t*)call.weight + panel * num_groups * L::kGroupBytes;
    const int64_t tiles = (rows.size() + kRows - 1) / kRows;
    for (int64_t t = 0; t < tiles; ++t)
      some_rows<kKind>(call, x, rows.part(t, tiles), panel, groups, num_groups);
  };
  const auto make = [](int) { return 0; };
  call.gate == kNoGate ? for_panels(call, make, multiply)
                       : for_panels(GatedLinearCall(call), make, multiply);
}

// Code k of block b of a group, without the offset.
template <int kKind>
inline int code_at(const uint8_t* words, int column, int b, int k) {
  const auto byte = [=](int first, int i) -> int {
    return words[((first + i / 4) * kPanel + column) * 4 + i % 4];
  };
  if constexpr (kKind == kQ8_0) return byte(0, k);
  if constexpr (kKind == kQ4_K) return byte(b / 2 * 8, k) >> b % 2 * 4 & 15;
  if constexpr (kKind == kQ6_K)
    return (byte(b / 4 * 16 + b % 2 * 8, k) >> b % 4 / 2 * 4 & 15) |
           (byte(32 + b / 4 * 8, k) >> b % 4 * 2 & 3) << 4;
  return byte(0, k % 16) >> k / 16 * 4 & 15;
}

template <int kKind>
void read_row(const uint8_t* weight, int64_t row, int64_t blocks, bf16* out) {
  typedef CodeLayout<kKind> L;
  const int column = row % kPanel;
  const int64_t groups = blocks / L::kGroup;
  const uint8_t* group = weight + row / kPanel * groups * L::kGroupBytes;
  for (int64_t g = 0; g < groups; ++g, group += L::kGroupBytes) {
    const uint8_t *factors = group + L::kNumberBytes, *words = factors + L::kFactorBytes;
    const auto number = [=](int i, int factor) {
      const float own = half(group + (i * kPanel + column) * 2);
      return L::kFactors ? own * (int8_t)factors[factor * kPanel + column] : own;
    };
    for (int b = 0; b < L::kGroup; ++b)
      for (int k = 0; k < kBlock; ++k) {
        const float scale = number(0, b * L::kSets + k / 16 * (L::kSets - 1));
        float value = scale * (code_at<kKind>(words, column, b, k) - L::kOffset);
        if constexpr (L::kMinimum) {
          const float minimum = number(1, L::kScales + b);
          value += L::kFactors ? -minimum : minimum;
        }
        uint32_t bits;
        __builtin_memcpy(&bits, &value, 4);
        *out++ = {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
      }
  }
}

// One group of a row of the file to its column of a panel.
template <int kKind>
void pack_group(const uint8_t* row, int64_t g, int column, uint8_t* to) {
  typedef CodeLayout<kKind> L;
  const uint8_t* codes = row + g * L::kFileBytes + L::kFileCodes;
  uint8_t *factors = to + L::kNumberBytes, *words = factors + L::kFactorBytes;
  for (int b = 0; b < L::kGroup; ++b) {
    const RawBlock<kKind> raw(row, g * L::kGroup + b);
    if (b == 0)
      for (int i = 0; i < (L::kMinimum ? 2 : 1); ++i)
        __builtin_memcpy(to + (i * kPanel + column) * 2, raw.numbers + 2 * i, 2);
    if constexpr (L::kFactors) {
      for (int i = 0; i < L::kSets; ++i)
        factors[(b * L::kSets + i) * kPanel + column] = raw.factors[i];
      if constexpr (L::kMinimum) factors[(L::kScales + b) * kPanel + column] = raw.factors[1];
    }
  }
  for (int i = 0; i < L::kWords; ++i) {
    const uint32_t word = load_raw<uint32_t>(codes + 4 * i) ^ (L::kBits == 8 ? 0x80808080u : 0);
    __builtin_memcpy(words + (i * kPanel + column) * 4, &word, 4);
  }
}

template <int kKind>
void pack(const uint8_t* raw, int64_t rows, int64_t blocks, uint8_t* to, bool gated, int threads) {
  typedef CodeLayout<kKind> L;
  const int64_t groups = blocks / L::kGroup, row_bytes = groups * L::kFileBytes;
  const auto pack_panel = [&](int, int64_t panel) {
    uint8_t* panel_at = to + panel * groups * L::kGroupBytes;
    int64_t rows_in[kPanel];
    bool is_full = true;
    for (int column = 0; column < kPanel; ++column) {
      rows_in[column] = row_in(panel * kPanel + column, rows, gated);
      is_full &= rows_in[column] >= 0;
    }
    if (!is_full) __builtin_memset(panel_at, 0, groups * L::kGroupBytes);
    for (int64_t g = 0; g < groups; ++g)  // it stays in the first-level cache
      for (int column = 0; column < kPanel; ++column)
        if (rows_in[column] >= 0)
          pack_group<kKind>(raw + rows_in[column] * row_bytes, g, column,
                            panel_at + g * L::kGroupBytes);
  };
  const int64_t outputs = gated ? rows / 2 : rows, of_panel = gated ? kPanel / 2 : kPanel;
  for_units((outputs + of_panel - 1) / of_panel, threads, [](int) { return 0; }, pack_panel);
}

}  // namespace

// call.weight: packed by setpoint_pack_rounded_blocks; x, bias and out in bf16.
void linear_on_rounded_blocks(const LinearCall& call) {
  if (call.rows >= kManyRows) return linear_on_rotated_blocks(call);
  with_kind(call.blocks, [&](auto kind) { linear<kind>(call); });
}

extern "C" {

// As setpoint_pack_blocks and setpoint_block_rows, in the layout of rounded_blocks.h.
void setpoint_pack_rounded_blocks(const uint8_t* raw, int64_t rows, int64_t blocks, uint8_t* to,
                                  int32_t kind, int32_t gated, int32_t threads) {
  with_kind(kind, [=](auto kind) { pack<kind>(raw, rows, blocks, to, gated, threads); });
}

void setpoint_rounded_block_rows(const BlockRowsCall* call) {
  look_up(*call, [=](int64_t id, bf16* to) {
    with_kind(call->kind, [=](auto kind) { read_row<kind>(call->weight, id, call->blocks, to); });
  });
}
}
