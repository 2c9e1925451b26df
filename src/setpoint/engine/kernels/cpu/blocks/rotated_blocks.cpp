// y = x Wᵀ + bias on the blocks of a GGUF file for many rows: blocks become int8 in panels that all
// rows meet, so that the inner loop is nothing but products of bytes.
//
// A span of 64 neighbours in K has one scale in each column and in each row of x. It is rotated
// before it is rounded, as in w8a8_int8: in x an outlier would else take the steps of all others. y
// is the sum over spans of
//
//   (scale of the column * scale of the row) * (codes of the column times codes of the row)
//
// in fp32 in the order of K, each product rounded before it is added. The codes of W are found in
// integers of 16 bits. So a row's bits depend neither on its batch, as long as that has kManyRows
// or more, nor on the level. tests/golden/test_rotated_blocks.py says the same in numpy.
#include "products/choices.h"
#include "products/int8_rows.h"
#include "blocks/rounded_blocks.h"

namespace {

constexpr int kSpanBlocks = 2, kSpan = kSpanBlocks * kBlock, kBlockWords = kBlock / 4,
              kSpanWords = kSpan / 4;
static_assert(kSpan == kRotated);

// A span of a panel as it is multiplied. If K ends within a span, its last words are zeros.
struct Span {
  uint32_t words[kSpanWords][kPanel];
  int32_t shifts[kPanel];  // -128 times the sum of the column's codes
  float scales[kPanel];
};

// The largest magnitude that a weight of a span can have, in the units that are rotated. Sums of
// kRotated of them, each with its roundings, fit into 16 bits.
constexpr float kUnits = 508.f;
static_assert(kRotated * 511 < 1 << 15);
constexpr int kFraction = 7;  // bits of a unit in what a code is multiplied by

// Integers as int16, each in both halves of its lane.
inline vs twice(vi v) { return (vs)((v & 0xffff) | v << 16); }

// W columns of a block of K, from `column` of a panel on.
template <int kKind>
class BlockColumns {
  typedef CodeLayout<kKind> L;
  const uint8_t *numbers_, *factors_, *words_;
  const int block_;  // of the group

 public:
  inline __attribute__((always_inline)) BlockColumns(const uint8_t* panel, int64_t block,
                                                     int column)
      : numbers_(panel + block / L::kGroup * L::kGroupBytes + column * 2),
        factors_(numbers_ + L::kNumberBytes - column),
        words_(factors_ + L::kFactorBytes + column * 3),
        block_(block % L::kGroup) {}

  // Of run `set` of the block.
  inline __attribute__((always_inline)) vf scale(int set) const {
    return times(halves(numbers_), block_ * L::kSets + set);
  }
  // What is subtracted.
  inline __attribute__((always_inline)) vf minimum() const {
    if constexpr (!L::kMinimum) return vf{};
    const vf own = halves(numbers_ + kPanel * 2);
    return L::kFactors ? times(own, L::kScales + block_) : -own;
  }
  // The largest magnitude that a weight of the block can have.
  inline __attribute__((always_inline)) vf most() const {
    constexpr float kLeast = -L::kOffset, kMost = (1 << L::kBits) - 1 - L::kOffset;
    vf most{};
    for (int set = 0; set < L::kSets; ++set) {
      const vf scale = this->scale(set), minimum = this->minimum();
      most =
          vmax(most, vmax(magnitude(scale * kLeast - minimum), magnitude(scale * kMost - minimum)));
    }
    return most;
  }

  // The block's weights in units: those of words j in v[2 j] (neighbours 4 j and 4 j + 2) and
  // v[2 j + 1], rotated by runs of 32.
  inline __attribute__((always_inline)) void rotated(vf unit, vs (&v)[2 * kBlockWords]) const {
    vs by[L::kSets];
    for (int set = 0; set < L::kSets; ++set)
      by[set] = twice(nearest(scale(set) * unit * (1 << kFraction)));
    const vs less = L::kMinimum ? twice(nearest(minimum() * unit)) : vs{};
    const vs signs = (vs)(vi{} + (-0x10000 | 1));
#pragma GCC unroll 8
    for (int j = 0; j < kBlockWords; ++j) {
      const vu codes = signed_codes(j);
      const vs factor = by[j * L::kSets / kBlockWords];
      vs even = rounded_shares((vs)codes << 8, factor),
         odd = rounded_shares((vs)(codes & 0xff00ff00), factor);
      if constexpr (L::kMinimum) even -= less, odd -= less;
      const vs pair[] = {even + odd, even - odd};
      for (int i = 0; i < 2; ++i)
        v[2 * j + i] = (vs)((vu)pair[i] << 16 | (vu)pair[i] >> 16) + pair[i] * signs;
    }
#pragma GCC unroll 4
    for (int h = 2; h < 2 * kBlockWords; h *= 2)
#pragma GCC unroll 16
      for (int i = 0; i < 2 * kBlockWords; ++i)
        if (!(i & h)) {
          const vs a = v[i], b = v[i + h];
          v[i] = a + b;
          v[i + h] = a - b;
        }
  }

 private:
  static inline __attribute__((always_inline)) vf magnitude(vf v) {
    return (vf)((vi)v & 0x7fffffff);
  }
  inline __attribute__((always_inline)) vf times(vf numbers, int factor) const {
    if constexpr (!L::kFactors) return numbers;
    return numbers * __builtin_convertvector(integers(factors_ + factor * kPanel), vf);
  }
  inline __attribute__((always_inline)) vu word(int i) const {
    return load_raw<vu>(words_ + i * kPanel * 4);
  }
  // Word j of the block, the offset taken off each byte.
  inline __attribute__((always_inline)) vu signed_codes(int j) const {
    typedef uint8_t vb __attribute__((vector_size(W * 4)));
    const int b = block_;
    vu codes;
    if constexpr (kKind == kQ8_0) {
      codes = word(j);
    } else if constexpr (kKind == kQ4_K) {
      codes = word(b / 2 * 8 + j) >> b % 2 * 4 & kLow4;
    } else if constexpr (kKind == kQ6_K) {
      const vu four = word(b / 4 * 16 + b % 2 * 8 + j) >> b % 4 / 2 * 4,
               two = word(32 + b / 4 * 8 + j) >> b % 4 * 2;
      codes = (four & kLow4) | (two << 4 & kHigh2);
    } else {
      codes = word(j % 4) >> j / 4 * 4 & kLow4;
    }
    if constexpr (L::kOffset) codes = (vu)((vb)codes - (uint8_t)L::kOffset);
    return codes;
  }
};

// Blocks that are converted together: what has to be waited for in one span does not hold up
// others.
constexpr int kTogether = 8;

// The factor that makes 127 of the largest magnitude in v, which is int16.
inline __attribute__((always_inline)) vi factor_of(vs top, vs bottom) {
  const vs least = vs{} + 128;  // with less the factor would not fit into 16 bits
  const vi peaks = (vi)larger(larger(top, -bottom), least), low = peaks << 16 >> 16,
           high = peaks >> 16;
  const vi peak = low > high ? low : high;
  return __builtin_convertvector(kLargest * 0x8000 / __builtin_convertvector(peak, vf), vi);
}

// Writes W columns of a span from their rotated weights, pairs of vectors for each word.
inline void finish_span(const vs* v, int words, vi factor, vf unit, bool by_pairs, int column,
                        Span& span) {
  const vs factors = twice(factor);
  vi sums{};
  for (int i = 0; i < words; ++i) {
    const vu even = (vu)rounded_shares(v[2 * i], factors),
             odd = (vu)rounded_shares(v[2 * i + 1], factors);
    const vu codes = (even & 0x00ff00ff) | (vu)((vus)odd << 8);
    store_raw(span.words[i] + column, codes);
    sums = MulInt8::step(sums, 0x01010101, MulInt8::load_vec(span.words[i] + column));
  }
  for (int i = words; i < kSpanWords; ++i) store_raw(span.words[i] + column, vu{});
  const float rotation = 0x8000 / (by_pairs ? 64.f : 32.f);
  store_raw(span.shifts + column, -128 * sums);
  store(span.scales + column,
        unit > 0 ? rotation / (__builtin_convertvector(factor, vf) * unit) : vf{});
}

// The spans of blocks [first, first + count), for W columns of a panel from `column` on. by_pairs:
// runs are two blocks, else one.
template <int kKind>
void make_columns(const uint8_t* panel, int64_t first, int count, bool by_pairs, int column,
                  Span* spans) {
  typedef BlockColumns<kKind> Block;
  constexpr int kOfBlock = 2 * kBlockWords, kSpans = kTogether / kSpanBlocks;
  constexpr int kShare = CodeLayout<kKind>::kGroupBytes / CodeLayout<kKind>::kGroup / (kPanel / W);
  const uint8_t* ahead =
      panel + (first + count) / CodeLayout<kKind>::kGroup * CodeLayout<kKind>::kGroupBytes +
      column / W * kShare;
  vf units[kSpans] = {};
  for (int b = 0; b < count; ++b) {
    vf& most = units[b / kSpanBlocks];
    most = vmax(most, Block(panel, first + b, column).most());
  }
  for (vf& unit : units) unit = unit < kTiny ? vf{} : kUnits / unit;
  vs v[kTogether * kOfBlock], top[kSpans] = {}, bottom[kSpans] = {};
#pragma GCC unroll 1
  for (int b = 0; b < count; ++b) {
    // Of what is converted next, a part for each vector of columns.
    const uint8_t* share = ahead + b * (kShare * (kPanel / W));
    for (int line = 0; line < kShare; line += 64) __builtin_prefetch(share + line, 0, 2);
    vs rotated[kOfBlock];
    const int s = b / kSpanBlocks;
    Block(panel, first + b, column).rotated(units[s], rotated);
    vs *to = v + b * kOfBlock, most = top[s], least = bottom[s];
    for (int i = 0; i < kOfBlock; ++i) {
      vs own = rotated[i];
      if (by_pairs && b % 2) {
        const vs before = to[i - kOfBlock], sum = before + own;
        own = before - own;
        to[i - kOfBlock] = sum;
        most = larger(most, sum);
        least = smaller(least, sum);
      }
      to[i] = own;
      if (by_pairs && b % 2 == 0) continue;
      most = larger(most, own);
      least = smaller(least, own);
    }
    top[s] = most;
    bottom[s] = least;
  }
  vi factors[kSpans];
  for (int s = 0; s < kSpans; ++s) factors[s] = factor_of(top[s], bottom[s]);
  for (int s = 0; s * kSpanBlocks < count; ++s) {
    const int begin = s * kSpanBlocks,
              end = begin + kSpanBlocks < count ? begin + kSpanBlocks : count;
    finish_span(v + begin * kOfBlock, (end - begin) * kBlockWords, factors[s], units[s], by_pairs,
                column, spans[s]);
  }
}

template <int kKind>
void make_panel(const uint8_t* panel, int64_t blocks, Span* spans) {
  for (int64_t b = 0; b < blocks; b += kTogether, spans += kTogether / kSpanBlocks)
    for (int column = 0; column < kPanel; column += W)
      make_columns<kKind>(panel, b, blocks - b < kTogether ? blocks - b : kTogether,
                          blocks % 2 == 0, column, spans);
}

// The call, with x in 8 bits.
struct RotatedRows {
  const LinearCall& call;
  const uint8_t* codes;  // [rows][k]
  const float* scales;   // [rows][spans]
  int64_t k, spans;
};

// Adds the products of row `row` with a span, whose codes gave these sums, for a vector of columns.
inline __attribute__((always_inline)) void add_span(vf& total, const RotatedRows& x, int64_t row,
                                                    int64_t s, vf scale, vi sums) {
  const vf both = rounded_product(scale, splat(x.scales[row * x.spans + s]));
  total = total + rounded_product(both, __builtin_convertvector(sums, vf));
}

// With so many the totals stay in registers beside the sums of a span, where there are 32.
constexpr int kRowsAtOnce = W == 16 ? 7 : kTileRows;

template <int M>
void span_rows(const RotatedRows& x, int64_t row, int64_t panel, const Span* spans) {
  for (int n = 0; n < kPanel; n += kTileVectors * W) {
    vf total[M][kTileVectors] = {};
    for (int64_t s = 0; s < x.spans; ++s) {
      const Span& span = spans[s];
      vi sums[M][kTileVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v)
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) sums[m][v] = load_raw<vi>(span.shifts + n + v * W);
      const uint32_t* codes = (const uint32_t*)(x.codes + row * x.k + s * kSpan);
#pragma GCC unroll 4
      for (int64_t k = 0; k < kSpanWords; ++k) {
        const MulInt8::vec columns[] = {MulInt8::load_vec(span.words[k] + n),
                                        MulInt8::load_vec(span.words[k] + n + W)};
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const uint32_t word = codes[m * (x.k / 4) + k];
          for (int v = 0; v < kTileVectors; ++v)
            sums[m][v] = MulInt8::step(sums[m][v], word, columns[v]);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) {
        const vf scale = load(span.scales + n + v * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) add_span(total[m][v], x, row + m, s, scale, sums[m][v]);
      }
    }
    store_tile<M>(x.call, row, panel * kPanel + n, total);
  }
}

template <int M = 1>
void some_rows(const RotatedRows& x, Range rows, int64_t panel, const Span* spans) {
  if (rows.size() == M) return span_rows<M>(x, rows.begin, panel, spans);
  if constexpr (M < kRowsAtOnce) some_rows<M + 1>(x, rows, panel, spans);
}

void all_rows(const RotatedRows& x, Range rows, int64_t panel, const Span* spans) {
  const int64_t parts = (rows.size() + kRowsAtOnce - 1) / kRowsAtOnce;
  for (int64_t i = 0; i < parts; ++i) some_rows(x, rows.part(i, parts), panel, spans);
}

#if SP_TILES
// The same for up to two tiles of rows. The calling thread has its Tiles.
void tile_of_rows(const RotatedRows& x, Range rows, int64_t panel, const Span* spans) {
  vf total[2 * kTile][kTileVectors] = {};
  for (int64_t s = 0; s < x.spans; ++s) {
    const Span& span = spans[s];
    PairSums sums;
    static_assert(kSpanWords == kTile);
    const char* codes = (const char*)x.codes + rows.begin * x.k + s * kSpan;
    const auto words = [&](int64_t) { return span.words[0]; };
    if (rows.size() <= kTile)
      multiply_tiles<TileInt8, 1>({codes, nullptr}, x.k, 0, 1, words, sums);
    else
      multiply_tiles<TileInt8, 2>({codes, codes + kTile * x.k}, x.k, 0, 1, words, sums);
    for (int v = 0; v < kTileVectors; ++v) {
      const vf scale = load(span.scales + v * W);
      const vi shift = load_raw<vi>(span.shifts + v * W);
      for (int64_t m = 0; m < rows.size(); ++m)
        add_span(total[m][v], x, rows.begin + m, s, scale,
                 load_raw<vi>(sums.rows[m] + v * W) + shift);
    }
  }
  for (int64_t m = 0; m < rows.size(); ++m) {
    const vf row[1][kTileVectors] = {{total[m][0], total[m][1]}};
    store_tile<1>(x.call, rows.begin + m, panel * kPanel, row);
  }
}

void all_rows_on_tiles(const RotatedRows& x, Range rows, int64_t panel, const Span* spans) {
  for (int64_t row = rows.begin; row < rows.end; row += 2 * kTile)
    tile_of_rows(x, {row, row + 2 * kTile < rows.end ? row + 2 * kTile : rows.end}, panel, spans);
}
#endif

void round_row(const bf16* x, int64_t k, uint8_t* codes, float* scales) {
  thread_local Buffer buffer;
  float* row = (float*)buffer.at_least((k + kRotated) * 4);
  rotate_row(x, k, row);
  for (int64_t at = 0; at < k; at += kSpan, ++scales) {
    const int64_t size = k - at < kSpan ? k - at : kSpan;
    vi top{};
    for (int64_t i = at; i < at + size; i += W) {
      const vi magnitude = (vi)load(row + i) & 0x7fffffff;
      top = magnitude > top ? magnitude : top;
    }
    *scales = round_numbers(row + at, most_of(top), codes + at, size);
  }
}

// A panel is converted once for so many rows, if there are: it costs as much as multiplying
// about 15.
constexpr int64_t kLeastRows = 512;

template <int kKind, class Call>
void multiply(const Call& call, const RotatedRows& x) {
  struct Worker {
    explicit Worker(char* memory) : spans((Span*)memory) {}
#if SP_TILES
    Tiles tiles;
#endif
    Span* spans;
    int64_t panel = -1;  // the one in spans
  };
  const int64_t blocks = x.k / kBlock,
                panel_bytes = blocks / CodeLayout<kKind>::kGroup * CodeLayout<kKind>::kGroupBytes;
  const auto make = [&](int) {
    thread_local Buffer buffer;
    return Worker(buffer.at_least(x.spans * sizeof(Span)));
  };
#if SP_TILES
  const auto of_panel = chosen(kProductInt8, call.rows) == kOnTiles ? all_rows_on_tiles : all_rows;
#else
  const auto of_panel = all_rows;
#endif
  for_panels(
      call, make,
      [&](Worker& worker, int64_t panel, Range rows, bool) {
        if (worker.panel != panel)
          make_panel<kKind>((const uint8_t*)x.call.weight + panel * panel_bytes, blocks,
                            worker.spans);
        worker.panel = panel;
        of_panel(x, rows, panel, worker.spans);
      },
      kLeastRows);
}

}  // namespace

void linear_on_rotated_blocks(const LinearCall& call) {
  thread_local Buffer scratch;
  const int64_t k = call.k_words * 2, spans = (k + kSpan - 1) / kSpan;
  // Whole spans are read, and whole tiles of rows.
  const int64_t held = (call.rows + kRowAlign - 1) / kRowAlign * kRowAlign * k + kSpan;
  uint8_t* codes = (uint8_t*)scratch.at_least(held + call.rows * spans * 4);
  float* scales = (float*)(codes + held);
  for_rows(call.rows, k, call.threads, [=, &call](int64_t row) {
    round_row((const bf16*)call.x + row * k, k, codes + row * k, scales + row * spans);
  });
  const RotatedRows x{call, codes, scales, k, spans};
  with_kind(call.blocks, [&](auto kind) {
    call.gate == kNoGate ? multiply<kind>(call, x) : multiply<kind>(GatedLinearCall(call), x);
  });
}
