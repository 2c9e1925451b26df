// What the C entry points (api.cpp) and the per-instruction-set files (isa.cpp, compiled once per level) share: plain structs and
// one table of functions per level. No standard library here: an inline function instantiated in a file compiled for AVX-512
// could be the copy the linker keeps for everybody, and crash a lesser machine.
#pragma once
#include <cstdint>

enum DType : int32_t { kF32 = 0, kBF16 = 1 };

// Keys per block. A query's result is the left-to-right merge of one partial result per block of its row's keys, whoever computes
// them, so it depends neither on the batch nor on the chunk it was computed in nor on the number of threads.
constexpr int kBlock = 128;
// Query rows (tokens x heads of one group, of one or several sequences) that are computed against a block together, at most.
constexpr int kQueryRows = 64;

struct AttentionCall {
  const void* q;  // [T, H, D], token stride q_stride
  void* out;      // [T, H, D] contiguous
  const void* k_cache;
  const void* v_cache;  // [num_pages + 1, page_size, Hkv, D]
  const int32_t* cu_q;  // [n + 1]
  const int32_t* kv_lens;
  const int32_t* slots;
  const int32_t* page_table;  // [num_slots, table_stride]
  int64_t q_stride, table_stride, num_heads, num_kv_heads, head_dim, page_size;
  float scale;
  int32_t q_dtype, kv_dtype, threads;
};

// Neighbouring tokens of one row, counted from the row's first.
struct Segment {
  int32_t row, token, tokens;
};

// One unit of work: the tokens of some segments against key blocks [block0, block1), for kv heads [head0, head1). All the segments'
// rows have the same pages there.
struct AttentionItem {
  int32_t segment0, num_segments, head0, head1, block0, block1;
  bool partial;  // the tokens' other blocks are in other items: leave partial results; who finishes a row's last item merges them
};

struct AttentionWork {
  const Segment* segments;
  const AttentionItem* items;
  int32_t num_items;
  int32_t* open_items;           // [n] partial items of each row still to finish
  const int64_t* partial_begin;  // [n] where the row's partials [block][head] begin, in fp32 words
  float* partials;
  char* scratch;  // threads * scratch_bytes, 64-byte aligned
  int64_t scratch_bytes;
};

// fp32 words of one partial: output, maximum and sum of `rows` query rows.
static inline int64_t partial_words(int64_t rows, int64_t head_dim) { return (rows * (head_dim + 2) + 15) / 16 * 16; }

static inline int64_t attention_scratch_bytes(int64_t head_dim) {
  const int64_t words = 2 * kBlock * head_dim                      // packed K and V
                        + kQueryRows * head_dim                    // queries
                        + 2 * kQueryRows * kBlock                  // scores, probabilities
                        + 2 * partial_words(kQueryRows, head_dim)  // running result, partial of one block
                        + 2 * 4 * kBlock;                          // addresses of K and V rows, of this block and the next
  return (words * 4 + 4095) / 4096 * 4096;
}

struct RopeCall {
  void* q;  // [T, H, D], rotated in place; token strides in elements
  const void* k;
  const void* v;
  const float* cos_sin;  // [max positions, D]
  const int64_t* positions;
  void* k_cache;
  void* v_cache;
  const int64_t* kv_index;
  int64_t tokens, num_heads, num_kv_heads, head_dim, q_stride, k_stride, v_stride;
  int32_t dtype, kv_dtype, threads;
};

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

struct KernelTable {
  void (*attention)(const AttentionCall&, const AttentionWork&);
  // residual may be null; else residual += x first, and that sum is normalised. out may be x.
  void (*rms_norm)(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t cols, float eps, int32_t dtype,
                   int32_t threads);
  void (*rope_and_store)(const RopeCall&);
  void (*silu_mul)(const void* gate_up, void* out, int64_t rows, int64_t cols, int32_t dtype, int32_t threads);
  void (*linear)(const LinearCall&);
};

extern const KernelTable table_scalar;
#if defined(__x86_64__)
extern const KernelTable table_avx2, table_avx512, table_avx512_bf16;
#endif
