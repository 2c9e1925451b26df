// The arguments of kernels. calls.py has the same structs; when a library is loaded the layouts of
// both are compared (layouts.cpp), so that neither can change alone. Strides are in elements.
#pragma once
#include <cstdint>

#include "base/simd.h"

class AttentionPlan;
struct Ranks;

struct PlaceCall {
  const int32_t* slots;    // [rows]
  const int32_t* cu_q;     // [rows + 1]
  const int32_t* kv_lens;  // [rows]
  const int32_t* known;    // [num_slots, known_stride], token ids
  const int32_t* page_table;
  int32_t* ids;        // [T]
  int64_t* positions;  // [T]
  int64_t* kv_index;   // [T]
  int64_t rows, known_stride, table_stride, page_size;
};

struct EmbeddingCall {
  const int32_t* ids;
  const void* weight;  // [V, cols]
  void* out;           // [rows, cols]
  int64_t rows, cols;
  float scale;  // rounded to the weight's type before it multiplies
  int32_t dtype, threads;
};

struct BlockRowsCall {
  const int32_t* ids;
  const uint8_t* weight;  // packed
  bf16* out;              // [rows][blocks * kBlock]
  int64_t rows, blocks;
  float scale;  // as in EmbeddingCall
  int32_t kind, threads;
};

// Row r of x begins at x + r / group * stride + r % group * cols: groups of rows side by side, the
// heads of a token.
struct NormCall {
  const void* x;
  void* residual;  // [rows, cols] or null; else residual += x first, and that sum is normalised
  const void* weight;
  void* out;  // [rows, cols]; may be x
  int64_t rows, cols, group, stride;
  float eps, offset;
  int32_t dtype, threads;
};

// With a gate the weight is that of gate and up: its columns are one vector of the gate and one of
// up in turn, so that a tile holds both, and the result is activation(gate) * up.
struct LinearCall {
  const void* x;       // [M, K] contiguous
  const void* weight;  // panels of words, or of blocks (blocks.cpp)
  const void* bias;    // [N] in x's type, or null; with a gate as the weight's columns, and as many
  void* out;           // [M, N] in x's type
  int64_t rows;
  int64_t columns;  // N
  int64_t k_words;
  int64_t out_row;     // elements from one row of out to the next: more than N in a stack's part
  float alpha, limit;  // of kClampedSwiglu
  int32_t dtype, gate;
  int32_t blocks;   // their kind; 0: words
  int32_t rounded;  // whether x is rounded to 8 bits, which blocks of another layout meet
  int32_t threads;
};

// As LinearCall, including the gate; the words of x are those in the scratch.
struct Int8LinearCall {
  const void* x;          // [M, K] contiguous, bf16 or fp32
  const void* weight;     // panels of int8; K is filled up with zeros to whole words
  const float* scales;    // [panels * kPanel] of the columns
  const int32_t* shifts;  // [panels * kPanel] -128 times the sum of a column's weights
  const void* bias;       // [N] in x's type, or null
  void* out;              // [M, N] contiguous, in x's type
  int64_t rows, columns, k, k_words;
  float alpha, limit;
  float x_scale;    // of the numbers that rows of x are rounded to; 0: each row has its own
  int32_t rotated;  // whether weights are rotated, and so x must be
  int32_t dtype, gate, threads;
};

// kernels.ops.Routing says what they are.
enum Scoring : int32_t { kSoftmax = 0, kSoftmaxOfChosen = 1, kSigmoid = 2 };

struct RouteCall {
  const void* logits;       // [rows, experts]
  int32_t* ids;             // [rows, chosen]
  float* weights;           // [rows, chosen]
  const float* correction;  // [experts] or null
  int64_t rows, experts, chosen, groups, open, best;
  float scaling;
  int32_t scoring;
  int32_t normalise;  // whether the weights of a row are divided by their sum
  int32_t dtype, threads;
};

// The slot of a pair is places[id, 1 + position % count], where count is places[id, 0]. Without
// places, each expert has the slot of its own number, and only the load is counted.
struct PlaceExpertsCall {
  const int32_t* ids;        // [rows, chosen]
  const int64_t* positions;  // [rows], or null without places
  const int32_t* places;  // [experts, width]: the number of an expert's slots, and these; or null
  int32_t* slots;         // [rows, chosen], or null without places
  int64_t* load;          // [slots]: one is added for each pair
  int64_t rows, chosen, width;
};

// Pair i is the row i / pairs_per_row of x with expert ids[i] - first, if it is one of `experts`;
// the results of the other pairs stay as they are.
struct ExpertsCall {
  const void* weights;  // [experts] LinearCall or Int8LinearCall, without x, out, rows and threads
  const int32_t* ids;   // [rows]
  const void* x;
  void* out;     // [rows, out_bytes]
  int64_t rows;  // pairs
  int64_t pairs_per_row, first, experts, x_bytes, out_bytes;
  int32_t is_int8, threads;
};

// out[t, h] is x[t, h] times the weight of head h. Strides of x in bytes.
struct HeadsCall {
  const void* weights;  // [heads] LinearCall, without x, out, rows and threads
  const void* x;
  void* out;  // [rows, heads, out_bytes]
  int64_t rows, heads, x_bytes, x_row, x_head, out_bytes;
  int32_t threads;
};

// Row r of out is the sum over i of weights[r, i] parts[r, i], and shared[r] in addition, times
// sigmoid(gate[r]).
struct CombineCall {
  const void* parts;     // [rows, chosen, cols]
  const float* weights;  // [rows, chosen]
  const void* shared;    // [rows, cols] or null
  const void* gate;      // [rows] or null: a factor of 1
  void* out;             // [rows, cols]
  int64_t rows, chosen, cols;
  int32_t dtype, threads;
};

struct GatedCall {
  const void* gate_up;  // [rows, 2 cols]
  void* out;            // [rows, cols]
  int64_t rows, cols;
  float alpha, limit;  // of setpoint_clamped_swiglu_mul
  int32_t dtype, threads;
};

struct SoftCapCall {
  void* x;  // [rows, cols], in place
  int64_t rows, cols;
  float cap;
  int32_t dtype, threads;
};

struct RopeCall {
  void* q;  // [T, H, D], rotated in place; token strides in elements
  const void* k;
  const void* v;
  const float* cos_sin;  // [max positions, rotary_dim]
  const int64_t* positions;
  void* k_cache;
  void* v_cache;
  const int64_t* kv_index;
  int64_t rows, num_heads, num_kv_heads, head_dim, rotary_dim, q_stride, k_stride, v_stride;
  float k_scale, v_scale;  // what caches in fp8 hold of K and V is divided by them
  int32_t dtype, kv_dtype, threads;
};

// Of latent attention: joins the two parts of q and of k, the second of them rotated.
struct LatentRopeCall {
  const void* q_latent;  // [rows, heads, rank]
  const void* q_rope;    // [rows, heads, rope], strides q_row and q_head
  const void* latent;    // [rows, rank]
  const void* k_rope;    // [rows, rope], stride k_row
  void* q;               // [rows, heads, rank + rope]
  const float* cos_sin;  // [max positions, rope]
  const int64_t* positions;
  void* cache;  // [.., rank + rope]
  const int64_t* kv_index;
  int64_t rows, heads, rank, rope, q_row, q_head, k_row;
  float scale;          // what a cache in fp8 holds is divided by it
  int32_t interleaved;  // whether neighbours are rotated together; they end up half a row apart
  int32_t dtype, kv_dtype, threads;
};

struct AttentionCall {
  AttentionPlan* plan;
  const void* q;        // [T, H, D], token stride q_stride
  void* out;            // [T, H, value_dim] contiguous
  const void* k_cache;  // [num_pages + 1, page_size, Hkv, D]
  const void* v_cache;  // the same with rows of value_stride, of which the first value_dim are V
  const int32_t* cu_q;  // [n + 1]
  const int32_t* kv_lens;
  const int32_t* slots;
  const int32_t* page_table;  // [num_slots, table_stride]
  const float* sinks;         // [num_heads] or null
  int64_t rows;               // n, sequences of the batch
  int64_t q_stride, table_stride, num_heads, num_kv_heads, head_dim, page_size;
  int64_t value_dim, value_stride;
  int64_t window;  // positions that a token sees, its own included; 0: all up to its own
  float scale;
  float softcap;  // 0: none
  float v_scale;  // of the values; that of the keys is in scale
  int32_t q_dtype, kv_dtype, threads;
};

struct BestCall {
  const void* logits;  // [rows, cols]
  int64_t* out;        // [rows]
  int64_t rows, cols;
  int32_t dtype, threads;
};

struct TopCall {
  const void* logits;  // [rows, cols]
  int64_t* out;        // [rows, count]
  int64_t rows, cols, count;
  int32_t dtype, threads;
};

struct MaskCall {
  void* logits;          // [.., cols]
  const int64_t* which;  // [rows]: the masked rows of logits
  const int32_t* words;  // [rows, words_per_row]
  int64_t rows, cols, words_per_row;
  int32_t dtype, threads;
};

// Columns [begins[r], begins[r + 1]) of out are those of rank r.
struct GatherCall {
  Ranks* ranks;
  const void* x;          // [rows, own columns]
  void* out;              // [rows, all columns]
  const int64_t* begins;  // [ranks + 1]
  int64_t rows;
  int32_t element_bytes;
  int32_t first_only;  // whether only rank 0 gets the result; out is undefined elsewhere
  int32_t threads;
};

// Row i of out is that of the rank that has ids[i]: one with first <= ids[i] < first + count.
struct GatherRowsCall {
  Ranks* ranks;
  const int32_t* ids;  // [rows]
  const void* x;       // [rows, row_bytes]
  void* out;           // the same
  int64_t rows, row_bytes, first, count;
  int32_t threads;
};

// The rows of all ranks, in the order of the ranks, of which each has as many as it has announced.
struct GatherTokensCall {
  Ranks* ranks;
  const void* x;  // [own rows, row_bytes]
  void* out;      // [rows, row_bytes]
  int64_t rows, row_bytes;
  int32_t threads;
};

// The rank's own rows among those of all.
struct OwnTokensCall {
  Ranks* ranks;
  const void* x;  // [all rows, row_bytes]
  void* out;      // [rows, row_bytes]
  int64_t rows, row_bytes;
  int32_t threads;
};

struct OwnIdsCall {
  const int32_t* ids;
  int32_t* out;  // id - first where the rank has it, else 0
  int64_t rows, first, count;
};

struct ProgramOp {
  void (*kernel)(const void* call);
  const void* call;
  int64_t* rows;      // the field of the call
  int64_t per_count;  // rows for each unit of the count
  int64_t counts;     // index of the program's count
  int64_t kind;       // index in nanoseconds to which its time is added
};

struct ProgramCall {
  const ProgramOp* ops;
  const int64_t* counts;  // of this step: tokens, sequences, ...
  int64_t* nanoseconds;   // [kinds] added to, or null
  int64_t num_ops;
  int32_t threads;
};
