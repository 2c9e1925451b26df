// Causal attention over the paged pool. For each block of kBlock keys: scores = queries x K, softmax within the block, partial output =
// probabilities x V; the block's partial (output, maximum, sum) is then merged into the running result.
//
// A few query rows (decode) read K and V straight from their pages; more rows share one packed copy of the block. Both add up the
// same products in the same order. Sums are fp32; with AVX512_BF16 and a bf16 pool the products take bf16 pairs (probabilities are
// rounded to bf16), else everything is fp32.
#include <vector>

#include "buffer.h"
#include "plan.h"
#include "simd.h"
#include "strips.h"
#include "threads.h"

namespace {

template <class Mul, class KV>
struct Attention {
  typedef typename Mul::word word;
  static constexpr int P = Mul::per_word;

  // Addresses of a block's K and V in the pool (kv head 0), padded with the last key to whole vectors.
  struct Block {
    int32_t row = -1, block = -1;
    int64_t num_keys = 0;  // with the padding
    const KV **keys, **values;
  };

  const AttentionCall& call;
  const AttentionWork& work;
  const int64_t dim, group, dim_words;
  const int64_t window;
  const float tanh_scale;  // scores are tanh(tanh_scale * q.k) with a soft cap, q.k without
  const float log2_scale;  // probabilities are 2^(log2_scale * (score - maximum))
  // Scratch of this thread.
  word *packed_keys, *packed_values, *queries, *probs;
  float *scores, *state_words, *partial_of_block;
  Block blocks[2];

  Attention(const AttentionCall& c, const AttentionWork& w, char* scratch)
      : call(c), work(w), dim(c.head_dim), group(c.num_heads / c.num_kv_heads), dim_words((dim + P * W - 1) / (P * W) * W),
        window(c.window ? c.window : INT64_MAX), tanh_scale(c.softcap ? c.scale / c.softcap : 0.f),
        log2_scale((c.softcap ? c.softcap : c.scale) * 1.44269504f) {
    auto take = [&scratch](int64_t bytes) {
      char* p = scratch;
      scratch += bytes;
      return p;
    };
    packed_keys = (word*)take(kBlock * dim * 4);
    packed_values = (word*)take(kBlock * dim * 4);
    queries = (word*)take(kQueryRows * dim * 4);
    scores = (float*)take(kQueryRows * kBlock * 4);
    probs = (word*)take(kQueryRows * kBlock * 4);
    state_words = (float*)take(partial_words(kQueryRows, dim) * 4);
    partial_of_block = (float*)take(partial_words(kQueryRows, dim) * 4);
    for (Block& block : blocks) {
      block.keys = (const KV**)take(kBlock * 8);
      block.values = (const KV**)take(kBlock * 8);
    }
  }

  int64_t row_tokens(int32_t row) const { return call.cu_q[row + 1] - call.cu_q[row]; }

  // Position of a segment's first token in its row.
  int64_t position(const Segment& s) const { return call.kv_lens[s.row] - row_tokens(s.row) + s.token; }

  // The first key that the token at a position sees.
  int64_t first_key(int64_t position) const { return position < window ? 0 : position - window + 1; }

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

  int64_t query_rows(const AttentionItem& item) const {
    int64_t rows = 0;
    for (int32_t i = 0; i < item.num_segments; ++i) rows += work.segments[item.segment0 + i].tokens * group;
    return rows;
  }

  template <class Q>
  void load_queries(const AttentionItem& item, int64_t head) {
    word* to = queries;
    for (int32_t i = 0; i < item.num_segments; ++i) {
      const Segment& s = work.segments[item.segment0 + i];
      const Q* q = (const Q*)call.q + (call.cu_q[s.row] + s.token) * call.q_stride + head * group * dim;
      for (int64_t t = 0; t < s.tokens; ++t)
        for (int64_t g = 0; g < group; ++g, to += dim_words) {
          for (int64_t k = dim / P; k < dim_words; ++k) to[k] = 0;
          pack_words(q + t * call.q_stride + g * dim, to, dim);
        }
    }
  }

  // The addresses of a block of a row, in the one of the two slots that `keep` does not hold.
  const Block& find(int32_t row, int32_t block, const Block* keep) {
    for (Block& found : blocks)
      if (found.row == row && found.block == block) return found;
    Block& to = blocks[&blocks[0] == keep ? 1 : 0];
    to.row = row;
    to.block = block;
    const int32_t* table = call.page_table + call.slots[row] * call.table_stride;
    const int64_t stride = call.num_kv_heads * dim, left = call.kv_lens[row] - (int64_t)block * kBlock;
    const int64_t num_keys = left < kBlock ? left : kBlock;
    int64_t page = (int64_t)block * kBlock / call.page_size, offset = (int64_t)block * kBlock % call.page_size;
    for (int64_t j = 0; j < num_keys; ++j) {
      const int64_t at = (table[page] * call.page_size + offset) * stride;
      to.keys[j] = (const KV*)call.k_cache + at;
      to.values[j] = (const KV*)call.v_cache + at;
      if (++offset == call.page_size) {
        offset = 0;
        ++page;
      }
    }
    to.num_keys = (num_keys + W - 1) / W * W;
    for (int64_t j = num_keys; j < to.num_keys; ++j) {
      to.keys[j] = to.keys[num_keys - 1];
      to.values[j] = to.values[num_keys - 1];
    }
    return to;
  }

  // W neighbouring keys, words k .. k + W of each, turned so that square[i] holds word k + i of all of them.
  inline __attribute__((always_inline)) void load_square(const KV* const* keys, int64_t begin, int64_t k, vf (&square)[W]) {
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

  // Rows of K or V that the thread will need next, brought to its cache a few at a time while it computes: the pool is read in scattered
  // rows, which the hardware does not foresee, and a burst of requests would fill its queues.
  struct Prefetch {
    const KV* const* rows = nullptr;
    int64_t begin = 0, bytes = 0, next = 0, num_rows = 0, stride = 0;

    void spread_over(int64_t calls) { stride = (num_rows + calls - 1) / calls; }
    inline void advance() {
      for (int64_t stop = next + stride < num_rows ? next + stride : num_rows; next < stop; ++next)
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch((const char*)(rows[next] + begin) + byte, 0, 2);
    }
  };
  struct Ahead {
    Prefetch keys, values;
  };

  template <int R>
  void few_rows_scores(const Block& block, int64_t begin, int64_t num_keys, Prefetch& prefetch) {
    for (int64_t j = 0; j < num_keys; j += W) {
      vf acc[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r] = vf{};
      for (int64_t k = 0; k < dim_words; k += W) {
        prefetch.advance();
        vf square[W];
        load_square(block.keys + j, begin, k, square);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i)
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[r] = Mul::step(acc[r], queries[r * dim_words + k + i], Mul::as_vec(square[i]));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) store(scores + r * kBlock + j, acc[r]);
    }
  }

  void compute_scores(const Block& block, int64_t begin, int64_t num_keys, int64_t rows, Prefetch& prefetch) {
    prefetch.spread_over((num_keys + W - 1) / W * (dim_words / W));
    switch (rows) {
      case 1: return few_rows_scores<1>(block, begin, num_keys, prefetch);
      case 2: return few_rows_scores<2>(block, begin, num_keys, prefetch);
      case 3: return few_rows_scores<3>(block, begin, num_keys, prefetch);
      case 4: return few_rows_scores<4>(block, begin, num_keys, prefetch);
      case 5: return few_rows_scores<5>(block, begin, num_keys, prefetch);
      case 6: return few_rows_scores<6>(block, begin, num_keys, prefetch);
    }
    for (int64_t j = 0; j < num_keys; j += W) {  // packed_keys[j / W][dim_words][W]
      for (int64_t k = 0; k < dim_words; k += W) {
        prefetch.advance();
        vf square[W];
        load_square(block.keys + j, begin, k, square);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store_raw(packed_keys + j * dim_words + (k + i) * W, square[i]);
      }
    }
    multiply<Mul>(rows, (num_keys + W - 1) / W, queries, dim_words, dim_words, Packed<Mul>{packed_keys, dim_words * W, W}, scores, kBlock);
  }

  void compute_output(const Block& block, int64_t begin, int64_t num_keys, int64_t rows, Prefetch& prefetch, float* out) {
    const int64_t k_words = (num_keys + P - 1) / P, vectors = dim / W, d = dim;
    const KV* const* values = block.values;
    prefetch.spread_over(k_words);
    if (rows <= kStripRows) {
      auto columns = [=, &prefetch](int64_t k, int64_t n) {
        if (n == 0) prefetch.advance();
        return Mul::as_vec(value_words(Mul(), values, k, begin, n, d));
      };
      multiply<Mul>(rows, vectors, probs, kBlock / P, k_words, columns, out, dim);
      return;
    }
    for (int64_t k = 0; k < k_words; ++k, prefetch.advance())  // packed_values[k_words][D]
      for (int64_t n = 0; n < vectors; ++n) store_raw(packed_values + k * dim + n * W, value_words(Mul(), values, k, begin, n, d));
    multiply<Mul>(rows, vectors, probs, kBlock / P, k_words, Packed<Mul>{packed_values, W, dim}, out, dim);
  }

  // Scores of one query row to probabilities relative to the row's maximum over the keys [begin, end) that it sees; zero elsewhere.
  void softmax_row(float* s, word* p, int64_t begin, int64_t end, int64_t num_keys, float& row_max, float& row_sum) {
    const vi lanes = lane_index();
    const int64_t first = begin / W * W;
    auto visible = [=](int64_t j, vf v, vf otherwise) {
      if (begin <= j && j + W <= end) return v;
      return select((lanes >= (int32_t)(begin - j)) & (lanes < (int32_t)(end - j)), v, otherwise);
    };
    auto write = [p](int64_t j, vf v) {
      if constexpr (P == 1)
        store(p + j, v);
      else
        store((bf16*)p + j, v);
    };
    if (tanh_scale)
      for (int64_t j = first; j < end; j += W) store(s + j, tanh(load(s + j) * tanh_scale));
    vf top = splat(-__builtin_inff());
    for (int64_t j = first; j < end; j += W) top = vmax(top, visible(j, load(s + j), top));
    row_max = max(top);
    vf total = vf{};
    int64_t j = 0;
    for (; j < first; j += W) write(j, vf{});
    for (; j < end; j += W) {
      const vf e = visible(j, exp2<P == 2>((load(s + j) - row_max) * log2_scale), vf{});
      total = total + e;
      write(j, e);
    }
    for (; j < num_keys; j += W) write(j, vf{});
    row_sum = sum(total);
  }

  void compute_block(const AttentionItem& item, const Block& block, int64_t head, int64_t num_keys, int64_t rows, Ahead& ahead,
                     const Partial& to) {
    compute_scores(block, head * dim, num_keys, rows, ahead.keys);
    int64_t r = 0;
    for (int32_t i = 0; i < item.num_segments; ++i) {
      const Segment& s = work.segments[item.segment0 + i];
      for (int64_t t = 0; t < s.tokens; ++t) {
        const int64_t at = position(s) + t, block_key = (int64_t)block.block * kBlock;
        auto inside = [=](int64_t key) { return key < block_key ? 0 : (key - block_key > num_keys ? num_keys : key - block_key); };
        const int64_t begin = inside(first_key(at)), end = inside(at + 1);
        for (int64_t g = 0; g < group; ++g, ++r)
          softmax_row(scores + r * kBlock, probs + r * (kBlock / P), begin, end, num_keys, to.max[r], to.sum[r]);
      }
    }
    compute_output(block, head * dim, num_keys, rows, ahead.values, to.out);
  }

  // Not inlined: every user must execute the very same instructions.
  __attribute__((noinline)) void merge(const Partial& to, const Partial& part, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      if (part.sum[r] == 0.f) continue;  // the query sees nothing of the block
      const float top = to.max[r] > part.max[r] ? to.max[r] : part.max[r];
      const float keep = exp2(splat((to.max[r] - top) * log2_scale))[0], add = exp2(splat((part.max[r] - top) * log2_scale))[0];
      to.max[r] = top;
      to.sum[r] = to.sum[r] * keep + part.sum[r] * add;
      float *a = to.out + r * dim, *b = part.out + r * dim;
      for (int64_t i = 0; i < dim; i += W) store(a + i, load(a + i) * keep + load(b + i) * add);
    }
  }

  void start(const Partial& s, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      s.max[r] = -__builtin_inff();
      s.sum[r] = 0.f;
    }
    for (int64_t i = 0; i < rows * dim; i += W) store(s.out + i, vf{});
  }

  template <class Q>
  void write_output(const Segment& segment, int64_t head, const Partial& s) {
    Q* out = (Q*)call.out + ((call.cu_q[segment.row] + segment.token) * call.num_heads + head * group) * dim;
    for (int64_t t = 0, r = 0; t < segment.tokens; ++t)
      for (int64_t g = 0; g < group; ++g, ++r) {
        const float factor = 1.f / s.sum[r];
        Q* to = out + (t * call.num_heads + g) * dim;
        for (int64_t i = 0; i < dim; i += W) store(to + i, load(s.out + r * dim + i) * factor);
      }
  }

  void finish(const Segment& segment, int64_t head, const Partial& s) {
    call.q_dtype == kBF16 ? write_output<bf16>(segment, head, s) : write_output<float>(segment, head, s);
  }

  Partial kept_partial(int32_t row, int64_t block, int64_t head) {
    const int64_t rows = row_tokens(row) * group;
    return partial_at(work.partials + work.partial_begin[row] + (block * call.num_kv_heads + head) * partial_words(rows, dim), rows, dim);
  }

  // Partials of the rows of an item to where the rows' last finisher finds them.
  void keep(const AttentionItem& item, int64_t block, int64_t head, const Partial& from) {
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
    const int64_t first = first_key(position(s)) / kBlock;  // the ones before were skipped
    const Partial state = partial_at(state_words, rows, dim);
    for (int64_t head = 0; head < call.num_kv_heads; ++head) {
      start(state, rows);
      for (int64_t block = first; block < num_blocks; ++block) merge(state, kept_partial(s.row, block, head), rows);
      finish(s, head, state);
    }
  }

  Ahead look_ahead(int32_t index, int64_t head, int32_t block, const Block* keep) {
    const AttentionItem* item = &work.items[index];
    if (block + 1 < item->block1) {
      ++block;
    } else if (head + 1 < item->head1) {
      block = first_block(*item);
      ++head;
    } else if (index + 1 < work.num_items) {
      ++item;
      block = first_block(*item);
      head = item->head0;
      if (block >= item->block1) return {};
    } else {
      return {};
    }
    const Block& next = find(work.segments[item->segment0].row, block, keep);
    const int64_t bytes = dim * sizeof(KV);
    return {{next.keys, head * dim, bytes, 0, next.num_keys, 0}, {next.values, head * dim, bytes, 0, next.num_keys, 0}};
  }

  void compute_item(int32_t index, int32_t block0) {
    const AttentionItem& item = work.items[index];
    const Segment& first = work.segments[item.segment0];
    const int64_t rows = query_rows(item), end = position(first) + first.tokens;  // keys that the item's last token sees
    const Partial state = partial_at(state_words, rows, dim), part = partial_at(partial_of_block, rows, dim);
    for (int64_t head = item.head0; head < item.head1; ++head) {
      if constexpr (P == 2)
        load_queries<bf16>(item, head);
      else
        call.q_dtype == kBF16 ? load_queries<bf16>(item, head) : load_queries<float>(item, head);
      if (!item.partial) start(state, rows);
      for (int32_t b = block0; b < item.block1; ++b) {
        const Block& block = find(first.row, b, nullptr);
        const int64_t left = end - (int64_t)b * kBlock;
        Ahead ahead = look_ahead(index, head, b, &block);
        compute_block(item, block, head, left < kBlock ? left : kBlock, rows, ahead, part);
        if (item.partial)
          keep(item, b, head, part);
        else
          merge(state, part, rows);
      }
      if (!item.partial) finish(first, head, state);
    }
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
  auto make = [&](int thread) { return Attention<Mul, KV>(call, work, work.scratch + thread * work.scratch_bytes); };
  for_units(work.num_items, call.threads, make, [](Attention<Mul, KV>& attention, int64_t item) { attention.run(item); });
}

}  // namespace

extern "C" {

void* setpoint_plan_create() { return new AttentionPlan; }

void setpoint_plan_free(void* plan) { delete static_cast<AttentionPlan*>(plan); }

// Reads everything of `call` but q, out, the caches and what differs between layers (scale, softcap, window).
void setpoint_attention_plan(const AttentionCall* call) { call->plan->build(*call); }

void setpoint_attention(const AttentionCall* call_pointer) {
  const AttentionCall& call = *call_pointer;
  const AttentionPlan& plan = *call.plan;
  thread_local std::vector<int32_t> open_items;
  thread_local Buffer scratch, partials;
  open_items = plan.open_items;
  const int64_t per_thread = attention_scratch_bytes(call.head_dim);
  const AttentionWork work{plan.segments.data(),
                           plan.items.data(),
                           static_cast<int32_t>(plan.items.size()),
                           open_items.data(),
                           plan.partial_begin.data(),
                           reinterpret_cast<float*>(partials.at_least(plan.num_partial_words * 4)),
                           scratch.at_least(per_thread * call.threads),
                           per_thread};
#ifdef __AVX512BF16__
  if (call.q_dtype == kBF16 && call.kv_dtype == kBF16) return attention<MulBF16, bf16>(call, work);
#endif
  call.kv_dtype == kBF16 ? attention<MulF32, bf16>(call, work) : attention<MulF32, float>(call, work);
}

}  // extern "C"
