// Blocks as a GGUF file stores them
// (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h), and those that are made of a
// quantised folder's tensors (engine/quant/block_rows.py), read out one by one.
#pragma once
#include "blocks/blocks.h"
#include "base/fp8.h"

namespace {

// Where a panel has `count` bits of a code of fewer than 8, from bit `low` of it on: in word
// `word`, from bit `shift`.
struct Field {
  int word, shift, low, count;
};

// Of code k, the first or second of two. Only a code of 6 bits has a second.
template <int kBits>
inline Field field_of(int k, int i) {
  const int half = k / 16, s = k % 16 / 2;
  if (kBits == 4) return {half, 4 * s, 0, i ? 0 : 4};
  if (s < 5) return {half, 6 * s, 0, i ? 0 : 6};
  if (s < 7) return {2, 16 * half + 6 * (s - 5), 0, i ? 0 : 6};
  return i ? Field{2, 16 * half + 12, 2, 4} : Field{half, 30, 0, 2};
}

// The low 4 bits of bytes 0, 2, 4 and 6, side by side: the product puts byte 2 i at bit 48 + 4 i,
// and no other term reaches these bits.
inline uint32_t nibbles(uint64_t bytes) {
  return (bytes & 0x000f000f000f000f) * 0x0001001001001000 >> 48;
}

template <class L>
inline void put_codes(uint8_t* to, int column, const uint8_t (&codes)[kBlock]) {
  if constexpr (L::kBits == 8) {
    for (int k = 0; k < kBlock; ++k) to[k / 2 * 2 * kPanel + place(column, k % 2)] = codes[k];
  } else if constexpr (L::kBits == 4) {
    for (int i = 0; i < 2; ++i)
      for (int parity = 0; parity < 2; ++parity) {
        const auto part = [&](int n) {
          return nibbles(load_raw<uint64_t>(codes + 16 * i + 8 * n) >> 8 * parity);
        };
        const uint32_t word = part(0) | part(1) << 16;
        __builtin_memcpy(to + (i * 2 * kPanel + place(column, parity)) * 4, &word, 4);
      }
  } else {
    uint32_t words[L::kBits / 2][2] = {};
#pragma GCC unroll 32
    for (int k = 0; k < kBlock; ++k)
      for (int i = 0; i < (L::kBits == 6 ? 2 : 1); ++i) {
        const Field field = field_of<L::kBits>(k, i);
        const uint32_t bits = codes[k] >> field.low & ((1 << field.count) - 1);
        words[field.word][k % 2] |= bits << field.shift;
      }
    for (int i = 0; i < L::kBits / 2; ++i)
      for (int parity = 0; parity < 2; ++parity)
        __builtin_memcpy(to + (i * 2 * kPanel + place(column, parity)) * 4, &words[i][parity], 4);
  }
}

inline float e4m3_value(uint8_t code) {
  const uint32_t bits = (uint32_t)e4m3::kTable.bf16[code & 0x7f] << 16 | (code & 0x80u) << 24;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// What is multiplied by the scale.
template <int kKind, class L = Layout<kKind>>
inline float code_of(const uint8_t* codes, int column, int k) {
  if constexpr (L::kBits == 8) {
    const uint8_t code = codes[k / 2 * 2 * kPanel + place(column, k % 2)];
    return kKind == kFP8 ? e4m3_value(code) : (float)(int8_t)code;
  } else {
    int code = 0;
    for (int i = 0; i < 2; ++i) {
      const Field field = field_of<L::kBits>(k, i);
      const uint8_t* at = codes + (field.word * 2 * kPanel + place(column, k % 2)) * 4;
      code |= (load_raw<uint32_t>(at) >> field.shift & ((1 << field.count) - 1)) << field.low;
    }
    if constexpr (L::kTable) return kKind == kMXFP4 ? kE2M1[code] : kIQ4[code];
    return L::kMinimum || L::kZero ? code : code - (1 << (L::kBits - 1));
  }
}

// Block b of a row of a file, in the parts that a panel has.
template <int kKind>
struct RawBlock {
  typedef Layout<kKind> L;
  static constexpr int kHeadBytes = L::kNumberBytes / kPanel;
  // Of a group, in a file.
  static constexpr int kBytes = kKind == kQ2_K     ? 84
                                : kKind == kQ3_K   ? 110
                                : kKind == kQ4_K   ? 144
                                : kKind == kQ5_K   ? 176
                                : kKind == kQ6_K   ? 210
                                : kKind == kIQ4_XS ? 136
                                : kKind == kQ5_0   ? 22
                                : kKind == kQ5_1   ? 24
                                                   : kHeadBytes + L::kZero + kBlock * L::kBits / 8;

  const uint8_t* numbers;  // of the scale, of the minimum
  int8_t factors[4];
  uint8_t codes[kBlock];

  RawBlock(const uint8_t* row, int64_t b) : numbers(row + b / L::kGroup * kBytes) {
    const int of_group = b % L::kGroup;
    if constexpr (kKind == kQ2_K) {
      read_q2_k(of_group);
    } else if constexpr (kKind == kQ3_K) {
      read_q3_k(of_group);
    } else if constexpr (kKind == kQ4_K) {
      read_q4_k(of_group);
    } else if constexpr (kKind == kQ5_K) {
      read_q5_k(of_group);
    } else if constexpr (kKind == kQ6_K) {
      read_q6_k(of_group);
    } else if constexpr (kKind == kIQ4_XS) {
      read_iq4_xs(of_group);
    } else if constexpr (is_one_of<kKind, kQ5_0, kQ5_1>) {
      read_q5();
    } else {
      const uint8_t* raw = numbers + kHeadBytes;
      if constexpr (L::kZero) factors[0] = *raw++;
      for (int k = 0; k < kBlock; ++k)
        codes[k] = L::kBits == 8 ? raw[k] : raw[k % 16] >> (k / 16 * 4) & 15;
    }
  }

 private:
  // The fifth bits of 32 codes, then their low 4 bits.
  void read_q5() {
    const uint8_t* low = numbers + kHeadBytes + 4;
    const uint32_t high = load_raw<uint32_t>(numbers + kHeadBytes);
    for (int k = 0; k < kBlock; ++k)
      codes[k] =
          (low[k % 16] >> (k / 16 * 4) & 15) + (high >> k & 1) * 16 + (kKind == kQ5_0 ? 16 : 0);
  }

  // For every 16 codes a byte with the factors of the scale and of the minimum, codes of 2 bits of
  // four blocks in 32 bytes, d and that of the minimum.
  void read_q2_k(int b) {
    const uint8_t *raw = numbers, *low = raw + 16 + b / 4 * 32;
    numbers += 80;
    for (int i = 0; i < 2; ++i) {
      factors[i] = raw[2 * b + i] & 15;
      factors[2 + i] = raw[2 * b + i] >> 4;
    }
    for (int k = 0; k < kBlock; ++k) codes[k] = low[k] >> (b % 4 * 2) & 3;
  }

  // The third bits of all codes, those of a block in the same bit of 32 bytes; the low 2 bits, as
  // in Q2_K; 16 factors of 6 bits, in two parts; d. A code without its third bit is 4 less.
  void read_q3_k(int b) {
    const uint8_t *raw = numbers, *low = raw + 32 + b / 4 * 32, *six = raw + 96;
    numbers += 108;
    for (int i = 0; i < 2; ++i) {
      const int j = 2 * b + i, four = j < 8 ? six[j] & 15 : six[j - 8] >> 4;
      factors[i] = (four | (six[8 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32;
    }
    for (int k = 0; k < kBlock; ++k)
      codes[k] = (low[k] >> (b % 4 * 2) & 3) + (raw[k] >> b & 1) * 4 + 4;
  }

  // d, 2 high bits and 4 low bits of a factor for each block, codes of 4 bits.
  void read_iq4_xs(int b) {
    const uint8_t *four = numbers + 4, *low = numbers + 8 + b * 16;
    const int high = load_raw<uint16_t>(numbers + 2) >> 2 * b & 3;
    factors[0] = (four[b / 2] >> (b % 2 * 4) & 15) + high * 16 - 32;
    for (int k = 0; k < kBlock; ++k) codes[k] = low[k % 16] >> (k / 16 * 4) & 15;
  }

  // d and that of the minimum, which is subtracted; 6 bits of both factors for each of 8 blocks,
  // those of the last four blocks in two parts; codes of two blocks in the halves of 32 bytes.
  void read_q4_k(int b) {
    const uint8_t* low = numbers + 16 + b / 2 * 32;
    read_factors(b);
    for (int k = 0; k < kBlock; ++k) codes[k] = low[k] >> (b % 2 * 4) & 15;
  }

  // As Q4_K, with the fifth bits of all codes before the low ones: those of a block in the same bit
  // of 32 bytes.
  void read_q5_k(int b) {
    const uint8_t *high = numbers + 16, *low = high + 32 + b / 2 * 32;
    read_factors(b);
    for (int k = 0; k < kBlock; ++k)
      codes[k] = (low[k] >> (b % 2 * 4) & 15) | (high[k] >> b & 1) << 4;
  }

  void read_factors(int b) {
    const uint8_t* six = numbers + 4;
    factors[0] = b < 4 ? six[b] & 63 : (six[b + 4] & 15) | six[b - 4] >> 6 << 4;
    factors[1] = b < 4 ? six[b + 4] & 63 : six[b + 4] >> 4 | six[b] >> 6 << 4;
  }

  // The low 4 bits of 256 codes, their high 2 bits, a factor for every 16 codes, d. A half of 128
  // codes is 4 blocks: blocks 0 and 2 (1 and 3) in the halves of the same 32 bytes, the high bits
  // of all four in those of 32 bytes.
  void read_q6_k(int b) {
    const uint8_t* raw = numbers;
    numbers += 208;
    const int part = b / 4, of_part = b % 4;
    const uint8_t *low = raw + part * 64 + of_part % 2 * 32, *high = raw + 128 + part * 32;
    for (int k = 0; k < kBlock; ++k) {
      const int q = (low[k] >> (of_part / 2 * 4) & 15) | (high[k] >> (of_part * 2) & 3) << 4;
      codes[k] = q;
    }
    for (int i = 0; i < 2; ++i) factors[i] = (int8_t)raw[192 + 2 * b + i];
  }
};

// The row of a file's matrix that is in this column of the panels; -1: none is, it is padding.
inline int64_t row_in(int64_t column, int64_t rows, bool gated) {
  if (!gated) return column < rows ? column : -1;
  const int64_t size = rows / 2, row = column / (2 * W) * W + column % W;
  return row < size ? row + column / W % 2 * size : -1;
}

// Rows `ids` of the matrix that was packed, times the scale. read(id, to) reads one of them.
template <class Read>
inline void look_up(const BlockRowsCall& call, const Read& read) {
  const int64_t cols = call.blocks * kBlock;
  const vf scale = rounded((const bf16*)nullptr, splat(call.scale));
  for_rows(call.rows, cols, call.threads, [&](int64_t row) {
    bf16* to = call.out + row * cols;
    read(call.ids[row], to);
    if (call.scale == 1) return;  // a product would lose the subnormal numbers of MXFP4
    for_vectors(cols,
                [=](int64_t c, int64_t n) { store_part(to + c, load_part(to + c, n) * scale, n); });
  });
}

}  // namespace
