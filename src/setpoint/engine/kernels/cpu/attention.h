// Causal attention over the paged pool: for each block of kBlock keys, pack K (transposed) and V of one kv head once, multiply them
// with all query rows that share the head, and merge the block's partial (max, sum, output) into the running one. Included by isa.cpp.
//
// Query rows of an item: r = token * group + head in group. Scores are fp32; with AVX512_BF16 and a bf16 pool the products take
// bf16 pairs (probabilities are rounded to bf16), else everything is fp32.

struct Partial {  // views into partial_words() floats
  float* max;     // [rows], in units of the unscaled score
  float* sum;
  float* out;  // [rows, D], not yet divided by sum
};
static inline Partial partial_at(char* base, int64_t index, int64_t rows, int64_t dim) {
  float* p = (float*)base + index * partial_words(rows, dim);
  return {p + rows * dim, p + rows * dim + rows, p};
}

// out rows [0, rows) in strips of at most 6 rows x kStrip vectors; b has `vectors` columns of W. write(row, vector, value).
constexpr int kStrip = W == 16 ? 4 : 2;

template <class Mul, int M, int N>
static void strip(const typename Mul::word* a, int64_t a_row, const typename Mul::word* b, int64_t b_col, int64_t b_row, int64_t k_words,
                  float* out, int64_t out_row) {
  vf acc[M][N];
  tile<Mul, M, N>(a, a_row, b, b_col, b_row, k_words, acc);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(out + m * out_row + n * W, acc[m][n]);
}

template <class Mul, int N>
static void strips(int64_t rows, const typename Mul::word* a, int64_t a_row, const typename Mul::word* b, int64_t b_col, int64_t b_row,
                   int64_t k_words, float* out, int64_t out_row) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) strip<Mul, 6, N>(a + r * a_row, a_row, b, b_col, b_row, k_words, out + r * out_row, out_row);
  a += r * a_row;
  out += r * out_row;
  switch (rows - r) {
    case 1: return strip<Mul, 1, N>(a, a_row, b, b_col, b_row, k_words, out, out_row);
    case 2: return strip<Mul, 2, N>(a, a_row, b, b_col, b_row, k_words, out, out_row);
    case 3: return strip<Mul, 3, N>(a, a_row, b, b_col, b_row, k_words, out, out_row);
    case 4: return strip<Mul, 4, N>(a, a_row, b, b_col, b_row, k_words, out, out_row);
    case 5: return strip<Mul, 5, N>(a, a_row, b, b_col, b_row, k_words, out, out_row);
  }
}

template <class Mul>
static void multiply(int64_t rows, int64_t vectors, const typename Mul::word* a, int64_t a_row, const typename Mul::word* b, int64_t b_col,
                     int64_t b_row, int64_t k_words, float* out, int64_t out_row) {
  for (int64_t n = 0; n < vectors; n += kStrip) {
    const typename Mul::word* bn = b + n * b_col;
    switch (vectors - n) {
      case 1: strips<Mul, 1>(rows, a, a_row, bn, b_col, b_row, k_words, out + n * W, out_row); break;
#if SP_WIDTH == 16
      case 2: strips<Mul, 2>(rows, a, a_row, bn, b_col, b_row, k_words, out + n * W, out_row); break;
      case 3: strips<Mul, 3>(rows, a, a_row, bn, b_col, b_row, k_words, out + n * W, out_row); break;
#endif
      default: strips<Mul, kStrip>(rows, a, a_row, bn, b_col, b_row, k_words, out + n * W, out_row);
    }
  }
}

static inline void pack_words(const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(to + i, load(from + i));
}
static inline void pack_words(const bf16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(to + i, load(from + i));
}

// W rows of K, from column word k on, as W vectors.
static inline vf key_words(const MulF32&, const float* row, int64_t k) { return load(row + k); }
static inline vf key_words(const MulF32&, const bf16* row, int64_t k) { return load(row + k); }

// V of two neighbouring keys (b null past the end) to per_word rows of words.
template <class KV>
static inline void pack_value_rows(const MulF32&, const KV* a, float* to, int64_t dim) {
  pack_words(a, to, dim);
}
static inline void pack_words(const bf16* from, uint32_t* to, int64_t dim) { __builtin_memcpy(to, from, dim * 2); }
static inline void pack_words(const float*, uint32_t*, int64_t) = delete;
static inline vf key_words(const MulBF16&, const bf16* row, int64_t k) { return load_raw<vf>(row + 2 * k); }

template <class Mul, class Q, class KV>
struct Attention {
  typedef typename Mul::word word;
  static constexpr int P = Mul::per_word;

  const AttentionCall& call;
  const int64_t dim, group, dim_words;
  // Scratch of this thread.
  word *keys, *values, *queries, *probs;
  float* scores;
  char *state, *block_partial;
  const KV **key_rows, **value_rows;

  Attention(const AttentionCall& c, char* scratch)
      : call(c), dim(c.head_dim), group(c.num_heads / c.num_kv_heads), dim_words((dim + P * W - 1) / (P * W) * W) {
    char* at = scratch;
    auto take = [&at](int64_t bytes) {
      char* p = at;
      at += bytes;
      return p;
    };
    keys = (word*)take(kBlock * dim * 4);
    values = (word*)take(kBlock * dim * 4);
    queries = (word*)take(kQueryRows * dim * 4);
    scores = (float*)take(kQueryRows * kBlock * 4);
    probs = (word*)take(kQueryRows * kBlock * 4);
    state = take(partial_words(kQueryRows, dim) * 4);
    block_partial = take(partial_words(kQueryRows, dim) * 4);
    key_rows = (const KV**)take(kBlock * 8);
    value_rows = (const KV**)take(kBlock * 8);
  }

  void load_queries(const AttentionItem& item, int64_t head) {
    const Q* q = (const Q*)call.q + (call.cu_q[item.row] + item.token0) * call.q_stride + head * group * dim;
    for (int64_t t = 0; t < item.tokens; ++t)
      for (int64_t g = 0; g < group; ++g) {
        word* to = queries + (t * group + g) * dim_words;
        for (int64_t i = dim / P; i < dim_words; ++i) to[i] = 0;
        pack_words(q + t * call.q_stride + g * dim, to, dim);
      }
  }

  // Where the block's keys of kv head 0 lie.
  void find_rows(const AttentionItem& item, int64_t block, int64_t num_keys) {
    const int32_t* table = call.page_table + call.slots[item.row] * call.table_stride;
    const int64_t page_size = call.page_size, row = call.num_kv_heads * dim;
    int64_t position = block * kBlock;
    int64_t page = position / page_size, offset = position % page_size;
    for (int64_t j = 0; j < num_keys; ++j) {
      const int64_t at = ((int64_t)table[page] * page_size + offset) * row;
      key_rows[j] = (const KV*)call.k_cache + at;
      value_rows[j] = (const KV*)call.v_cache + at;
      if (++offset == page_size) {
        offset = 0;
        ++page;
      }
    }
  }

  // keys[j / W][dim_words][j % W]; keys past the end are zero.
  void pack_keys(int64_t head, int64_t num_keys) {
    for (int64_t j = 0; j < num_keys; j += W) {
      word* panel = keys + j * dim_words;
      for (int64_t k = 0; k < dim_words; k += W) {
        const bool whole = (k + W) * P <= dim;
        vf square[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
          if (j + i >= num_keys)
            square[i] = vf{};
          else if (whole)
            square[i] = key_words(Mul(), key_rows[j + i] + head * dim, k);
          else {
            word edge[W] = {};
            __builtin_memcpy(edge, key_rows[j + i] + head * dim + k * P, (dim - k * P) * sizeof(KV));
            square[i] = load_raw<vf>(edge);
          }
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store_raw(panel + (k + i) * W, square[i]);
      }
    }
  }

  // values[j / P][dim] words; the odd key past the end is zero.
  void pack_values(int64_t head, int64_t num_keys) {
    for (int64_t j = 0; j < num_keys; j += P) {
      const KV* a = value_rows[j] + head * dim;
      word* to = values + j / P * dim;
      if constexpr (P == 1) {
        pack_words(a, to, dim);
      } else {
        const bool pair = j + 1 < num_keys;
        const KV* b = pair ? value_rows[j + 1] + head * dim : a;
        const vu keep = vu{} + (pair ? 0xffff0000u : 0u);
        for (int64_t i = 0; i < dim; i += W) {
          const vu low = __builtin_convertvector(load_raw<vh>(a + i), vu), high = __builtin_convertvector(load_raw<vh>(b + i), vu);
          store_raw(to + i, low | ((high << 16) & keep));
        }
      }
    }
  }

  // Scores of one query row to probabilities relative to the row's maximum over its first `visible` keys; zero from there on.
  void softmax_row(const float* s, word* p, int64_t visible, int64_t num_keys, float log2_scale, float& row_max, float& row_sum) {
    const vi lanes = lane_index();
    vf top = splat(-__builtin_inff());
    for (int64_t j = 0; j < visible; j += W) top = vmax(top, select(lanes < (int32_t)(visible - j), load(s + j), top));
    row_max = max(top);
    vf total = vf{};
    int64_t j = 0;
    for (; j < visible; j += W) {
      vf e = exp2((load(s + j) - row_max) * log2_scale);
      e = select(lanes < (int32_t)(visible - j), e, vf{});
      total = total + e;
      if constexpr (P == 1)
        store(p + j, e);
      else
        store((bf16*)p + j, e);
    }
    for (; j < num_keys; j += W) {
      if constexpr (P == 1)
        store(p + j, vf{});
      else
        store((bf16*)p + j, vf{});
    }
    row_sum = sum(total);
  }

  void compute_block(const AttentionItem& item, int64_t block, int64_t head, int64_t num_keys, const Partial& to) {
    const int64_t rows = item.tokens * group, vectors = (num_keys + W - 1) / W;
    pack_keys(head, num_keys);
    multiply<Mul>(rows, vectors, queries, dim_words, keys, dim_words * W, W, dim_words, scores, kBlock);
    const int64_t row_tokens = call.cu_q[item.row + 1] - call.cu_q[item.row];
    const int64_t first_position = call.kv_lens[item.row] - row_tokens + item.token0;
    const float log2_scale = call.scale * 1.44269504f;
    for (int64_t r = 0; r < rows; ++r) {
      int64_t visible = first_position + r / group - block * kBlock + 1;
      visible = visible < 0 ? 0 : (visible > num_keys ? num_keys : visible);
      softmax_row(scores + r * kBlock, probs + r * (kBlock / P), visible, num_keys, log2_scale, to.max[r], to.sum[r]);
    }
    pack_values(head, num_keys);
    multiply<Mul>(rows, dim / W, probs, kBlock / P, values, W, dim, (num_keys + P - 1) / P, to.out, dim);
  }

  // state = state merged with part. Not inlined: both users must execute the very same instructions.
  __attribute__((noinline)) void merge(const Partial& to, const Partial& part, int64_t rows) {
    const float log2_scale = call.scale * 1.44269504f;
    for (int64_t r = 0; r < rows; ++r) {
      if (part.sum[r] == 0.f) continue;
      const float top = to.max[r] > part.max[r] ? to.max[r] : part.max[r];
      const float keep = exp2(splat((to.max[r] - top) * log2_scale))[0], add = exp2(splat((part.max[r] - top) * log2_scale))[0];
      to.max[r] = top;
      to.sum[r] = to.sum[r] * keep + part.sum[r] * add;
      for (int64_t i = 0; i < dim; i += W) store(to.out + r * dim + i, load(to.out + r * dim + i) * keep + load(part.out + r * dim + i) * add);
    }
  }

  void start(const Partial& s, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      s.max[r] = -__builtin_inff();
      s.sum[r] = 0.f;
    }
    for (int64_t i = 0; i < rows * dim; i += W) store(s.out + i, vf{});
  }

  void finish(const AttentionItem& item, int64_t head, const Partial& s) {
    Q* out = (Q*)call.out + ((call.cu_q[item.row] + item.token0) * call.num_heads + head * group) * dim;
    for (int64_t t = 0; t < item.tokens; ++t)
      for (int64_t g = 0; g < group; ++g) {
        const int64_t r = t * group + g;
        const float factor = 1.f / s.sum[r];
        Q* to = out + (t * call.num_heads + g) * dim;
        for (int64_t i = 0; i < dim; i += W) store(to + i, load(s.out + r * dim + i) * factor);
      }
  }

  void run(const AttentionItem& item, const AttentionWork& work) {
    const int64_t rows = item.tokens * group, row_tokens = call.cu_q[item.row + 1] - call.cu_q[item.row];
    const int64_t end = call.kv_lens[item.row] - row_tokens + item.token0 + item.tokens;  // keys that the item's last token sees
    const Partial state_view = partial_at(state, 0, rows, dim), block_view = partial_at(block_partial, 0, rows, dim);
    for (int64_t head = item.head0; head < item.head1; ++head) {
      load_queries(item, head);
      if (item.split_base < 0) start(state_view, rows);
      for (int64_t block = item.block0; block < item.block1; ++block) {
        const int64_t left = end - block * kBlock, num_keys = left < kBlock ? left : kBlock;
        find_rows(item, block, num_keys);
        if (item.split_base < 0) {
          compute_block(item, block, head, num_keys, block_view);
          merge(state_view, block_view, rows);
        } else {
          char* base = work.partials + item.split_base * 4;
          compute_block(item, block, head, num_keys, partial_at(base, block * call.num_kv_heads + head, rows, dim));
        }
      }
      if (item.split_base < 0) finish(item, head, state_view);
    }
    if (item.split_base >= 0 && __atomic_sub_fetch(&work.counters[item.counter], 1, __ATOMIC_ACQ_REL) == 0) {
      const int64_t num_blocks = (end + kBlock - 1) / kBlock;
      for (int64_t head = 0; head < call.num_kv_heads; ++head) {
        start(state_view, rows);
        for (int64_t block = 0; block < num_blocks; ++block)
          merge(state_view, partial_at(work.partials + item.split_base * 4, block * call.num_kv_heads + head, rows, dim), rows);
        finish(item, head, state_view);
      }
    }
  }
};

template <class Mul, class Q, class KV>
static void attention_t(const AttentionCall& call, const AttentionWork& work) {
  int32_t next = 0;
  auto worker = [&](char* scratch) {
    Attention<Mul, Q, KV> attention(call, scratch);
    for (int32_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < work.num_items;) attention.run(work.items[i], work);
  };
  if (call.threads == 1 || work.num_items == 1) return worker(work.scratch);
#pragma omp parallel num_threads(call.threads)
  worker(work.scratch + omp_get_thread_num() * work.scratch_bytes);
}

static void attention(const AttentionCall& call, const AttentionWork& work) {
  if (call.q_dtype == kBF16 && call.kv_dtype == kBF16) {
#ifdef __AVX512BF16__
    attention_t<MulBF16, bf16, bf16>(call, work);
#else
    attention_t<MulF32, bf16, bf16>(call, work);
#endif
  } else if (call.q_dtype == kBF16) {
    attention_t<MulF32, bf16, float>(call, work);
  } else if (call.kv_dtype == kBF16) {
    attention_t<MulF32, float, bf16>(call, work);
  } else {
    attention_t<MulF32, float, float>(call, work);
  }
}
