// y = x Wᵀ + bias on weights that stay in the blocks of a GGUF file: 32 neighbours in K share an
// fp16 scale d (and a minimum m), each is a code q of 4 or 8 bits. What is multiplied is
// round_bf16(d q + m), what a conversion to bf16 gives, in the order of panels.h: results are bit
// for bit those of bf16 panels. d q is exact in fp32 (11 + 8 bits), so a fused multiply-add gives
// the same as two operations.
//
// Codes become bf16 pairs in registers, once per panel and thread: the first rows are multiplied
// with them at once, and if there are more rows the pairs are left behind as a panel of words.
#include "blocks.h"

#include "buffer.h"
#include "choices.h"
#include "gated.h"
#include "widened.h"

namespace {

// Rows that are multiplied while a panel is unpacked; each number up to it is code of its own.
constexpr int kFirstRows = kTileRows < 8 ? kTileRows : 8;

// Prefetch distance in blocks of products that unpack each block once; at the end of a panel it
// reaches into the next one.
constexpr int64_t kBlocksAhead = 16;

template <int kKind>
inline void fetch_block(const uint8_t* block) {
  for (int line = 0; line * 64 < Layout<kKind>::kBytes; ++line)
    __builtin_prefetch(block + line * 64, 0, 2);
}

#if SP_TILES

// A block of K is a step of tiles.
static_assert(kBlock == 2 * kTile);

template <int kKind>
void unpack(const uint8_t* block, uint32_t* words) {
  for (int v = 0; v < kTileVectors; ++v) {
    const Columns<kKind> columns(block, v);
    for (int half = 0; half < 2; ++half)
#pragma GCC unroll 8
      for (int w = 0; w < kHalfWords; ++w)
        store_words(words + (half * kHalfWords + w) * kPanel + v * W, columns.word(half, w));
  }
}

template <int kKind, class Call>
void linear(const Call& call, const LinearCall& given) {
  struct Worker {
    explicit Worker(char* memory) : words((uint32_t*)memory) {}
    Tiles tiles;
    uint32_t* words;
    int64_t panel = -1;  // the one in words
  };
  const int64_t blocks = given.k_words / kTile;
  const TileRows x(given.x, given.rows, given.k_words);
  // Of a panel that is used once only the last few blocks are kept.
  constexpr int64_t kHeldOnce = 4;
  const bool once = given.rows <= 2 * kTile;
  const int64_t held = once ? kHeldOnce : blocks;
  auto make = [&](int) {
    thread_local Buffer buffer;
    return Worker(buffer.at_least(held * kStepWords * 4));
  };
  for_panels(call, make, [&](Worker& worker, int64_t panel, Range rows, bool) {
    if (worker.panel != panel) {
      const uint8_t* packed = (const uint8_t*)given.weight + panel * blocks * Layout<kKind>::kBytes;
      const Range first{rows.begin, rows.size() < 2 * kTile ? rows.end : rows.begin + 2 * kTile};
      PairSums sums;
      const auto words_of = [&](int64_t k) {
        return worker.words + (once ? k % kHeldOnce : k) * kStepWords;
      };
      tile_pair<TileBF16, bf16>(
          call, x, first, panel, {0, blocks}, blocks,
          [&](int64_t k) {
            if (k == 0) unpack<kKind>(packed, words_of(0));
            // One block ahead of the tiles: what was stored a moment ago they would have to wait
            // for.
            if (k + 1 < blocks)
              unpack<kKind>(packed + (k + 1) * Layout<kKind>::kBytes, words_of(k + 1));
            fetch_block<kKind>(packed + (k + kBlocksAhead) * Layout<kKind>::kBytes);
            return words_of(k);
          },
          sums);
      worker.panel = panel;
      rows.begin = first.end;
    }
    if (rows.size() > 0)
      tile_rows<TileBF16, bf16>(call, x, rows, panel, worker.words, blocks, false);
  });
}

template <int kKind>
void linear(const LinearCall& call) {
  call.gate == kNoGate ? linear<kKind>(call, call) : linear<kKind>(GatedLinearCall(call), call);
}

#else

// One code for a plain and for a gated product, up to here.
template <int M>
__attribute__((noinline)) void store_gated(const LinearCall& call, int64_t row, int64_t at,
                                           const vf (&acc)[M][kTileVectors]) {
  store_sums<bf16>(GatedLinearCall(call), row, at, acc);
}

// kStore: what was unpacked also goes to `words`, a panel of bf16.
template <int kKind, int M, bool kStore>
void block_tile(const LinearCall& call, int64_t row, int64_t panel, const uint8_t* blocks,
                uint32_t* words) {
  for (int n = 0; n < kPanel; n += kTileVectors * W) {
    const uint32_t* x = (const uint32_t*)call.x + row * call.k_words;
    const uint8_t* block = blocks;
    uint32_t* to = words + n;
    vf acc[M][kTileVectors] = {};
    for (int64_t k = 0; k < call.k_words; k += kBlock / 2, block += Layout<kKind>::kBytes) {
      const Columns<kKind> columns[kTileVectors] = {{block, n / W}, {block, n / W + 1}};
      if constexpr (!kStore) fetch_block<kKind>(block + kBlocksAhead * Layout<kKind>::kBytes);
      for (int half = 0; half < 2; ++half, x += kHalfWords, to += kHalfWords * kPanel)
#pragma GCC unroll 8
        for (int w = 0; w < kHalfWords; ++w)
#pragma GCC unroll 2
          for (int v = 0; v < kTileVectors; ++v) {
            const MulBF16::vec pairs = columns[v].word(half, w);
            if constexpr (kStore) store_words(to + w * kPanel + v * W, pairs);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m)
              acc[m][v] = MulBF16::step(acc[m][v], x[m * call.k_words + w], pairs);
          }
    }
    if (call.gate == kNoGate) {
      store_sums<bf16>(call, row, panel * kPanel + n, acc);
    } else {
      vf sums[M][kTileVectors];
      __builtin_memcpy(sums, acc, sizeof(acc));
      store_gated(call, row, panel * kPanel + n, sums);
    }
  }
}

template <int kKind, int M = 1>
void few_rows(const LinearCall& call, Range rows, int64_t panel, const uint8_t* blocks) {
  if (rows.size() == M)
    return block_tile<kKind, M, false>(call, rows.begin, panel, blocks, nullptr);
  if constexpr (M < kFirstRows) few_rows<kKind, M + 1>(call, rows, panel, blocks);
}

template <int kKind>
void linear(const LinearCall& call, const WidenedPair* widened) {
  struct Worker {
    uint32_t* words;
    int64_t panel;  // the one in words
  };
  const bool few = call.rows <= kFirstRows;
  auto make = [&](int) {
    thread_local Buffer buffer;
    return Worker{few ? nullptr : (uint32_t*)buffer.at_least(call.k_words * kPanel * 4), -1};
  };
  const int64_t bytes = call.k_words / (kBlock / 2) * Layout<kKind>::kBytes;  // of a panel
  auto multiply = [&](Worker& worker, int64_t panel, Range rows, bool last) {
    const uint8_t* blocks = (const uint8_t*)call.weight + panel * bytes;
    if (few) return few_rows<kKind>(call, rows, panel, blocks);
    if (worker.panel != panel) {
      block_tile<kKind, kFirstRows, true>(call, rows.begin, panel, blocks, worker.words);
      worker.panel = panel;
      rows.begin += kFirstRows;
    }
    multiply_panel(call, widened, rows, panel, worker.words, Ahead::behind(blocks, bytes, last));
  };
  call.gate == kNoGate ? for_panels(call, make, multiply)
                       : for_panels(GatedLinearCall(call), make, multiply);
}

template <int kKind>
void linear(const LinearCall& call) {
  if (call.rows <= kFirstRows || chosen(kProductBF16, call.rows) == kPairs)
    return linear<kKind>(call, nullptr);
  in_widened_batches(call,
                     [](const LinearCall& part, const WidenedPair* x) { linear<kKind>(part, x); });
}

#endif

template <int kKind>
void pack_block(const uint8_t* raw, int column, uint8_t* block) {
  typedef Layout<kKind> L;
  __builtin_memcpy(block + column * 2, raw, 2);
  if constexpr (L::kMinimum) __builtin_memcpy(block + (kPanel + column) * 2, raw + 2, 2);
  const uint8_t* codes = raw + L::kRawScales;
  if constexpr (L::kWide) {
    for (int k = 0; k < kBlock; ++k)
      block[L::kScales + k / 2 * 2 * kPanel + place(column, k % 2)] = codes[k];
  } else {
    for (int i = 0; i < 2; ++i)  // a file has k in the low and k + 16 in the high half of a byte
      for (int parity = 0; parity < 2; ++parity) {
        uint32_t word = 0;
        for (int s = 0; s < 8; ++s)
          word |= (uint32_t)(codes[2 * s + parity] >> (4 * i) & 15) << (4 * s);
        __builtin_memcpy(block + L::kScales + (i * 2 * kPanel + place(column, parity)) * 4, &word,
                         4);
      }
  }
}

template <int kKind>
void pack(const uint8_t* raw, int64_t columns, int64_t blocks, uint8_t* to, int threads) {
  typedef Layout<kKind> L;
  for_units((columns + kPanel - 1) / kPanel, threads, [](int) { return 0; },
            [&](int, int64_t panel) {
              uint8_t* at = to + panel * blocks * L::kBytes;
              __builtin_memset(at, 0, blocks * L::kBytes);
              for (int column = 0; column < kPanel && panel * kPanel + column < columns; ++column)
                for (int64_t b = 0; b < blocks; ++b)
                  pack_block<kKind>(raw + ((panel * kPanel + column) * blocks + b) * L::kRawBytes,
                                    column, at + b * L::kBytes);
            });
}

template <int kKind>
void read_row(const uint8_t* weight, int64_t row, int64_t blocks, bf16* out) {
  typedef Layout<kKind> L;
  const uint8_t* block = weight + row / kPanel * blocks * L::kBytes;
  const int column = row % kPanel;
  for (int64_t b = 0; b < blocks; ++b, block += L::kBytes, out += kBlock) {
    const float scale = half(block + column * 2),
                minimum = L::kMinimum ? half(block + (kPanel + column) * 2) : 0.f;
    const uint8_t* codes = block + L::kScales;
    for (int k = 0; k < kBlock; ++k) {
      float value;
      if constexpr (L::kWide) {
        value = scale * (int8_t)codes[k / 2 * 2 * kPanel + place(column, k % 2)];
      } else {
        uint32_t word;
        __builtin_memcpy(&word, codes + (k / 16 * 2 * kPanel + place(column, k % 2)) * 4, 4);
        const int q = word >> (k % 16 / 2 * 4) & 15;
        value = L::kMinimum ? scale * q + minimum : scale * (q - 8);
      }
      uint32_t bits;
      __builtin_memcpy(&bits, &value, 4);
      out[k].bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
  }
}

}  // namespace

// call.weight: packed; x, bias and out in bf16.
void linear_on_blocks(const LinearCall& call) {
  switch (call.blocks) {
    case kQ4_0:
      return linear<kQ4_0>(call);
    case kQ4_1:
      return linear<kQ4_1>(call);
    case kQ8_0:
      return linear<kQ8_0>(call);
  }
}

extern "C" {

// raw: [columns][blocks] blocks as in the file. to: panels [ceil(columns / kPanel)][blocks] of
// Layout.
void setpoint_pack_blocks(const uint8_t* raw, int64_t columns, int64_t blocks, uint8_t* to,
                          int32_t kind, int32_t threads) {
  switch (kind) {
    case kQ4_0:
      return pack<kQ4_0>(raw, columns, blocks, to, threads);
    case kQ4_1:
      return pack<kQ4_1>(raw, columns, blocks, to, threads);
    case kQ8_0:
      return pack<kQ8_0>(raw, columns, blocks, to, threads);
  }
}

// Rows `ids` of the matrix that was packed.
void setpoint_block_rows(const BlockRowsCall* call) {
  for_rows(call->rows, call->blocks * kBlock, call->threads, [&](int64_t i) {
    bf16* out = call->out + i * call->blocks * kBlock;
    switch (call->kind) {
      case kQ4_0:
        return read_row<kQ4_0>(call->weight, call->ids[i], call->blocks, out);
      case kQ4_1:
        return read_row<kQ4_1>(call->weight, call->ids[i], call->blocks, out);
      case kQ8_0:
        return read_row<kQ8_0>(call->weight, call->ids[i], call->blocks, out);
    }
  });
}
}
