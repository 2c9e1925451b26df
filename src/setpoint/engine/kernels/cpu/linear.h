// y = x Wᵀ + bias on weights in panels (kernels.h). Included by isa.cpp.
//
// Each output is one sum in the order of K, whatever the number of rows, columns or threads: a row's result does not depend on the
// batch it is in. Up to kTileRows rows of x meet a panel while it streams through once, so one row costs reading the weights, and
// many rows run at the rate of the multipliers.

#if SP_WIDTH == 16
constexpr int kTileRows = 14, kTileVectors = 2;  // 28 of 32 registers hold sums
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // 12 of 16
#endif
// Rows a thread takes at a time: keeps the panel in its L2 while there are enough units for all threads.
constexpr int kUnitRows = 4 * kTileRows;

template <class Mul, class T, int M>
static void linear_tile(const LinearCall& call, int64_t row, int64_t panel) {
  typedef typename Mul::word word;
  const word* x = (const word*)call.x + row * call.k_words;
  for (int64_t n = 0; n < kPanel; n += kTileVectors * W) {
    const int64_t column = panel * kPanel + n;
    vf acc[M][kTileVectors];
    tile<Mul, M, kTileVectors>(x, call.k_words, (const word*)call.weight + panel * kPanel * call.k_words + n, W, kPanel, call.k_words, acc);
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      const int64_t at = column + v * W, left = call.columns - at;
      if (left <= 0) return;
      const vf bias = call.bias ? load_part((const T*)call.bias + at, left) : vf{};
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) store_part((T*)call.out + (row + m) * call.columns + at, acc[m][v] + bias, left);
    }
  }
}

template <class Mul, class T>
static void linear_rows(const LinearCall& call, int64_t row, int64_t rows, int64_t panel) {
  switch (rows) {
    case 1: return linear_tile<Mul, T, 1>(call, row, panel);
    case 2: return linear_tile<Mul, T, 2>(call, row, panel);
    case 3: return linear_tile<Mul, T, 3>(call, row, panel);
    case 4: return linear_tile<Mul, T, 4>(call, row, panel);
    case 5: return linear_tile<Mul, T, 5>(call, row, panel);
    case 6: return linear_tile<Mul, T, 6>(call, row, panel);
#if SP_WIDTH == 16
    case 7: return linear_tile<Mul, T, 7>(call, row, panel);
    case 8: return linear_tile<Mul, T, 8>(call, row, panel);
    case 9: return linear_tile<Mul, T, 9>(call, row, panel);
    case 10: return linear_tile<Mul, T, 10>(call, row, panel);
    case 11: return linear_tile<Mul, T, 11>(call, row, panel);
    case 12: return linear_tile<Mul, T, 12>(call, row, panel);
    case 13: return linear_tile<Mul, T, 13>(call, row, panel);
    case 14: return linear_tile<Mul, T, 14>(call, row, panel);
#endif
  }
}

template <class Mul, class T>
static void linear_t(const LinearCall& call) {
  const int64_t panels = (call.columns + kPanel - 1) / kPanel, blocks = (call.rows + kUnitRows - 1) / kUnitRows;
  const int64_t units = panels * blocks;
  // One row is over quickly: then a thread takes several neighbouring panels at a time.
  const int64_t grab = units / (call.threads * 16) > 4 ? 4 : (units / (call.threads * 16) > 1 ? units / (call.threads * 16) : 1);
  int64_t next = 0;
  auto worker = [&] {
    for (int64_t unit; (unit = __atomic_fetch_add(&next, grab, __ATOMIC_RELAXED)) < units;)
      for (int64_t u = unit; u < unit + grab && u < units; ++u) {
        const int64_t panel = u / blocks, block = u % blocks;
        // Blocks and tiles of even size: 15 rows are 8 + 7, not 14 + 1.
        const int64_t begin = call.rows * block / blocks, end = call.rows * (block + 1) / blocks;
        const int64_t tiles = (end - begin + kTileRows - 1) / kTileRows;
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t first = begin + (end - begin) * t / tiles, last = begin + (end - begin) * (t + 1) / tiles;
          linear_rows<Mul, T>(call, first, last - first, panel);
        }
      }
  };
  if (call.threads == 1 || units == 1) return worker();
#pragma omp parallel num_threads(call.threads)
  worker();
}

static void linear(const LinearCall& call) { call.dtype == kBF16 ? linear_t<MulBF16, bf16>(call) : linear_t<MulF32, float>(call); }
