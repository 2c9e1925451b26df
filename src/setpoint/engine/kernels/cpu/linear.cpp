// y = x Wᵀ + bias on weights in panels.
//
// Each output is one sum in the order of K, whatever the number of rows, columns or threads: a row's result does not depend on the
// batch it is in. Up to kTileRows rows of x meet a panel while it streams through once, so one row costs reading the weights, and
// many rows run at the rate of the multipliers.
#include "simd.h"
#include "threads.h"

// Weights of a linear layer: panels of kPanel output columns, [ceil(N / kPanel)][K words][kPanel] 4-byte words, a word being one fp32
// or two bf16 neighbours in K; columns past N are zero.
constexpr int kPanel = 32;

struct LinearCall {
  const void* x;  // [M, K] contiguous
  const void* weight;
  const void* bias;  // [N] in x's type, or null
  void* out;         // [M, N] contiguous, in x's type
  int64_t rows, columns, k_words;
  int32_t dtype, threads;
};

namespace {

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

template <bool kAhead, class Mul, class T, int M>
void linear_tile(const LinearCall& call, int64_t row, int64_t panel) {
  typedef typename Mul::word word;
  const word* x = (const word*)call.x + row * call.k_words;
  for (int64_t n = 0; n < kPanel; n += kTileVectors * W) {
    const word* weight = (const word*)call.weight + panel * kPanel * call.k_words + n;
    const char* ahead = (const char*)((const word*)call.weight + (panel + 1) * kPanel * call.k_words) + n * call.k_words * 4;
    vf acc[M][kTileVectors];
    tile<Mul, M, kTileVectors>(
        x, call.k_words, call.k_words,
        [=](int64_t k, int v) {
          if constexpr (kAhead)
            if (v * W % 16 == 0) __builtin_prefetch(ahead + (k * kTileVectors + v) * W * 4, 0, 2);
          return Mul::load_vec(weight + k * kPanel + v * W);
        },
        acc);
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      const int64_t at = panel * kPanel + n + v * W, left = call.columns - at;
      if (left <= 0) return;
      const vf bias = call.bias ? load_part((const T*)call.bias + at, left) : vf{};
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) store_part((T*)call.out + (row + m) * call.columns + at, acc[m][v] + bias, left);
    }
  }
}

template <class Mul, class T>
void linear_rows(const LinearCall& call, int64_t row, int64_t rows, int64_t panel, bool prefetch_next) {
  switch (rows) {
    case 1: return linear_tile<false, Mul, T, 1>(call, row, panel);
    case 2: return linear_tile<false, Mul, T, 2>(call, row, panel);
    case 3: return linear_tile<false, Mul, T, 3>(call, row, panel);
    case 4: return linear_tile<false, Mul, T, 4>(call, row, panel);
    case 5: return linear_tile<false, Mul, T, 5>(call, row, panel);
    case 6: return prefetch_next ? linear_tile<true, Mul, T, 6>(call, row, panel) : linear_tile<false, Mul, T, 6>(call, row, panel);
#if SP_WIDTH == 16
    case 7: return prefetch_next ? linear_tile<true, Mul, T, 7>(call, row, panel) : linear_tile<false, Mul, T, 7>(call, row, panel);
    case 8: return prefetch_next ? linear_tile<true, Mul, T, 8>(call, row, panel) : linear_tile<false, Mul, T, 8>(call, row, panel);
    case 9: return prefetch_next ? linear_tile<true, Mul, T, 9>(call, row, panel) : linear_tile<false, Mul, T, 9>(call, row, panel);
    case 10: return prefetch_next ? linear_tile<true, Mul, T, 10>(call, row, panel) : linear_tile<false, Mul, T, 10>(call, row, panel);
    case 11: return prefetch_next ? linear_tile<true, Mul, T, 11>(call, row, panel) : linear_tile<false, Mul, T, 11>(call, row, panel);
    case 12: return prefetch_next ? linear_tile<true, Mul, T, 12>(call, row, panel) : linear_tile<false, Mul, T, 12>(call, row, panel);
#endif
  }
}

// Part i of n even parts of [0, total): 13 rows are 7 + 6, not 12 + 1.
struct Range {
  int64_t begin, end;
  Range(int64_t total, int64_t i, int64_t n) : begin(total * i / n), end(total * (i + 1) / n) {}
  int64_t size() const { return end - begin; }
};

template <class Mul, class T>
void linear(const LinearCall& call) {
  const int64_t panels = (call.columns + kPanel - 1) / kPanel;
  // Batches of rows that stay in the L2 cache for all panels; in them units of rows, in those tiles.
  const int64_t fitting = kBatchBytes / (call.k_words * 4) > kUnitRows ? kBatchBytes / (call.k_words * 4) : kUnitRows;
  const int64_t batches = (call.rows + fitting - 1) / fitting;
  const int64_t units = ((call.rows + batches - 1) / batches + kUnitRows - 1) / kUnitRows;
  auto no_state = [](int) { return 0; };
  for_units(batches * panels * units, call.threads, no_state, [&](int, int64_t index) {
    const int64_t panel = index / units % panels, unit = index % units;
    const Range batch(call.rows, index / units / panels, batches), rows(batch.size(), unit, units);
    const int64_t tiles = (rows.size() + kTileRows - 1) / kTileRows;
    for (int64_t t = 0; t < tiles; ++t) {
      const Range tile(rows.size(), t, tiles);
      const bool prefetch_next = t == 0 && unit == units - 1 && panel + 1 < panels && tile.size() >= kRowsToPrefetch;
      linear_rows<Mul, T>(call, batch.begin + rows.begin + tile.begin, tile.size(), panel, prefetch_next);
    }
  });
}

}  // namespace

extern "C" void setpoint_linear(const LinearCall* call) {
  call->dtype == kBF16 ? linear<MulBF16, bf16>(*call) : linear<MulF32, float>(*call);
}
