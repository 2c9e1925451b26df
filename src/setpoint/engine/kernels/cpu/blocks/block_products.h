// y = x Wᵀ + bias on weights that stay in the blocks of a file: 32 neighbours in K share a
// scale d (Q6_K: 16 neighbours) and in some kinds a minimum m, each weight is a code q of 4 to 8
// bits: a whole number, or a float of 4 bits (MXFP4, whose d is a power of two) or of 8. What is
// multiplied is round_bf16(d q + m), what a conversion to bf16 gives, in the order of panels.h:
// results are bit for bit those of bf16 panels. d q is exact in fp32 (11 bits of d and 8 of q; of
// K-quants 11, 6 and 4 or 11, 7 and 5), so a fused multiply-add gives the same as two operations;
// so is m of K-quants (11 + 6 bits). Only INT8Z and FP8 have a d in fp32: their product with d is
// the only one that is rounded.
//
// Codes become bf16 pairs in registers, once per panel and thread: the first rows are multiplied
// with them at once, and if there are more rows the pairs are left behind as a panel of words.
#pragma once
#include "base/buffer.h"
#include "products/choices.h"
#include "products/gated.h"
#include "blocks/raw_blocks.h"
#include "products/widened.h"

// What is done with matrices in blocks of one kind.
struct BlockCode {
  void (*multiply)(const LinearCall& call);
  void (*pack)(const uint8_t* raw, int64_t rows, int64_t blocks, uint8_t* to, bool gated,
               int threads);
  void (*read_row)(const uint8_t* weight, int64_t row, int64_t blocks, bf16* out);
};

namespace {

// Rows that are multiplied while a panel is unpacked; each number up to it is code of its own.
constexpr int kFirstRows = kTileRows < 8 ? kTileRows : 8;

// Prefetch distance in blocks of products that unpack each block once; at the end of a panel it
// reaches into the next one.
constexpr int64_t kBlocksAhead = 16;
static_assert(kBlocksAhead % Layout<kQ4_K>::kGroup == 0);

#if SP_TILES

// A block of K is a step of tiles.
static_assert(kBlock == 2 * kTile);

template <int kKind>
void unpack(const Layout<kKind>& block, uint32_t* words) {
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
      const uint8_t* packed =
          (const uint8_t*)given.weight + panel * Layout<kKind>::panel_bytes(blocks);
      const Range first{rows.begin, rows.size() < 2 * kTile ? rows.end : rows.begin + 2 * kTile};
      PairSums sums;
      const auto words_of = [&](int64_t k) {
        return worker.words + (once ? k % kHeldOnce : k) * kStepWords;
      };
      tile_pair<TileBF16, bf16>(
          call, x, first, panel, {0, blocks}, blocks,
          [&](int64_t k) {
            if (k == 0) unpack<kKind>({packed, 0}, words_of(0));
            // One block ahead of the tiles: what was stored a moment ago they would have to wait
            // for.
            if (k + 1 < blocks) unpack(Layout<kKind>::of_panel(packed, k + 1), words_of(k + 1));
            Layout<kKind>::fetch(packed + Layout<kKind>::panel_bytes(k + kBlocksAhead),
                                 k % Layout<kKind>::kGroup);
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
  typedef Layout<kKind> L;
  for (int n = 0; n < kPanel; n += kTileVectors * W) {
    const uint32_t* x = (const uint32_t*)call.x + row * call.k_words;
    uint32_t* to = words + n;
    vf acc[M][kTileVectors] = {};
    for (const uint8_t *group = blocks, *end = blocks + L::panel_bytes(call.k_words / (kBlock / 2));
         group < end; group += L::kGroupBytes)
#pragma GCC unroll 1
      for (int i = 0; i < L::kGroup; ++i) {
        const L block(group, i);
        const Columns<kKind> columns[kTileVectors] = {{block, n / W}, {block, n / W + 1}};
        if constexpr (!kStore) L::fetch(group + kBlocksAhead / L::kGroup * L::kGroupBytes, i);
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
  const int64_t bytes = Layout<kKind>::panel_bytes(call.k_words / (kBlock / 2));
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

// Block b of a panel that has this raw block in `column`.
template <int kKind>
void pack_block(const RawBlock<kKind>& raw, int column, uint8_t* panel, int64_t b) {
  typedef Layout<kKind> L;
  const L block = L::of_panel(panel, b);
  const auto writable = [](const uint8_t* at) { return const_cast<uint8_t*>(at); };
  for (int i = 0; i < L::kNumberBytes / (L::kNumberSize * kPanel); ++i)
    __builtin_memcpy(writable(block.numbers) + (i * kPanel + column) * L::kNumberSize,
                     raw.numbers + L::kNumberSize * i, L::kNumberSize);
  for (int i = 0; i < L::kFactorBytes / kPanel; ++i)
    writable(block.factors)[i * kPanel + column] = raw.factors[i];
  put_codes<L>(writable(block.codes), column, raw.codes);
}

template <int kKind>
void pack(const uint8_t* raw, int64_t rows, int64_t blocks, uint8_t* to, bool gated, int threads) {
  typedef RawBlock<kKind> Raw;
  constexpr int64_t kGroup = Layout<kKind>::kGroup;
  const int64_t row_bytes = blocks / kGroup * Raw::kBytes,
                bytes = Layout<kKind>::panel_bytes(blocks);
  const auto pack_panel = [&](int, int64_t panel) {
    int64_t rows_in[kPanel];
    bool is_full = true;
    for (int column = 0; column < kPanel; ++column) {
      rows_in[column] = row_in(panel * kPanel + column, rows, gated);
      is_full &= rows_in[column] >= 0;
    }
    if (!is_full) __builtin_memset(to + panel * bytes, 0, bytes);
    for (int64_t first = 0; first < blocks; first += kGroup)  // it stays in the first-level cache
      for (int column = 0; column < kPanel; ++column)
        for (int64_t b = first; b < first + kGroup && rows_in[column] >= 0; ++b)
          pack_block(Raw(raw + rows_in[column] * row_bytes, b), column, to + panel * bytes, b);
  };
  const int64_t outputs = gated ? rows / 2 : rows, of_panel = gated ? kPanel / 2 : kPanel;
  for_units((outputs + of_panel - 1) / of_panel, threads, [](int) { return 0; }, pack_panel);
}

template <int kKind>
void read_row(const uint8_t* weight, int64_t row, int64_t blocks, bf16* out) {
  typedef Layout<kKind> L;
  const uint8_t* panel = weight + row / kPanel * L::panel_bytes(blocks);
  const int column = row % kPanel;
  for (int64_t b = 0; b < blocks; ++b, out += kBlock) {
    const L block = L::of_panel(panel, b);
    const auto number = [&](int i, int factor) {
      const uint8_t* at = block.numbers + (i * kPanel + column) * L::kNumberSize;
      const float number = kKind == kMXFP4 ? power(*at) : L::kWide ? load_raw<float>(at) : half(at);
      return L::kFactors ? number * (int8_t)block.factors[factor * kPanel + column] : number;
    };
    const float scales[] = {number(0, 0), number(0, L::kSets - 1)};
    float minimums[2] = {};
    if constexpr (L::kMinimum)
      for (int i = 0; i < 2; ++i) minimums[i] = number(1, L::kSets + (L::kSets == 2 ? i : 0));
    for (int k = 0; k < kBlock; ++k) {
      float code = code_of<kKind>(block.codes, column, k);
      if constexpr (L::kZero) code -= (int8_t)block.factors[column];
      float value = scales[k / 16] * code;
      if constexpr (L::kMinimum) value += L::kFactors ? -minimums[k / 16] : minimums[k / 16];
      uint32_t bits;
      __builtin_memcpy(&bits, &value, 4);
      out[k].bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
  }
}

template <int kKind>
constexpr BlockCode kCodeOf = {[](const LinearCall& call) { linear<kKind>(call); }, pack<kKind>,
                               read_row<kKind>};

}  // namespace
