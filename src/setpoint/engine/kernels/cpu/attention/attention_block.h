// One block of keys with some query rows: scores, softmax within the block, and the block's part of
// the output, merged into the rows' results so far.
#pragma once
#include "attention/attention.h"

namespace {

// Scores of R query rows with G neighbouring vectors of keys, whose sums do not wait for each
// other.
template <class Mul, class KV>
template <int R, int G>
inline void Attention<Mul, KV>::few_scores(const KV* const* keys, int64_t begin, const word* q,
                                           float* to, Prefetch& prefetch) {
  vf acc[G][R];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[g][r] = vf{};
  for (int64_t k = 0; k < dim_words; k += W)
#pragma GCC unroll 1  // else the words of q are kept for the next g, in memory, four times as large
                      // as they are
    for (int g = 0; g < G; ++g) {
      prefetch.advance();
      vf square[W];
      load_square(keys + g * W, begin, k, square);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          acc[g][r] = Mul::step(acc[g][r], q[r * dim_words + k + i], Mul::as_vec(square[i]));
    }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(to + r * kBlock + g * W, acc[g][r]);
}

template <class Mul, class KV>
template <int R>
inline void Attention<Mul, KV>::few_rows_scores(const Block& block, int64_t begin, Keys keys,
                                                const word* q, Prefetch& prefetch) {
  int64_t j = keys.begin;
  for (; j + 2 * W <= keys.end; j += 2 * W)
    few_scores<R, 2>(block.keys + j, begin, q, scores + j, prefetch);
  if (j < keys.end) few_scores<R, 1>(block.keys + j, begin, q, scores + j, prefetch);
}

template <class Mul, class KV>
inline void Attention<Mul, KV>::few_rows_scores(int64_t rows, const Block& block, int64_t begin,
                                                Keys keys, const word* q, Prefetch& prefetch) {
  switch (rows) {
    case 1:
      return few_rows_scores<1>(block, begin, keys, q, prefetch);
    case 2:
      return few_rows_scores<2>(block, begin, keys, q, prefetch);
    case 3:
      return few_rows_scores<3>(block, begin, keys, q, prefetch);
    case 4:
      return few_rows_scores<4>(block, begin, keys, q, prefetch);
    case 5:
      return few_rows_scores<5>(block, begin, keys, q, prefetch);
    case 6:
      return few_rows_scores<6>(block, begin, keys, q, prefetch);
  }
}

// Scores of one query row to probabilities relative to its maximum over the keys that it sees;
// zero for the others of `keys`.
template <class Mul, class KV>
template <bool kSeesAll>
inline void Attention<Mul, KV>::softmax_row(const float* s, word* p, Keys seen, Keys keys,
                                            float& row_max, float& row_sum) {
  const vi lanes = lane_index();
  auto visible = [=](int64_t j, vf v, vf otherwise) {
    if constexpr (kSeesAll) return v;
    return select((lanes >= (int32_t)(seen.begin - j)) & (lanes < (int32_t)(seen.end - j)), v,
                  otherwise);
  };
  vf top = splat(-__builtin_inff());
  for (int64_t j = keys.begin; j < keys.end; j += W) top = vmax(top, visible(j, load(s + j), top));
  row_max = max(top);
  vf total = vf{};
  for (int64_t j = keys.begin; j < keys.end; j += W) {
    const vf e = visible(j, exp2<P == 2>((load(s + j) - row_max) * log2_scale), vf{});
    total = total + e;
    if constexpr (P == 1)
      store(p + j, e);
    else
      store((bf16*)p + j, e);
  }
  row_sum = sum(total);
}

template <class Mul, class KV>
inline void Attention<Mul, KV>::softmax(int64_t row, int64_t rows, Keys keys, int64_t block_key) {
  for (int64_t m = 0; m < rows; ++m) {
    float* s = scores + m * kBlock;
    word* p = probs + (row + m) * (kBlock / P);
    const Keys seen = seen_by(row + m, block_key);
    if (tanh_scale)
      for (int64_t j = keys.begin; j < keys.end; j += W)
        store(s + j, tanh(load(s + j) * tanh_scale));
    if (seen.begin <= keys.begin && keys.end <= seen.end)
      softmax_row<true>(s, p, seen, keys, block_max[row + m], block_sum[row + m]);
    else
      softmax_row<false>(s, p, seen, keys, block_max[row + m], block_sum[row + m]);
  }
}

// Merges a block's maxima and sums into those of `to`, and stores in keep and add the weights of
// the two outputs in the merged one.
template <class Mul, class KV>
__attribute__((noinline)) void Attention<Mul, KV>::merge_statistics(const Partial& to,
                                                                    const float* part_max,
                                                                    const float* part_sum,
                                                                    int64_t rows) {
  for (int64_t r = 0; r < rows; r += W) {
    const vf before = load(to.max + r), here = load(part_max + r), top = vmax(before, here);
    const vf base = select(top == splat(-__builtin_inff()), vf{},
                           top);  // a row that has seen nothing yet: 0, not NaN
    const vf kept = exp2((before - base) * log2_scale), added = exp2((here - base) * log2_scale);
    store(to.max + r, top);
    store(to.sum + r, fma(load(to.sum + r), kept, load(part_sum + r) * added));
    store(keep + r, kept);
    store(add + r, added);
  }
}

template <class Mul, class KV>
inline void Attention<Mul, KV>::merge(const Partial& to, const Partial& part, int64_t rows) {
  merge_statistics(to, part.max, part.sum, rows);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = r * value_dim; i < (r + 1) * value_dim; i += W)
      merge_vector(to.out + i, keep[r], load(part.out + i), add[r]);
}

// Merges probabilities x V of the query rows [row, row + rows) into their outputs; v gives the
// vectors of V.
template <class Mul, class KV>
template <class Columns>
inline void Attention<Mul, KV>::merge_output(int64_t row, int64_t rows, Keys keys, const Columns& v,
                                             const Partial& to) {
  const int64_t k0 = keys.begin / P;
  multiply<Mul>(
      rows, probs + row * (kBlock / P) + k0, kBlock / P, keys.end / P - k0, 0, value_dim / W,
      [&](int64_t k, int64_t n, int i, int strip)
          __attribute__((always_inline)) { return v(k0 + k, n, i, strip); },
      [&](int m, int64_t n, vf sum) __attribute__((always_inline)) {
        merge_vector(to.out + (row + m) * value_dim + n * W, keep[row + m], sum, add[row + m]);
      });
}

// Scores of query rows that are lanes, q [dim_words][W], with the keys of a block.
template <class Mul, class KV>
inline void Attention<Mul, KV>::lane_scores(const Block& block, int64_t begin, Keys keys,
                                            const word* q, int64_t rows, Prefetch& prefetch) {
  constexpr int kWords = 4;  // of a key, for which its address is loaded once
  for (int64_t j = keys.begin; j < keys.end; j += W) {
    vf acc[W] = {};
    for (int64_t k = 0; k < dim / P; k += kWords) {
      if (k % W == 0) prefetch.advance();
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        const word* key = (const word*)(block.keys[j + i] + begin) + k;
#pragma GCC unroll 4
        for (int n = 0; n < kWords; ++n)
          acc[i] = Mul::step(acc[i], key[n], Mul::load_vec(q + (k + n) * W));
      }
    }
    transpose(acc);
    for (int64_t m = 0; m < rows; ++m) store(scores + m * kBlock + j, acc[m]);
  }
}

// As merge_output, for query rows that are lanes, with V in place. Rows beyond the last are
// multiplied, too, and left out.
template <class Mul, class KV>
inline void Attention<Mul, KV>::merge_lanes(const Block& block, int64_t value, Keys keys,
                                            int64_t rows, Prefetch& prefetch, const Partial& to) {
  constexpr int kRows = 8;
  const int64_t k0 = keys.begin / P;
  for (int64_t row = 0; row < rows; row += kRows)
    for (int64_t n = 0; n < value_dim / W; n += value_dim / W - n < 2 ? 1 : 2) {
      prefetch.advance();
      auto columns = [&, values = block.values, reader = reader](
                         int64_t k, int64_t n, int i, int strip) __attribute__((always_inline)) {
        return Mul::as_vec(value_words(Mul(), reader, values, k0 + k, value, n, i, strip));
      };
      auto merged = [&](int m, int64_t n, vf sum) __attribute__((always_inline)) {
        if (row + m < rows)
          merge_vector(to.out + (row + m) * value_dim + n * W, keep[row + m], sum, add[row + m]);
      };
      const word* p = probs + row * (kBlock / P) + k0;
      const int64_t words = keys.end / P - k0;
      value_dim / W - n < 2 ? strip<Mul, kRows, 1>(p, kBlock / P, words, n, columns, merged)
                            : strip<Mul, kRows, 2>(p, kBlock / P, words, n, columns, merged);
    }
}

// Scores with the keys of a packed block, for the query rows of a strip.
template <class Mul, class KV>
inline void Attention<Mul, KV>::strip_scores(const word* q, Keys keys) {
#if SP_TILES
  auto take = [&](auto groups, int64_t j) {
    strip_on_tiles<groups>(q, dim_words * 4, packed_keys + j * dim_words, dim_words * kTile,
                           kTile * kTile, kTile * 4, dim_words / kTile, scores + j, kBlock * 4);
  };
  int64_t j = keys.begin;
  for (; j + 4 * kTile <= keys.end; j += 4 * kTile) take(std::integral_constant<int, 4>(), j);
  if (j < keys.end) take(std::integral_constant<int, 2>(), j);
#endif
}

// As merge_output, with packed values.
template <class Mul, class KV>
inline void Attention<Mul, KV>::merge_strip(int64_t row, int64_t rows, Keys keys,
                                            const Partial& to) {
#if SP_TILES
  alignas(64) float sums[kTile * 4 * kTile];
  const int64_t k0 = keys.begin / P;
  auto take = [&](auto columns, int64_t n) {
    strip_on_tiles<columns>(probs + row * (kBlock / P) + k0, kBlock / P * 4,
                            packed_values + k0 * value_dim + n, kTile, kTile * value_dim,
                            value_dim * 4, (keys.end - keys.begin) / kKeys, sums,
                            columns * kTile * 4);
    for (int64_t m = 0; m < rows; ++m)
#pragma GCC unroll 4
      for (int i = 0; i < columns; ++i)
        merge_vector(to.out + (row + m) * value_dim + n + i * kTile, keep[row + m],
                     load(sums + (m * columns + i) * kTile), add[row + m]);
  };
  int64_t n = 0;
  for (; n + 4 * kTile <= value_dim; n += 4 * kTile) take(std::integral_constant<int, 4>(), n);
  for (; n < value_dim; n += kTile) take(std::integral_constant<int, 1>(), n);
#endif
}

// One block against a head's query rows q, few enough to read K and V in place; the results are
// merged into `to`.
template <class Mul, class KV>
inline void Attention<Mul, KV>::few_rows_block(const Block& block, int64_t head, const word* q,
                                               int64_t rows, Ahead& ahead, const Partial& to) {
  const int64_t begin = key_begin(head), value = value_begin(head);
  const int64_t block_key = (int64_t)block.block * kBlock;
  const Keys keys = seen_by_any(0, rows, block_key);
#if SP_TILES
  if constexpr (kTiles) {
    ahead.keys.spread_over((keys.end - keys.begin) / kKeys * (dim_words / kTile));
    few_scores_on_tiles(reader, block.keys, begin, keys.begin, keys.end, dim, dim_words, q, rows,
                        scores, [&] { ahead.keys.advance(); });
    softmax(0, rows, keys, block_key);
    merge_statistics(to, block_max, block_sum, rows);
    ahead.values.spread_over((keys.end - keys.begin) / P);
    pack_values(block, value, keys, ahead.values);
    return merge_strip(0, rows, keys, to);
  }
#endif
  ahead.keys.spread_over((keys.end - keys.begin) / W * (dim_words / W));
  few_rows_scores(rows, block, begin, keys, q, ahead.keys);
  softmax(0, rows, keys, block_key);
  merge_statistics(to, block_max, block_sum, rows);
  ahead.values.spread_over((keys.end - keys.begin) / P);
  auto columns = [&, values = block.values, reader = reader](
                     int64_t k, int64_t n, int i, int strip) __attribute__((always_inline)) {
    if (i == 0) ahead.values.advance();
    return Mul::as_vec(value_words(Mul(), reader, values, k, value, n, i, strip));
  };
  merge_output(0, rows, keys, columns, to);
}

// The same for any number of query rows, on packed copies of K and V.
template <class Mul, class KV>
inline void Attention<Mul, KV>::many_rows_block(const Block& block, int64_t head, const word* q,
                                                int64_t rows, Ahead& ahead, const Partial& to) {
  const int64_t block_key = (int64_t)block.block * kBlock;
  const Keys all = seen_by_any(0, rows, block_key);
  Keys of_strip[kQueryRows / kStrip + 1];
  ahead.keys.spread_over((all.end - all.begin) / W * (dim_words / W));
  if constexpr (kReadsWords)
    if (are_lanes(rows)) {
      lane_scores(block, key_begin(head), all, q, rows, ahead.keys);
      softmax(0, rows, all, block_key);
      merge_statistics(to, block_max, block_sum, rows);
      ahead.values.spread_over(value_dim / W);
      return merge_lanes(block, value_begin(head), all, rows, ahead.values, to);
    }
  pack_keys(block, key_begin(head), all, ahead.keys);
  for (int64_t row = 0; row < rows; row += kStrip) {
    const int64_t count = rows - row < kStrip ? rows - row : kStrip;
    const Keys keys = of_strip[row / kStrip] = seen_by_any(row, count, block_key);
    if constexpr (kTiles)
      strip_scores(q + row * dim_words, keys);
    else
      multiply<Mul>(count, q + row * dim_words, dim_words, dim_words, keys.begin / W, keys.end / W,
                    Packed<Mul>{packed_keys, dim_words * W, W},
                    [&](int m, int64_t n, vf sum) __attribute__((always_inline)) {
                      store(scores + m * kBlock + n * W, sum);
                    });
    softmax(row, count, keys, block_key);
  }
  merge_statistics(to, block_max, block_sum, rows);
  ahead.values.spread_over((all.end - all.begin) / P);
  pack_values(block, value_begin(head), all, ahead.values);
  for (int64_t row = 0; row < rows; row += kStrip) {
    const int64_t count = rows - row < kStrip ? rows - row : kStrip;
    if constexpr (kTiles)
      merge_strip(row, count, of_strip[row / kStrip], to);
    else
      merge_output(row, count, of_strip[row / kStrip], Packed<Mul>{packed_values, W, value_dim},
                   to);
  }
}

}  // namespace
