// Causal attention over the paged pool. For each block of kBlock keys: scores = queries x K,
// softmax within the block, partial output = probabilities x V; the block's partial (output,
// maximum, sum) is then merged into the running result. A pool in fp8 gives the bits of a pool in
// bf16 that holds the same values.
//
// A few query rows (decode) read K and V straight from their pages; more rows share one packed copy
// of the block. Both add up the same products in the same order. Sums are fp32; with AVX512_BF16
// and a pool in bf16 or fp8 the products take bf16 pairs (probabilities are rounded to bf16), else
// everything is fp32.
#pragma once
#include "attention/attention_block.h"
#include "attention/attention_pool.h"
#include "base/threads.h"

namespace {

// A result of no block: merging into it leaves what is merged.
template <class Mul, class KV>
inline void Attention<Mul, KV>::start(const Partial& s, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    s.max[r] = -__builtin_inff();
    s.sum[r] = 0.f;
  }
  for (int64_t i = 0; i < rows * value_dim; i += W) store(s.out + i, splat(-0.f));
}

// What a query row's outputs are divided by: its sum, and the head's sink, which has no value. Like
// every probability it is relative to the row's maximum: a sink far above that leaves zero.
template <class Mul, class KV>
inline float Attention<Mul, KV>::whole_sum(const Partial& s, int64_t row, int64_t query_head) {
  if (!call.sinks) return s.sum[row];
  const vf sink = splat(call.sinks[query_head]) * 1.44269504f;
  return s.sum[row] + exp2(fma(splat(-log2_scale), splat(s.max[row]), sink))[0];
}

template <class Mul, class KV>
template <class Q>
inline void Attention<Mul, KV>::write_output(const Segment& segment, int64_t head,
                                             const Partial& s) {
  Q* out = (Q*)call.out +
           ((call.cu_q[segment.row] + segment.token) * call.num_heads + head * group) * value_dim;
  for (int64_t t = 0, r = 0; t < segment.tokens; ++t)
    for (int64_t g = 0; g < group; ++g, ++r) {
      const float factor = call.v_scale / whole_sum(s, r, head * group + g);
      Q* to = out + (t * call.num_heads + g) * value_dim;
      for (int64_t i = 0; i < value_dim; i += W)
        store(to + i, load(s.out + r * value_dim + i) * factor);
    }
}

template <class Mul, class KV>
inline void Attention<Mul, KV>::finish(const Segment& segment, int64_t head, const Partial& s) {
  call.q_dtype == kBF16 ? write_output<bf16>(segment, head, s)
                        : write_output<float>(segment, head, s);
}

template <class Mul, class KV>
inline Partial Attention<Mul, KV>::kept_partial(int32_t row, int64_t block, int64_t head) {
  const int64_t rows = row_tokens(row) * group;
  return partial_at(work.partials + work.partial_begin[row] +
                        (block * call.num_kv_heads + head) * partial_words(rows, value_dim),
                    rows, value_dim);
}

// Partials of the rows of an item to where the rows' last finisher finds them.
template <class Mul, class KV>
inline void Attention<Mul, KV>::keep_partials(const AttentionItem& item, int64_t block,
                                              int64_t head, const Partial& from) {
  int64_t first = 0;
  for (int32_t i = 0; i < item.num_segments; ++i) {
    const Segment& s = work.segments[item.segment0 + i];
    const Partial to = kept_partial(s.row, block, head);
    const int64_t rows = s.tokens * group;
    __builtin_memcpy(to.out, from.out + first * value_dim, rows * value_dim * 4);
    __builtin_memcpy(to.max, from.max + first, rows * 4);
    __builtin_memcpy(to.sum, from.sum + first, rows * 4);
    first += rows;
  }
}

template <class Mul, class KV>
inline void Attention<Mul, KV>::merge_kept(const Segment& s) {
  const int64_t rows = s.tokens * group, num_blocks = (call.kv_lens[s.row] + kBlock - 1) / kBlock;
  const int64_t first = first_key(position(s)) / kBlock,
                merged = work.merged_blocks[s.row];  // the ones before `first` were skipped
  for (int64_t head = 0; head < call.num_kv_heads; ++head) {
    const Partial state =
        first < merged ? kept_partial(s.row, 0, head) : partial_at(state_words, rows, value_dim);
    if (first >= merged) start(state, rows);
    for (int64_t block = first < merged ? merged : first; block < num_blocks; ++block)
      merge(state, kept_partial(s.row, block, head), rows);
    finish(s, head, state);
  }
}

// Finds what this thread computes after a head's turn at a block.
template <class Mul, class KV>
inline auto Attention<Mul, KV>::look_ahead(int32_t index, int64_t head, int32_t block,
                                           const Block* held) -> Ahead {
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
  // V that is a part of K comes with it.
  const int64_t values = call.v_cache == call.k_cache ? 0 : next.num_keys;
  return {{next.keys, key_begin(head), dim * (int64_t)sizeof(KV), 0, next.num_keys, 0},
          {next.values, value_begin(head), value_dim * (int64_t)sizeof(KV), 0, values, 0}};
}

template <class Mul, class KV>
inline void Attention<Mul, KV>::compute_item(int32_t index, int32_t block0) {
  const AttentionItem& item = work.items[index];
  const Segment& first = work.segments[item.segment0];
  const int64_t rows = find_positions(item);
  const bool merges = !item.partial || item.block0 == 0;
  auto state = [&](int64_t head) {
    return partial_at(state_words + (head - item.head0) * partial_words(rows, value_dim), rows,
                      value_dim);
  };
  auto queries_of = [&](int64_t head) {
    return queries + (head - item.head0) * query_columns(rows) * dim_words;
  };
  for (int64_t head = item.head0; head < item.head1; ++head) {
#if SP_TILES
    if constexpr (kTiles) {
      rows <= kStripRows ? load_turned<bf16>(item, head, queries_of(head))
                         : load_queries<bf16>(item, head, queries_of(head));
      start(state(head), rows);
      continue;
    }
#endif
    auto load = [&](auto number) {
      typedef decltype(number) Q;
      are_lanes(rows) ? load_turned<Q>(item, head, queries_of(head))
                      : load_queries<Q>(item, head, queries_of(head));
    };
    if constexpr (P == 2)
      load(bf16());
    else
      call.q_dtype == kBF16 ? load(bf16()) : load(float());
    start(state(head), rows);
  }
  for (int32_t b = block0; b < item.block1; ++b) {
    const Block& block = find(first.row, b, nullptr);
    for (int64_t head = item.head0; head < item.head1; ++head) {
      Ahead ahead = look_ahead(index, head, b, &block);
      if (rows <= kStripRows)
        few_rows_block(block, head, queries_of(head), rows, ahead, state(head));
      else
        many_rows_block(block, head, queries_of(head), rows, ahead, state(head));
      if (merges) continue;
      keep_partials(item, b, head, state(head));
      start(state(head), rows);
    }
  }
  if (!merges) return;
  for (int64_t head = item.head0; head < item.head1; ++head)
    item.partial ? keep_partials(item, 0, head, state(head)) : finish(first, head, state(head));
}

template <class Mul, class KV>
inline void Attention<Mul, KV>::run(int32_t index) {
  const AttentionItem& item = work.items[index];
  const int32_t block0 = first_block(item);
  if (block0 < item.block1) compute_item(index, block0);
  if (!item.partial) return;
  for (int32_t i = 0; i < item.num_segments; ++i) {
    const Segment& s = work.segments[item.segment0 + i];
    if (__atomic_sub_fetch(&work.open_items[s.row], 1, __ATOMIC_ACQ_REL) == 0) merge_kept(s);
  }
}

template <class Mul, class KV>
void attention(const AttentionCall& call, const AttentionWork& work) {
  auto make = [&](int thread) {
    return Attention<Mul, KV>(call, work, work.scratch + thread * work.scratch_bytes);
  };
  for_units(work.num_items, call.threads, make,
            [](Attention<Mul, KV>& attention, int64_t item) { attention.run(item); });
}

// With a pool whose values bf16 can hold.
template <class KV>
void narrow_attention(const AttentionCall& call, const AttentionWork& work) {
#if SP_TILES
  if (call.q_dtype == kBF16) return attention<MulTiles, KV>(call, work);
#elif defined(__AVX512BF16__)
  if (call.q_dtype == kBF16) return attention<MulBF16, KV>(call, work);
#endif
  attention<MulF32, KV>(call, work);
}

}  // namespace
