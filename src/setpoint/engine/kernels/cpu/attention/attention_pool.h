// Turns the pool's pages and the batch's queries into the words that are multiplied: addresses of a
// block's keys and values, and packed copies of them.
#pragma once
#include "attention/attention.h"

namespace {

template <class Mul, class KV>
template <class Q>
inline void Attention<Mul, KV>::load_queries(const AttentionItem& item, int64_t head, word* to) {
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

// The query rows of an item's head as columns of words, [dim_words][W].
template <class Mul, class KV>
template <class Q>
inline void Attention<Mul, KV>::load_turned(const AttentionItem& item, int64_t head, word* to) {
  __builtin_memset(to, 0, dim_words * W * 4);
  word* line = (word*)scores;
  int64_t column = 0;
  for (int32_t i = 0; i < item.num_segments; ++i) {
    const Segment& s = work.segments[item.segment0 + i];
    const Q* q =
        (const Q*)call.q + (call.cu_q[s.row] + s.token) * call.q_stride + head * group * dim;
    for (int64_t t = 0; t < s.tokens; ++t)
      for (int64_t g = 0; g < group; ++g, ++column) {
        pack_words(q + t * call.q_stride + g * dim, line, dim);
        for (int64_t k = 0; k < dim / P; ++k) to[k * W + column] = line[k];
      }
  }
}

// The addresses of a block of a row, in the one of the two slots that `held` is not in.
template <class Mul, class KV>
inline auto Attention<Mul, KV>::find(int32_t row, int32_t block, const Block* held)
    -> const Block& {
  for (Block& found : blocks)
    if (found.row == row && found.block == block) return found;
  Block& to = blocks[&blocks[0] == held ? 1 : 0];
  to.row = row;
  to.block = block;
  const int32_t* table = call.page_table + call.slots[row] * call.table_stride;
  const int64_t stride = call.num_kv_heads * dim,
                value_stride = call.num_kv_heads * call.value_stride,
                left = call.kv_lens[row] - (int64_t)block * kBlock;
  const int64_t num_keys = left < kBlock ? left : kBlock;
  int64_t page = (int64_t)block * kBlock / call.page_size,
          offset = (int64_t)block * kBlock % call.page_size;
  for (int64_t j = 0; j < num_keys; ++j) {
    const int64_t at = table[page] * call.page_size + offset;
    to.keys[j] = (const KV*)call.k_cache + at * stride;
    to.values[j] = (const KV*)call.v_cache + at * value_stride;
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
template <class Mul, class KV>
inline __attribute__((always_inline)) void Attention<Mul, KV>::load_square(const KV* const* keys,
                                                                           int64_t begin, int64_t k,
                                                                           vf (&square)[W]) {
  if ((k + W) * P <= dim) {
#ifdef __AVX512VBMI__
    if constexpr (P == 2 && std::is_same_v<KV, fp8>)
      return turn_codes(reader.format, keys, begin + k * P, square);
#endif
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) square[i] = key_words(Mul(), reader, keys[i] + begin, k);
  } else {
    for (int i = 0; i < W; ++i) {
      KV edge[W * P] = {};
      __builtin_memcpy(edge, keys[i] + begin + k * P, (dim - k * P) * sizeof(KV));
      square[i] = key_words(Mul(), reader, edge, 0);
    }
  }
  transpose(square);
}

template <class Mul, class KV>
inline void Attention<Mul, KV>::pack_keys(const Block& block, int64_t begin, Keys keys,
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

template <class Mul, class KV>
inline void Attention<Mul, KV>::pack_values(
    const Block& block, int64_t begin, Keys keys,
    Prefetch& prefetch) {  // packed_values[key words][value_dim]
  const int64_t vectors = value_dim / W;
  for (int64_t k = keys.begin / P; k < keys.end / P; ++k) {
    prefetch.advance();
    word* to = packed_values + k * value_dim;
    int n = 0;
    for (; n + 2 <= vectors; n += 2)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
        store_raw(to + (n + i) * W, value_words(Mul(), reader, block.values, k, begin, n, i, 2));
    if (n < vectors)
      store_raw(to + n * W, value_words(Mul(), reader, block.values, k, begin, n, 0, 1));
  }
}

}  // namespace
