// Products on weights in panels: how the rows of x and the panels are divided, and the tile that a
// panel's words are met with.
//
// Each output is one sum in the order of K, whatever the number of rows, columns or threads: a
// row's result does not depend on the batch it is in (but for rounded blocks, which are multiplied
// in another way if there are many rows).
#pragma once
#include "base/buffer.h"
#include "step/calls.h"
#include "base/simd.h"
#include "base/threads.h"
#include "base/tiles.h"

// Output columns of a panel: [K words][kPanel] 4-byte words, a word being one fp32, two bf16 or
// four int8 neighbours in K; columns past N are zero.
constexpr int kPanel = 32;

enum Gate : int32_t { kNoGate = 0, kSilu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

#if SP_WIDTH == 16
constexpr int kTileRows = 12, kTileVectors = 2;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // 12 of 16
#endif
#if SP_TILES
// Rows of x that a thread takes at a time with a panel, and the alignment of their boundaries.
constexpr int kUnitRows = 256, kRowAlign = kTile;
// Half an L2 cache of x, on the machines that have tiles.
constexpr int64_t kBatchBytes = 1024 * 1024;
#else
constexpr int kUnitRows = 4 * kTileRows, kRowAlign = 1;
// Half an L2 cache of x.
constexpr int64_t kBatchBytes = 512 * 1024;
#endif

// A tile of at least this many rows brings what is read next to L2 while it works. Fewer rows do so
// little with a panel that the hardware's own prefetching does better.
constexpr int kRowsToPrefetch = 6;

// Part i of n even parts of [begin, end): 13 rows are split into 7 + 6, not 12 + 1.
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
  Range part(int64_t i, int64_t n) const {
    return {begin + size() * i / n, begin + size() * (i + 1) / n};
  }
};

// Stores the sums of M rows from `row` on, for the columns from `at` on, to the output.
template <class T, int M>
static inline __attribute__((always_inline)) void store_sums(const LinearCall& call, int64_t row,
                                                             int64_t at,
                                                             const vf (&acc)[M][kTileVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kTileVectors; ++v, at += W) {
    const int64_t left = call.columns - at;
    if (left <= 0) return;
    const vf bias = call.bias ? load_part((const T*)call.bias + at, left) : vf{};
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      store_part((T*)call.out + (row + m) * call.out_row + at, acc[m][v] + bias, left);
  }
}

// Memory that will be read next. Tiles of many rows bring it to L2 while they work, each an equal
// share: a burst would take the buffers that they are read through themselves.
struct Ahead {
  const char* from = nullptr;
  int64_t bytes = 0;

  // What lies behind `bytes` at `here`, if it is this thread's next.
  static Ahead behind(const void* here, int64_t bytes, bool next) {
    return next ? Ahead{(const char*)here + bytes, bytes} : Ahead{};
  }
};

// The processor's mode while a thread sums products of one kind. Sums are not used before end().
template <class Mul>
struct SumMode {
  template <int M, int N>
  void end(typename Mul::sum (&)[M][N]) const {}
};

// `Call` has x, rows, columns, k_words and threads as LinearCall does (x of Mul::word), and a
// store_sums of its own. ahead_step: bytes from `ahead` on that the tile brings at each step of K.
template <bool kAhead, class Mul, class T, int M, class Call>
static inline void panel_tile(const Call& call, int64_t row, int64_t panel,
                              const typename Mul::packed* words, const char* ahead,
                              int64_t ahead_step) {
  typedef typename Mul::word word;
  typedef typename Mul::packed packed;
  const word* x = (const word*)call.x + row * call.k_words;
  for (int64_t n = 0; n < kPanel; n += kTileVectors * W) {
    const packed* weight = words + n;
    const int64_t pass = n / (kTileVectors * W) * call.k_words;
    typename Mul::sum acc[M][kTileVectors];
    const SumMode<Mul> mode;
    tile<Mul, M, kTileVectors>(
        x, call.k_words, call.k_words,
        [=](int64_t k, int v) {
          if constexpr (kAhead)
            if (v * W % 16 == 0)
              __builtin_prefetch(ahead + (pass + k) * ahead_step + v * ahead_step / 2, 0, 2);
          return Mul::load_vec(weight + k * kPanel + v * W);
        },
        acc);
    mode.end(acc);
    store_sums<T>(call, row, panel * kPanel + n, acc);
  }
}

template <class Mul, class T, int M = 1, class Call>
static inline void panel_tile_of(const Call& call, Range rows, int64_t panel,
                                 const typename Mul::packed* words, const char* ahead,
                                 int64_t ahead_step) {
  if (rows.size() == M) {
    if (M >= kRowsToPrefetch && ahead_step)
      return panel_tile<M >= kRowsToPrefetch, Mul, T, M>(call, rows.begin, panel, words, ahead,
                                                         ahead_step);
    return panel_tile<false, Mul, T, M>(call, rows.begin, panel, words, nullptr, 0);
  }
  if constexpr (M < kTileRows)
    panel_tile_of<Mul, T, M + 1>(call, rows, panel, words, ahead, ahead_step);
}

// Rows of x times the panel that lies at `words`.
template <class Mul, class T, class Call>
static inline void panel_rows(const Call& call, Range rows, int64_t panel,
                              const typename Mul::packed* words, Ahead ahead) {
  if (rows.size() == 0) return;
  const int64_t tiles = (rows.size() + kTileRows - 1) / kTileRows;
  const int64_t steps = kPanel / (kTileVectors * W) * call.k_words;  // of a tile
  const int64_t each = (ahead.bytes + tiles * steps - 1) / (tiles * steps);
  for (int64_t t = 0; t < tiles; ++t)
    panel_tile_of<Mul, T>(call, rows.part(t, tiles), panel, words, ahead.from + t * steps * each,
                          each);
}

#if SP_TILES
constexpr int64_t tile_words(int64_t k_words) { return (k_words + kTile - 1) / kTile * kTile; }

// The rows of x as tiles read them: whole tiles of words, and 16 rows from any multiple of 16 on.
class TileRows {
 public:
  // For rows that are whole tiles already.
  TileRows(const void* x, int64_t k_words) : x_((const char*)x), stride_(k_words * 4) {}

  // For any rows. Rows that do not make whole tiles are copied to a buffer of the calling thread,
  // which the next call reuses; a single row is repeated as every row of its tile.
  TileRows(const void* x, int64_t rows, int64_t k_words) : TileRows(x, k_words) {
    const int64_t whole = k_words % kTile ? 0 : rows / kTile * kTile, words = tile_words(k_words);
    if (whole == rows) return;
    if (rows == 1 && words == k_words) {
      stride_ = 0;
      return;
    }
    thread_local Buffer buffer;
    char* copy = buffer.at_least((rows - whole + kTile - 1) / kTile * kTile * words * 4);
    for (int64_t row = whole; row < rows; ++row) {
      char* to = copy + (row - whole) * words * 4;
      __builtin_memcpy(to, x_ + row * k_words * 4, k_words * 4);
      __builtin_memset(to + k_words * 4, 0, (words - k_words) * 4);
    }
    stride_ = words * 4;
    copied_from_ = whole;
    copy_ = copy;
  }

  int64_t stride() const { return stride_; }  // in bytes
  const char* at(int64_t row) const {
    return row >= copied_from_ ? copy_ + (row - copied_from_) * stride_ : x_ + row * stride_;
  }

 private:
  const char *x_, *copy_ = nullptr;
  int64_t stride_, copied_from_ = INT64_MAX;
};

// A step of K through a panel: the words of two tiles, side by side.
constexpr int64_t kStepWords = kTile * kPanel;

// Sums of up to 32 rows of x with a panel.
struct alignas(64) PairSums {
  uint32_t rows[2 * kTile][kPanel];
};

// Multiplies kBlocks times 16 rows of x, whose first words are at a[], with the steps [begin, end)
// of a panel. The results go to sums, and are added to its content if begin is not 0. words(k):
// address of a step's words.
template <class Mul, int kBlocks, class Words>
static inline void multiply_tiles(const char* const (&a)[2], int64_t stride, int64_t begin,
                                  int64_t end, const Words& words, PairSums& sums) {
  static_assert(kPanel == 2 * kTile);
  constexpr int64_t kPanelRow = kPanel * 4;
  uint32_t *low = sums.rows[0], *high = sums.rows[kTile];
  if (begin == 0) {
    Tiles::zero<0>();
    Tiles::zero<1>();
    if constexpr (kBlocks == 2) {
      Tiles::zero<2>();
      Tiles::zero<3>();
    }
  } else {
    Tiles::load<0>(low, kPanelRow);
    Tiles::load<1>(low + kTile, kPanelRow);
    if constexpr (kBlocks == 2) {
      Tiles::load<2>(high, kPanelRow);
      Tiles::load<3>(high + kTile, kPanelRow);
    }
  }
  for (int64_t k = begin; k < end; ++k) {
    const uint32_t* weight = words(k);
    Tiles::load<4>(a[0] + k * kTile * 4, stride);
    Tiles::load<6>(weight, kPanelRow);
    Mul::template multiply<0, 4, 6>();
    Tiles::load<7>(weight + kTile, kPanelRow);
    Mul::template multiply<1, 4, 7>();
    if constexpr (kBlocks == 2) {
      Tiles::load<5>(a[1] + k * kTile * 4, stride);
      Mul::template multiply<2, 5, 6>();
      Mul::template multiply<3, 5, 7>();
    }
  }
  Tiles::store<0>(low, kPanelRow);
  Tiles::store<1>(low + kTile, kPanelRow);
  if constexpr (kBlocks == 2) {
    Tiles::store<2>(high, kPanelRow);
    Tiles::store<3>(high + kTile, kPanelRow);
  }
}

// Multiplies the rows (at most 32) with `steps` of K, and stores the output after the last step.
template <class Mul, class T, class Call, class Words>
static inline void tile_pair(const Call& call, const TileRows& x, Range rows, int64_t panel,
                             Range steps, int64_t all_steps, const Words& words, PairSums& sums) {
  typedef typename Mul::sum Sum;
  static_assert(kPanel == kTileVectors * W);
  if (rows.size() <= kTile)
    multiply_tiles<Mul, 1>({x.at(rows.begin), nullptr}, x.stride(), steps.begin, steps.end, words,
                           sums);
  else
    multiply_tiles<Mul, 2>({x.at(rows.begin), x.at(rows.begin + kTile)}, x.stride(), steps.begin,
                           steps.end, words, sums);
  if (steps.end < all_steps) return;
  for (int64_t m = 0; m < rows.size(); ++m) {
    const Sum acc[1][kTileVectors] = {
        {load_raw<Sum>(sums.rows[m]), load_raw<Sum>(sums.rows[m] + W)}};
    store_sums<T>(call, rows.begin + m, panel * kPanel, acc);
  }
}

// Steps of a panel that stay in the first-level cache (16 KiB) while all rows of a unit meet them.
// With both factors in the second-level cache tiles run at a third of their rate, with one of them
// there at 95 % (decision 0024).
constexpr int64_t kChunkSteps = 8;

// As panel_rows, for words that are padded to whole steps of K. The calling thread has its Tiles.
template <class Mul, class T, class Call>
static inline void tile_rows(const Call& call, const TileRows& x, Range rows, int64_t panel,
                             const uint32_t* words, int64_t steps, bool prefetch_next) {
  PairSums sums[kUnitRows / (2 * kTile)];
  constexpr int64_t kLines = kStepWords / 16;  // of a step, in the cache
  const int64_t chunks = rows.size() <= 2 * kTile ? 1 : (steps + kChunkSteps - 1) / kChunkSteps;
  const int64_t pairs = (rows.size() + 2 * kTile - 1) / (2 * kTile);
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t row = rows.begin + pair * 2 * kTile;
      const Range two{row, row + 2 * kTile < rows.end ? row + 2 * kTile : rows.end};
      // Each pair brings its share of the next panel: a burst would fill the buffers that tiles are
      // loaded through.
      const Range lines = prefetch_next ? Range{0, kLines}.part(pair, pairs) : Range{0, 0};
      tile_pair<Mul, T>(
          call, x, two, panel, Range{0, steps}.part(chunk, chunks), steps,
          [=](int64_t k) {
            const uint32_t* step = words + k * kStepWords;
            for (int64_t line = lines.begin; line < lines.end; ++line)
              __builtin_prefetch(step + steps * kStepWords + line * 16, 0, 2);
            return step;
          },
          sums[pair]);
    }
}
#endif

// body(worker, panel, rows, last) for every panel and every unit of rows, spread over the threads;
// last: no unit of these rows follows before the next panel. Batches of rows that stay in the L2
// cache for all panels, or of `least_rows`; in them units of rows. Units of a panel follow each
// other, so that a thread mostly stays with a panel.
template <class Call, class Make, class Body>
static inline void for_panels(const Call& call, const Make& make, const Body& body,
                              int64_t least_rows = kUnitRows) {
  const int64_t panels = (call.columns + kPanel - 1) / kPanel;
  const int64_t fitting =
      kBatchBytes / (call.k_words * 4) > least_rows ? kBatchBytes / (call.k_words * 4) : least_rows;
  const int64_t batches = (call.rows + fitting - 1) / fitting;
  const int64_t units = ((call.rows + batches - 1) / batches + kUnitRows - 1) / kUnitRows;
  const Range all{0, (call.rows + kRowAlign - 1) / kRowAlign};
  for_units(batches * panels * units, call.threads, make, [&](auto& worker, int64_t index) {
    const int64_t panel = index / units % panels, unit = index % units;
    const Range part = all.part(index / units / panels, batches).part(unit, units);
    const Range rows{part.begin * kRowAlign,
                     part.end * kRowAlign < call.rows ? part.end * kRowAlign : call.rows};
    body(worker, panel, rows, unit == units - 1 && panel + 1 < panels);
  });
}

#if !SP_TILES
struct WidenedPair;
// Rows of x times a panel of bf16 words (linear.cpp). widened: the rows of x in fp32, or null.
void multiply_panel(const LinearCall& call, const WidenedPair* widened, Range rows, int64_t panel,
                    const uint32_t* words, Ahead ahead);
#endif

void linear_on_blocks(const LinearCall& call);          // blocks.cpp
void linear_on_rounded_blocks(const LinearCall& call);  // rounded_blocks.cpp
void linear_on_rotated_blocks(const LinearCall& call);  // rotated_blocks.cpp
