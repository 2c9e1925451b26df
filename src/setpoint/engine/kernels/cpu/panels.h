// Products on weights in panels: how the rows of x and the panels are divided, and the tile that a panel's words are met with.
//
// Each output is one sum in the order of K, whatever the number of rows, columns or threads: a row's result does not depend on the
// batch it is in.
#pragma once
#include "simd.h"
#include "threads.h"

// Output columns of a panel: [K words][kPanel] 4-byte words, a word being one fp32, two bf16 or four int8 neighbours in K; columns past N
// are zero.
constexpr int kPanel = 32;

enum Gate : int32_t { kNoGate = 0, kSilu = 1, kGeluTanh = 2 };

// With a gate the weight is that of gate and up: its columns are one vector of the gate and one of up in turn, so that a tile holds both,
// and the result is activation(gate) * up.
struct LinearCall {
  const void* x;  // [M, K] contiguous
  const void* weight;  // panels of words, or of blocks (blocks.cpp)
  const void* bias;  // [N] in x's type, or null; with a gate as the weight's columns, and as many
  void* out;         // [M, N] contiguous, in x's type
  int64_t rows;
  int64_t columns;  // N
  int64_t k_words;
  int32_t dtype, gate;
  int32_t blocks;  // their kind; 0: words
  int32_t threads;
};

#if SP_WIDTH == 16
constexpr int kTileRows = 12, kTileVectors = 2;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // 12 of 16
#endif
// Rows of a panel that a thread takes at a time.
constexpr int kUnitRows = 4 * kTileRows;
// Half an L2 cache of x.
constexpr int64_t kBatchBytes = 512 * 1024;

// A tile of at least this many rows brings the next panel to L2 while it works. Fewer rows do so little with a panel that the
// hardware's own prefetching does better.
constexpr int kRowsToPrefetch = 6;

// Part i of n even parts of [begin, end): 13 rows are 7 + 6, not 12 + 1.
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
  Range part(int64_t i, int64_t n) const { return {begin + size() * i / n, begin + size() * (i + 1) / n}; }
};

// Sums of M rows from `row` on and of the columns from `at` on, to the output.
template <class T, int M>
static inline __attribute__((always_inline)) void store_sums(const LinearCall& call, int64_t row, int64_t at,
                                                             const vf (&acc)[M][kTileVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kTileVectors; ++v, at += W) {
    const int64_t left = call.columns - at;
    if (left <= 0) return;
    const vf bias = call.bias ? load_part((const T*)call.bias + at, left) : vf{};
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) store_part((T*)call.out + (row + m) * call.columns + at, acc[m][v] + bias, left);
  }
}

// `Call` has x, rows, columns, k_words and threads as LinearCall does, and a store_sums of its own.
template <bool kAhead, class Mul, class T, int M, class Call>
static inline void panel_tile(const Call& call, int64_t row, int64_t panel, const typename Mul::word* words) {
  typedef typename Mul::word word;
  const word* x = (const word*)call.x + row * call.k_words;
  for (int64_t n = 0; n < kPanel; n += kTileVectors * W) {
    const word* weight = words + n;
    const char* ahead = (const char*)(words + kPanel * call.k_words) + n * call.k_words * 4;
    typename Mul::sum acc[M][kTileVectors];
    tile<Mul, M, kTileVectors>(
        x, call.k_words, call.k_words,
        [=](int64_t k, int v) {
          if constexpr (kAhead)
            if (v * W % 16 == 0) __builtin_prefetch(ahead + (k * kTileVectors + v) * W * 4, 0, 2);
          return Mul::load_vec(weight + k * kPanel + v * W);
        },
        acc);
    store_sums<T>(call, row, panel * kPanel + n, acc);
  }
}

template <class Mul, class T, int M = 1, class Call>
static inline void panel_tile_of(const Call& call, Range rows, int64_t panel, const typename Mul::word* words, bool prefetch_next) {
  if (rows.size() == M) {
    if (M >= kRowsToPrefetch && prefetch_next) return panel_tile<M >= kRowsToPrefetch, Mul, T, M>(call, rows.begin, panel, words);
    return panel_tile<false, Mul, T, M>(call, rows.begin, panel, words);
  }
  if constexpr (M < kTileRows) panel_tile_of<Mul, T, M + 1>(call, rows, panel, words, prefetch_next);
}

// Rows of x times the panel that lies at `words`; prefetch_next: the next panel lies behind it and is this thread's next.
template <class Mul, class T, class Call>
static inline void panel_rows(const Call& call, Range rows, int64_t panel, const typename Mul::word* words, bool prefetch_next) {
  const int64_t tiles = (rows.size() + kTileRows - 1) / kTileRows;
  for (int64_t t = 0; t < tiles; ++t) panel_tile_of<Mul, T>(call, rows.part(t, tiles), panel, words, t == 0 && prefetch_next);
}

// body(worker, panel, rows, last) for every panel and every unit of rows, spread over the threads; last: no unit of these rows follows
// before the next panel. Batches of rows that stay in the L2 cache for all panels; in them units of rows. Units of a panel follow each
// other, so that a thread mostly stays with a panel.
template <class Call, class Make, class Body>
static inline void for_panels(const Call& call, const Make& make, const Body& body) {
  const int64_t panels = (call.columns + kPanel - 1) / kPanel;
  const int64_t fitting = kBatchBytes / (call.k_words * 4) > kUnitRows ? kBatchBytes / (call.k_words * 4) : kUnitRows;
  const int64_t batches = (call.rows + fitting - 1) / fitting;
  const int64_t units = ((call.rows + batches - 1) / batches + kUnitRows - 1) / kUnitRows;
  for_units(batches * panels * units, call.threads, make, [&](auto& worker, int64_t index) {
    const int64_t panel = index / units % panels, unit = index % units;
    const Range batch = Range{0, call.rows}.part(index / units / panels, batches);
    body(worker, panel, batch.part(unit, units), unit == units - 1 && panel + 1 < panels);
  });
}

// Rows of x times a panel of bf16 words (linear.cpp).
void multiply_panel(const LinearCall& call, Range rows, int64_t panel, const uint32_t* words);

void linear_on_blocks(const LinearCall& call);  // blocks.cpp
