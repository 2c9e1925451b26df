// The attention computation: its scratch, the keys that a query row sees, and three groups of
// functions, which attention_pool.h, attention_block.h and attention_run.h define.
#pragma once
#include <type_traits>
#include <variant>

#include "attention/plan.h"
#include "base/simd.h"
#include "attention/strips.h"
#include "attention/tile_attention.h"

namespace {

#if SP_TILES
template <class Mul>
constexpr bool kOnTiles = std::is_same_v<Mul, MulTiles>;
// The Tiles of a thread, if its products need them.
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
  static constexpr int kKeys = kTiles ? 2 * kTile : W;  // ranges of keys are multiples of this
  // Whether a word of the pool is a factor as it is.
  static constexpr bool kReadsWords = !kTiles && sizeof(KV) * P == sizeof(word);

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
  const int64_t dim, value_dim, group, dim_words;
  const int64_t window;
  const PoolReader<KV> reader;
  const float tanh_scale;  // scores are tanh(tanh_scale * q.k) with a soft cap, q.k without
  const float log2_scale;  // probabilities are 2^(log2_scale * (score - maximum))
  // Scratch of this thread.
  word *packed_keys, *packed_values, *queries, *probs;
  float *scores, *state_words;
  float *block_max, *block_sum;  // [query rows] of the current block
  float *keep, *add;             // [query rows] weights of the outputs so far and of the block
  int64_t* positions;            // [query rows]
  Block blocks[2];
  TilesOf<Mul> tiles;

  Attention(const AttentionCall& c, const AttentionWork& w, char* scratch)
      : call(c),
        work(w),
        dim(c.head_dim),
        value_dim(c.value_dim),
        group(c.num_heads / c.num_kv_heads),
        dim_words((dim + P * W - 1) / (P * W) * W),
        window(c.window ? c.window : INT64_MAX),
        reader(c.kv_dtype),
        tanh_scale(c.softcap ? c.scale / c.softcap : 0.f),
        log2_scale((c.softcap ? c.softcap : c.scale) * 1.44269504f) {
    auto take = [&scratch](int64_t bytes) {
      char* p = scratch;
      scratch += (bytes + 63) / 64 * 64;
      return p;
    };
    packed_keys = (word*)take(kBlock * dim * 4);
    packed_values = (word*)take(kBlock * value_dim * 4);
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

  // Words of a head's queries for one word of K. On tiles, a few queries take the columns of a
  // whole tile.
  static int64_t query_columns(int64_t rows) { return kTiles && rows <= kStripRows ? kTile : rows; }

  // Where a head's numbers begin in a row of K and of V.
  int64_t key_begin(int64_t head) const { return head * dim; }
  int64_t value_begin(int64_t head) const { return head * call.value_stride; }

  // Whether the query rows are the lanes of a vector that is multiplied with words of K in place:
  // too many for few_rows_block, and too few to make up for a packed copy of K (one token of many
  // heads that share K).
  static bool are_lanes(int64_t rows) { return kReadsWords && rows > kStripRows && rows <= W; }

  int64_t row_tokens(int32_t row) const { return call.cu_q[row + 1] - call.cu_q[row]; }

  // Position of a segment's first token in its row.
  int64_t position(const Segment& s) const {
    return call.kv_lens[s.row] - row_tokens(s.row) + s.token;
  }

  // The first key that the token at a position sees.
  int64_t first_key(int64_t position) const {
    return position < window ? 0 : position - window + 1;
  }

  // The first block of an item that any of its tokens sees; block1 or more if they see none.
  int32_t first_block(const AttentionItem& item) const {
    int64_t key = INT64_MAX;
    for (int32_t i = 0; i < item.num_segments; ++i) {
      const int64_t first = first_key(position(work.segments[item.segment0 + i]));
      key = first < key ? first : key;
    }
    const int32_t block = (int32_t)(key / kBlock);
    return block < item.block0 ? item.block0 : block;
  }

  // Stores the positions of an item's query rows, and returns their number.
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

  // Rows of K or V that the thread will need next, prefetched a few at a time while it computes:
  // the pool is read in scattered rows, which the hardware cannot predict, and a burst of
  // prefetches would fill its queues.
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

  // attention_pool.h: turns the pool's pages and the batch's queries into words.
  template <class Q>
  void load_queries(const AttentionItem& item, int64_t head, word* to);
  template <class Q>
  void load_turned(const AttentionItem& item, int64_t head, word* to);
  const Block& find(int32_t row, int32_t block, const Block* held);
  inline __attribute__((always_inline)) void load_square(const KV* const* keys, int64_t begin,
                                                         int64_t k, vf (&square)[W]);
  void pack_keys(const Block& block, int64_t begin, Keys keys, Prefetch& prefetch);
  void pack_values(const Block& block, int64_t begin, Keys keys, Prefetch& prefetch);

  // attention_block.h: multiplies one block with some query rows.
  template <int R, int G>
  inline void few_scores(const KV* const* keys, int64_t begin, const word* q, float* to,
                         Prefetch& prefetch);
  template <int R>
  void few_rows_scores(const Block& block, int64_t begin, Keys keys, const word* q,
                       Prefetch& prefetch);
  void few_rows_scores(int64_t rows, const Block& block, int64_t begin, Keys keys, const word* q,
                       Prefetch& prefetch);
  template <bool kSeesAll>
  void softmax_row(const float* s, word* p, Keys seen, Keys keys, float& row_max, float& row_sum);
  void softmax(int64_t row, int64_t rows, Keys keys, int64_t block_key);
  __attribute__((noinline)) void merge_statistics(const Partial& to, const float* part_max,
                                                  const float* part_sum, int64_t rows);
  void merge(const Partial& to, const Partial& part, int64_t rows);
  template <class Columns>
  void merge_output(int64_t row, int64_t rows, Keys keys, const Columns& v, const Partial& to);
  void lane_scores(const Block& block, int64_t begin, Keys keys, const word* q, int64_t rows,
                   Prefetch& prefetch);
  void merge_lanes(const Block& block, int64_t value, Keys keys, int64_t rows, Prefetch& prefetch,
                   const Partial& to);
  void strip_scores(const word* q, Keys keys);
  void merge_strip(int64_t row, int64_t rows, Keys keys, const Partial& to);
  void few_rows_block(const Block& block, int64_t head, const word* q, int64_t rows, Ahead& ahead,
                      const Partial& to);
  void many_rows_block(const Block& block, int64_t head, const word* q, int64_t rows, Ahead& ahead,
                       const Partial& to);

  // Every output is merged by these instructions, no matter where the block's part comes from.
  static inline void merge_vector(float* to, float kept, vf part, float added) {
    store(to, fma(load(to), splat(kept), part * added));
  }

  // attention_run.h: computes items, and merges the results of several items for a row.
  void start(const Partial& s, int64_t rows);
  template <class Q>
  void write_output(const Segment& segment, int64_t head, const Partial& s);
  float whole_sum(const Partial& s, int64_t row, int64_t query_head);
  void finish(const Segment& segment, int64_t head, const Partial& s);
  Partial kept_partial(int32_t row, int64_t block, int64_t head);
  void keep_partials(const AttentionItem& item, int64_t block, int64_t head, const Partial& from);
  void merge_kept(const Segment& s);
  Ahead look_ahead(int32_t index, int64_t head, int32_t block, const Block* held);
  void compute_item(int32_t index, int32_t block0);
  void run(int32_t index);
};

}  // namespace
