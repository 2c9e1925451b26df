// Causal attention over the paged pool. For each block of kBlock keys: scores = queries x K,
// softmax within the block, partial output = probabilities x V; the block's partial (output,
// maximum, sum) is then merged into the running result.
//
// A few query rows (decode) read K and V straight from their pages; more rows share one packed copy
// of the block. Both add up the same products in the same order. Sums are fp32; with AVX512_BF16
// and a bf16 pool the products take bf16 pairs (probabilities are rounded to bf16), else everything
// is fp32.
#include <type_traits>
#include <variant>
#include <vector>

#include "buffer.h"
#include "plan.h"
#include "simd.h"
#include "strips.h"
#include "threads.h"
#include "tile_attention.h"

namespace {

#if SP_TILES
template <class Mul>
constexpr bool kOnTiles = std::is_same_v<Mul, MulTiles>;
// A thread's Tiles, for products that need them.
template <class Mul>
using TilesOf = std::conditional_t<kOnTiles<Mul>, Tiles, std::monostate>;
#else
template <class Mul>
constexpr bool kOnTiles = false;
template <class Mul>
using TilesOf = std::monostate;
#endif

template <class Mul, class KV>
struct Attention {
  typedef typename Mul::word word;
  static constexpr int P = Mul::per_word;
  static constexpr bool kTiles = kOnTiles<Mul>;
  static constexpr int kStrip =
      kTiles ? kTile : kStripRows;  // query rows that meet a packed block together
  static constexpr int kKeys =
      kTiles ? 2 * kTile : W;  // what ranges of keys are whole multiples of

  // Addresses of a block's K and V in the pool (kv head 0), padded with the last key to whole
  // multiples of kKeys.
  struct Block {
    int32_t row = -1, block = -1;
    int64_t num_keys = 0;  // with the padding
    const KV **keys, **values;
  };

  // Keys of a block, [begin, end).
  struct Keys {
    int64_t begin, end;
  };

  const AttentionCall& call;
  const AttentionWork& work;
  const int64_t dim, group, dim_words;
  const int64_t window;
  const float tanh_scale;  // scores are tanh(tanh_scale * q.k) with a soft cap, q.k without
  const float log2_scale;  // probabilities are 2^(log2_scale * (score - maximum))
  // Scratch of this thread.
  word *packed_keys, *packed_values, *queries, *probs;
  float *scores, *state_words;
  float *block_max, *block_sum;  // [query rows] of the block at hand
  float *keep, *add;   // [query rows] what the outputs so far and the block's count in their sum
  int64_t* positions;  // [query rows]
  Block blocks[2];
  TilesOf<Mul> tiles;

  Attention(const AttentionCall& c, const AttentionWork& w, char* scratch)
      : call(c),
        work(w),
        dim(c.head_dim),
        group(c.num_heads / c.num_kv_heads),
        dim_words((dim + P * W - 1) / (P * W) * W),
        window(c.window ? c.window : INT64_MAX),
        tanh_scale(c.softcap ? c.scale / c.softcap : 0.f),
        log2_scale((c.softcap ? c.softcap : c.scale) * 1.44269504f) {
    auto take = [&scratch](int64_t bytes) {
      char* p = scratch;
      scratch += (bytes + 63) / 64 * 64;
      return p;
    };
    packed_keys = (word*)take(kBlock * dim * 4);
    packed_values = (word*)take(kBlock * dim * 4);
    queries = (word*)take(query_words(c) * 4);
    scores = (float*)take(kScoreRows * kBlock * 4);
    probs = (word*)take(kQueryRows * kBlock * 4);
    state_words = (float*)take(max_state_words(c) * 4);
    for (float** row_words : {&block_max, &block_sum, &keep, &add})
      *row_words = (float*)take(kQueryRows * 4);
    positions = (int64_t*)take(kQueryRows * 8);
    for (Block& block : blocks) {
      block.keys = (const KV**)take(kBlock * 8);
      block.values = (const KV**)take(kBlock * 8);
    }
  }

  // Words of a head's queries for one word of K: on tiles the few are columns of a whole tile.
  static int64_t query_columns(int64_t rows) { return kTiles && rows <= kStripRows ? kTile : rows; }

  int64_t row_tokens(int32_t row) const { return call.cu_q[row + 1] - call.cu_q[row]; }

  // Position of a segment's first token in its row.
  int64_t position(const Segment& s) const {
    return call.kv_lens[s.row] - row_tokens(s.row) + s.token;
  }

  // The first key that the token at a position sees.
  int64_t first_key(int64_t position) const {
    return position < window ? 0 : position - window + 1;
  }

  // The first block of an item that any of its tokens sees; block1 or beyond when they see none.
  int32_t first_block(const AttentionItem& item) const {
    int64_t key = INT64_MAX;
    for (int32_t i = 0; i < item.num_segments; ++i) {
      const int64_t first = first_key(position(work.segments[item.segment0 + i]));
      key = first < key ? first : key;
    }
    const int32_t block = (int32_t)(key / kBlock);
    return block < item.block0 ? item.block0 : block;
  }

  // Notes the positions of an item's query rows; -> how many there are.
  int64_t find_positions(const AttentionItem& item) {
    int64_t rows = 0;
    for (int32_t i = 0; i < item.num_segments; ++i) {
      const Segment& s = work.segments[item.segment0 + i];
      for (int64_t t = 0, first = position(s); t < s.tokens; ++t)
        for (int64_t g = 0; g < group; ++g) positions[rows++] = first + t;
    }
    return rows;
  }

  // What a query row sees of the block that begins at block_key.
  Keys seen_by(int64_t row, int64_t block_key) const {
    auto inside = [=](int64_t key) {
      return key < block_key ? 0 : (key - block_key > kBlock ? kBlock : key - block_key);
    };
    return {inside(first_key(positions[row])), inside(positions[row] + 1)};
  }

  // What any of the query rows [row, row + rows) sees of it, in whole multiples of kKeys.
  Keys seen_by_any(int64_t row, int64_t rows, int64_t block_key) const {
    Keys all{kBlock, 0};
    for (const int64_t end = row + rows; row < end; ++row) {
      const Keys one = seen_by(row, block_key);
      if (one.begin == one.end) continue;
      all = {one.begin < all.begin ? one.begin : all.begin, one.end > all.end ? one.end : all.end};
    }
    return all.begin < all.end
               ? Keys{all.begin / kKeys * kKeys, (all.end + kKeys - 1) / kKeys * kKeys}
               : Keys{0, 0};
  }

  template <class Q>
  void load_queries(const AttentionItem& item, int64_t head, word* to) {
    for (int32_t i = 0; i < item.num_segments; ++i) {
      const Segment& s = work.segments[item.segment0 + i];
      const Q* q =
          (const Q*)call.q + (call.cu_q[s.row] + s.token) * call.q_stride + head * group * dim;
      for (int64_t t = 0; t < s.tokens; ++t)
        for (int64_t g = 0; g < group; ++g, to += dim_words) {
          for (int64_t k = dim / P; k < dim_words; ++k) to[k] = 0;
          pack_words(q + t * call.q_stride + g * dim, to, dim);
        }
    }
  }

#if SP_TILES
  // The query rows of an item's head as columns of words, [dim_words][kTile]: for
  // few_scores_on_tiles.
  void load_turned(const AttentionItem& item, int64_t head, word* to) {
    __builtin_memset(to, 0, dim_words * kTile * 4);
    int64_t column = 0;
    for (int32_t i = 0; i < item.num_segments; ++i) {
      const Segment& s = work.segments[item.segment0 + i];
      const bf16* q =
          (const bf16*)call.q + (call.cu_q[s.row] + s.token) * call.q_stride + head * group * dim;
      for (int64_t t = 0; t < s.tokens; ++t)
        for (int64_t g = 0; g < group; ++g, ++column)
          for (int64_t k = 0; k < dim / P; ++k)
            __builtin_memcpy(to + k * kTile + column, q + t * call.q_stride + g * dim + k * P, 4);
    }
  }
#endif

  // The addresses of a block of a row, in the one of the two slots that `held` is not in.
  const Block& find(int32_t row, int32_t block, const Block* held) {
    for (Block& found : blocks)
      if (found.row == row && found.block == block) return found;
    Block& to = blocks[&blocks[0] == held ? 1 : 0];
    to.row = row;
    to.block = block;
    const int32_t* table = call.page_table + call.slots[row] * call.table_stride;
    const int64_t stride = call.num_kv_heads * dim,
                  left = call.kv_lens[row] - (int64_t)block * kBlock;
    const int64_t num_keys = left < kBlock ? left : kBlock;
    int64_t page = (int64_t)block * kBlock / call.page_size,
            offset = (int64_t)block * kBlock % call.page_size;
    for (int64_t j = 0; j < num_keys; ++j) {
      const int64_t at = (table[page] * call.page_size + offset) * stride;
      to.keys[j] = (const KV*)call.k_cache + at;
      to.values[j] = (const KV*)call.v_cache + at;
      if (++offset == call.page_size) {
        offset = 0;
        ++page;
      }
    }
    to.num_keys = (num_keys + kKeys - 1) / kKeys * kKeys;
    for (int64_t j = num_keys; j < to.num_keys; ++j) {
      to.keys[j] = to.keys[num_keys - 1];
      to.values[j] = to.values[num_keys - 1];
    }
    return to;
  }

  // W neighbouring keys, words k .. k + W of each, turned so that square[i] holds word k + i of all
  // of them.
  inline __attribute__((always_inline)) void load_square(const KV* const* keys, int64_t begin,
                                                         int64_t k, vf (&square)[W]) {
    if ((k + W) * P <= dim) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) square[i] = key_words(Mul(), keys[i] + begin, k);
    } else {
      for (int i = 0; i < W; ++i) {
        KV edge[W * P] = {};
        __builtin_memcpy(edge, keys[i] + begin + k * P, (dim - k * P) * sizeof(KV));
        square[i] = key_words(Mul(), edge, 0);
      }
    }
    transpose(square);
  }

  // Rows of K or V that the thread will need next, brought to its cache a few at a time while it
  // computes: the pool is read in scattered rows, which the hardware does not foresee, and a burst
  // of requests would fill its queues.
  struct Prefetch {
    const KV* const* rows = nullptr;
    int64_t begin = 0, bytes = 0, next = 0, num_rows = 0, stride = 0;

    void spread_over(int64_t calls) { stride = (num_rows + calls - 1) / calls; }
    inline __attribute__((always_inline)) void advance() {
      for (int64_t stop = next + stride < num_rows ? next + stride : num_rows; next < stop;
           ++next) {
        const char* row = (const char*)(rows[next] + begin);
        __builtin_prefetch(row, 0, 2);
        for (int64_t byte = 64; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
      }
    }
  };
  struct Ahead {
    Prefetch keys, values;
  };

  // Scores of R query rows with G neighbouring vectors of keys, whose sums do not wait for each
  // other.
  template <int R, int G>
  inline void few_scores(const KV* const* keys, int64_t begin, const word* q, float* to,
                         Prefetch& prefetch) {
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

  template <int R>
  void few_rows_scores(const Block& block, int64_t begin, Keys keys, const word* q,
                       Prefetch& prefetch) {
    int64_t j = keys.begin;
    for (; j + 2 * W <= keys.end; j += 2 * W)
      few_scores<R, 2>(block.keys + j, begin, q, scores + j, prefetch);
    if (j < keys.end) few_scores<R, 1>(block.keys + j, begin, q, scores + j, prefetch);
  }

  void few_rows_scores(int64_t rows, const Block& block, int64_t begin, Keys keys, const word* q,
                       Prefetch& prefetch) {
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

  void pack_keys(const Block& block, int64_t begin, Keys keys,
                 Prefetch& prefetch) {  // packed_keys[j / W][dim_words][W]
    for (int64_t j = keys.begin; j < keys.end; j += W)
      for (int64_t k = 0; k < dim_words; k += W) {
        prefetch.advance();
        vf square[W];
        load_square(block.keys + j, begin, k, square);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store_raw(packed_keys + j * dim_words + (k + i) * W, square[i]);
      }
  }

  void pack_values(const Block& block, int64_t begin, Keys keys,
                   Prefetch& prefetch) {  // packed_values[key words][D]
    const int64_t vectors = dim / W;
    for (int64_t k = keys.begin / P; k < keys.end / P; ++k) {
      prefetch.advance();
      word* to = packed_values + k * dim;
      int n = 0;
      for (; n + 2 <= vectors; n += 2)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
          store_raw(to + (n + i) * W, value_words(Mul(), block.values, k, begin, n, i, 2));
      if (n < vectors) store_raw(to + n * W, value_words(Mul(), block.values, k, begin, n, 0, 1));
    }
  }

  // Scores of one query row to probabilities relative to its maximum over the keys that it sees;
  // zero for the others of `keys`.
  template <bool kSeesAll>
  void softmax_row(const float* s, word* p, Keys seen, Keys keys, float& row_max, float& row_sum) {
    const vi lanes = lane_index();
    auto visible = [=](int64_t j, vf v, vf otherwise) {
      if constexpr (kSeesAll) return v;
      return select((lanes >= (int32_t)(seen.begin - j)) & (lanes < (int32_t)(seen.end - j)), v,
                    otherwise);
    };
    vf top = splat(-__builtin_inff());
    for (int64_t j = keys.begin; j < keys.end; j += W)
      top = vmax(top, visible(j, load(s + j), top));
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

  void softmax(int64_t row, int64_t rows, Keys keys, int64_t block_key) {
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

  // Takes a block's maxima and sums into those of `to`, and leaves in keep and add what the outputs
  // of the two count in their sum.
  __attribute__((noinline)) void merge_statistics(const Partial& to, const float* part_max,
                                                  const float* part_sum, int64_t rows) {
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

  // Every output is merged by these instructions, wherever the block's part comes from.
  static inline void merge_vector(float* to, float kept, vf part, float added) {
    store(to, fma(load(to), splat(kept), part * added));
  }

  void merge(const Partial& to, const Partial& part, int64_t rows) {
    merge_statistics(to, part.max, part.sum, rows);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = r * dim; i < (r + 1) * dim; i += W)
        merge_vector(to.out + i, keep[r], load(part.out + i), add[r]);
  }

  // Merges probabilities x V of the query rows [row, row + rows) into their outputs; v gives the
  // vectors of V.
  template <class Columns>
  void merge_output(int64_t row, int64_t rows, Keys keys, const Columns& v, const Partial& to) {
    const int64_t k0 = keys.begin / P;
    multiply<Mul>(
        rows, probs + row * (kBlock / P) + k0, kBlock / P, keys.end / P - k0, 0, dim / W,
        [&](int64_t k, int64_t n, int i, int strip)
            __attribute__((always_inline)) { return v(k0 + k, n, i, strip); },
        [&](int m, int64_t n, vf sum) __attribute__((always_inline)) {
          merge_vector(to.out + (row + m) * dim + n * W, keep[row + m], sum, add[row + m]);
        });
  }

  // Of the keys of a packed block, for the query rows of a strip.
  void strip_scores(const word* q, Keys keys) {
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

  // As merge_output, of packed values.
  void merge_strip(int64_t row, int64_t rows, Keys keys, const Partial& to) {
#if SP_TILES
    alignas(64) float sums[kTile * 4 * kTile];
    const int64_t k0 = keys.begin / P;
    auto take = [&](auto columns, int64_t n) {
      strip_on_tiles<columns>(probs + row * (kBlock / P) + k0, kBlock / P * 4,
                              packed_values + k0 * dim + n, kTile, kTile * dim, dim * 4,
                              (keys.end - keys.begin) / kKeys, sums, columns * kTile * 4);
      for (int64_t m = 0; m < rows; ++m)
#pragma GCC unroll 4
        for (int i = 0; i < columns; ++i)
          merge_vector(to.out + (row + m) * dim + n + i * kTile, keep[row + m],
                       load(sums + (m * columns + i) * kTile), add[row + m]);
    };
    int64_t n = 0;
    for (; n + 4 * kTile <= dim; n += 4 * kTile) take(std::integral_constant<int, 4>(), n);
    for (; n < dim; n += kTile) take(std::integral_constant<int, 1>(), n);
#endif
  }

  // One block against a head's query rows q, few enough to read K and V in place; the results are
  // merged into `to`.
  void few_rows_block(const Block& block, int64_t begin, const word* q, int64_t rows, Ahead& ahead,
                      const Partial& to) {
    const int64_t block_key = (int64_t)block.block * kBlock;
    const Keys keys = seen_by_any(0, rows, block_key);
#if SP_TILES
    if constexpr (kTiles) {
      ahead.keys.spread_over((keys.end - keys.begin) / kKeys * (dim_words / kTile));
      few_scores_on_tiles(block.keys, begin, keys.begin, keys.end, dim, dim_words, q, rows, scores,
                          [&] { ahead.keys.advance(); });
      softmax(0, rows, keys, block_key);
      merge_statistics(to, block_max, block_sum, rows);
      ahead.values.spread_over((keys.end - keys.begin) / P);
      pack_values(block, begin, keys, ahead.values);
      return merge_strip(0, rows, keys, to);
    }
#endif
    ahead.keys.spread_over((keys.end - keys.begin) / W * (dim_words / W));
    few_rows_scores(rows, block, begin, keys, q, ahead.keys);
    softmax(0, rows, keys, block_key);
    merge_statistics(to, block_max, block_sum, rows);
    ahead.values.spread_over((keys.end - keys.begin) / P);
    auto columns = [&, values = block.values](int64_t k, int64_t n, int i, int strip)
                       __attribute__((always_inline)) {
                         if (i == 0) ahead.values.advance();
                         return Mul::as_vec(value_words(Mul(), values, k, begin, n, i, strip));
                       };
    merge_output(0, rows, keys, columns, to);
  }

  // The same for any number of query rows, on packed copies of K and V.
  void many_rows_block(const Block& block, int64_t begin, const word* q, int64_t rows, Ahead& ahead,
                       const Partial& to) {
    const int64_t block_key = (int64_t)block.block * kBlock;
    const Keys all = seen_by_any(0, rows, block_key);
    Keys of_strip[kQueryRows / kStrip + 1];
    ahead.keys.spread_over((all.end - all.begin) / W * (dim_words / W));
    pack_keys(block, begin, all, ahead.keys);
    for (int64_t row = 0; row < rows; row += kStrip) {
      const int64_t count = rows - row < kStrip ? rows - row : kStrip;
      const Keys keys = of_strip[row / kStrip] = seen_by_any(row, count, block_key);
      if constexpr (kTiles)
        strip_scores(q + row * dim_words, keys);
      else
        multiply<Mul>(count, q + row * dim_words, dim_words, dim_words, keys.begin / W,
                      keys.end / W, Packed<Mul>{packed_keys, dim_words * W, W},
                      [&](int m, int64_t n, vf sum) __attribute__((always_inline)) {
                        store(scores + m * kBlock + n * W, sum);
                      });
      softmax(row, count, keys, block_key);
    }
    merge_statistics(to, block_max, block_sum, rows);
    ahead.values.spread_over((all.end - all.begin) / P);
    pack_values(block, begin, all, ahead.values);
    for (int64_t row = 0; row < rows; row += kStrip) {
      const int64_t count = rows - row < kStrip ? rows - row : kStrip;
      if constexpr (kTiles)
        merge_strip(row, count, of_strip[row / kStrip], to);
      else
        merge_output(row, count, of_strip[row / kStrip], Packed<Mul>{packed_values, W, dim}, to);
    }
  }

  // A result of no block: merging into it leaves what is merged.
  void start(const Partial& s, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      s.max[r] = -__builtin_inff();
      s.sum[r] = 0.f;
    }
    for (int64_t i = 0; i < rows * dim; i += W) store(s.out + i, splat(-0.f));
  }

  template <class Q>
  void write_output(const Segment& segment, int64_t head, const Partial& s) {
    Q* out = (Q*)call.out +
             ((call.cu_q[segment.row] + segment.token) * call.num_heads + head * group) * dim;
    for (int64_t t = 0, r = 0; t < segment.tokens; ++t)
      for (int64_t g = 0; g < group; ++g, ++r) {
        const float factor = 1.f / s.sum[r];
        Q* to = out + (t * call.num_heads + g) * dim;
        for (int64_t i = 0; i < dim; i += W) store(to + i, load(s.out + r * dim + i) * factor);
      }
  }

  void finish(const Segment& segment, int64_t head, const Partial& s) {
    call.q_dtype == kBF16 ? write_output<bf16>(segment, head, s)
                          : write_output<float>(segment, head, s);
  }

  Partial kept_partial(int32_t row, int64_t block, int64_t head) {
    const int64_t rows = row_tokens(row) * group;
    return partial_at(work.partials + work.partial_begin[row] +
                          (block * call.num_kv_heads + head) * partial_words(rows, dim),
                      rows, dim);
  }

  // Partials of the rows of an item to where the rows' last finisher finds them.
  void keep_partials(const AttentionItem& item, int64_t block, int64_t head, const Partial& from) {
    int64_t first = 0;
    for (int32_t i = 0; i < item.num_segments; ++i) {
      const Segment& s = work.segments[item.segment0 + i];
      const Partial to = kept_partial(s.row, block, head);
      const int64_t rows = s.tokens * group;
      __builtin_memcpy(to.out, from.out + first * dim, rows * dim * 4);
      __builtin_memcpy(to.max, from.max + first, rows * 4);
      __builtin_memcpy(to.sum, from.sum + first, rows * 4);
      first += rows;
    }
  }

  void merge_kept(const Segment& s) {
    const int64_t rows = s.tokens * group, num_blocks = (call.kv_lens[s.row] + kBlock - 1) / kBlock;
    const int64_t first = first_key(position(s)) / kBlock,
                  merged = work.merged_blocks[s.row];  // the ones before `first` were skipped
    for (int64_t head = 0; head < call.num_kv_heads; ++head) {
      const Partial state =
          first < merged ? kept_partial(s.row, 0, head) : partial_at(state_words, rows, dim);
      if (first >= merged) start(state, rows);
      for (int64_t block = first < merged ? merged : first; block < num_blocks; ++block)
        merge(state, kept_partial(s.row, block, head), rows);
      finish(s, head, state);
    }
  }

  // What comes after a head's turn at a block.
  Ahead look_ahead(int32_t index, int64_t head, int32_t block, const Block* held) {
    const AttentionItem* item = &work.items[index];
    if (head + 1 < item->head1) {
      ++head;
    } else if (block + 1 < item->block1) {
      ++block;
      head = item->head0;
    } else if (index + 1 < work.num_items) {
      ++item;
      block = first_block(*item);
      head = item->head0;
      if (block >= item->block1) return {};
    } else {
      return {};
    }
    const Block& next = find(work.segments[item->segment0].row, block, held);
    const int64_t bytes = dim * sizeof(KV);
    return {{next.keys, head * dim, bytes, 0, next.num_keys, 0},
            {next.values, head * dim, bytes, 0, next.num_keys, 0}};
  }

  void compute_item(int32_t index, int32_t block0) {
    const AttentionItem& item = work.items[index];
    const Segment& first = work.segments[item.segment0];
    const int64_t rows = find_positions(item);
    const bool merges = !item.partial || item.block0 == 0;
    auto state = [&](int64_t head) {
      return partial_at(state_words + (head - item.head0) * partial_words(rows, dim), rows, dim);
    };
    auto queries_of = [&](int64_t head) {
      return queries + (head - item.head0) * query_columns(rows) * dim_words;
    };
    for (int64_t head = item.head0; head < item.head1; ++head) {
#if SP_TILES
      if constexpr (kTiles) {
        rows <= kStripRows ? load_turned(item, head, queries_of(head))
                           : load_queries<bf16>(item, head, queries_of(head));
        start(state(head), rows);
        continue;
      }
#endif
      if constexpr (P == 2)
        load_queries<bf16>(item, head, queries_of(head));
      else
        call.q_dtype == kBF16 ? load_queries<bf16>(item, head, queries_of(head))
                              : load_queries<float>(item, head, queries_of(head));
      start(state(head), rows);
    }
    for (int32_t b = block0; b < item.block1; ++b) {
      const Block& block = find(first.row, b, nullptr);
      for (int64_t head = item.head0; head < item.head1; ++head) {
        Ahead ahead = look_ahead(index, head, b, &block);
        if (rows <= kStripRows)
          few_rows_block(block, head * dim, queries_of(head), rows, ahead, state(head));
        else
          many_rows_block(block, head * dim, queries_of(head), rows, ahead, state(head));
        if (merges) continue;
        keep_partials(item, b, head, state(head));
        start(state(head), rows);
      }
    }
    if (!merges) return;
    for (int64_t head = item.head0; head < item.head1; ++head)
      item.partial ? keep_partials(item, 0, head, state(head)) : finish(first, head, state(head));
  }

  void run(int32_t index) {
    const AttentionItem& item = work.items[index];
    const int32_t block0 = first_block(item);
    if (block0 < item.block1) compute_item(index, block0);
    if (!item.partial) return;
    for (int32_t i = 0; i < item.num_segments; ++i) {
      const Segment& s = work.segments[item.segment0 + i];
      if (__atomic_sub_fetch(&work.open_items[s.row], 1, __ATOMIC_ACQ_REL) == 0) merge_kept(s);
    }
  }
};

template <class Mul, class KV>
void attention(const AttentionCall& call, const AttentionWork& work) {
  auto make = [&](int thread) {
    return Attention<Mul, KV>(call, work, work.scratch + thread * work.scratch_bytes);
  };
  for_units(work.num_items, call.threads, make,
            [](Attention<Mul, KV>& attention, int64_t item) { attention.run(item); });
}

}  // namespace

extern "C" {

void* setpoint_plan_create() { return new AttentionPlan; }

void setpoint_plan_free(void* plan) { delete static_cast<AttentionPlan*>(plan); }

// Reads everything of `call` but q, out, the caches and what differs between layers (scale,
// softcap, window).
void setpoint_attention_plan(const AttentionCall* call) { call->plan->build(*call); }

void setpoint_attention(const AttentionCall* call_pointer) {
  const AttentionCall& call = *call_pointer;
  const AttentionPlan& plan = *call.plan;
  thread_local std::vector<int32_t> open_items;
  thread_local Buffer scratch, partials;
  open_items = plan.open_items;
  const int64_t per_thread = attention_scratch_bytes(call);
  const AttentionWork work{plan.segments.data(),
                           plan.items.data(),
                           static_cast<int32_t>(plan.items.size()),
                           open_items.data(),
                           plan.partial_begin.data(),
                           plan.merged_blocks.data(),
                           reinterpret_cast<float*>(partials.at_least(plan.num_partial_words * 4)),
                           scratch.at_least(per_thread * call.threads),
                           per_thread};
#if SP_TILES
  if (call.q_dtype == kBF16 && call.kv_dtype == kBF16) return attention<MulTiles, bf16>(call, work);
#elif defined(__AVX512BF16__)
  if (call.q_dtype == kBF16 && call.kv_dtype == kBF16) return attention<MulBF16, bf16>(call, work);
#endif
  call.kv_dtype == kBF16 ? attention<MulF32, bf16>(call, work)
                         : attention<MulF32, float>(call, work);
}

}  // extern "C"
