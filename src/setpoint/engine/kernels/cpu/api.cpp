// The C entry points: pick the level's table, split attention into items. Raw pointers and sizes only; the Python side has checked
// dtypes, shapes and contiguity.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"

namespace {

struct Level {
  const char* name;
  const KernelTable* table;
  bool (*runs_here)();
};

const Level levels[] = {  // best first
#if defined(__x86_64__)
    {"avx512_bf16", &table_avx512_bf16,
     [] { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"); }},
    {"avx512", &table_avx512, [] { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"); }},
    {"avx2", &table_avx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {"scalar", &table_scalar, [] { return true; }},
};

// Grows, never shrinks; one per calling thread.
class Buffer {
 public:
  char* at_least(int64_t bytes) {
    if (bytes > size_) {
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_.reset(static_cast<char*>(std::aligned_alloc(4096, size_)));
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Splits a call into items. Splitting never changes a result (see kBlock), so it may look at the whole batch.
struct Planner {
  const AttentionCall& call;
  int64_t num_rows;
  std::vector<AttentionItem>& items;
  std::vector<int32_t>& counters;
  int64_t partial_total = 0;  // fp32 words

  void plan() {
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t tokens_per_item = std::max<int64_t>(1, kQueryRows / group);
    int64_t units = 0;
    for (int64_t row = 0; row < num_rows; ++row)
      units += ceil_div(call.kv_lens[row], kBlock) * call.num_kv_heads * ceil_div(call.cu_q[row + 1] - call.cu_q[row], tokens_per_item);
    const int64_t target = std::max<int64_t>(1, units / (call.threads * 8));
    for (int32_t row = 0; row < num_rows; ++row) {
      const int32_t tokens = call.cu_q[row + 1] - call.cu_q[row];
      if (tokens <= tokens_per_item) {
        short_row(row, tokens, target, group);
        continue;
      }
      // The last tokens see the most keys: longest items first.
      for (int32_t token = (tokens - 1) / tokens_per_item * tokens_per_item; token >= 0; token -= tokens_per_item) {
        const int32_t count = std::min<int32_t>(tokens_per_item, tokens - token);
        const int32_t blocks = ceil_div(call.kv_lens[row] - tokens + token + count, kBlock);
        for (int32_t head = 0; head < call.num_kv_heads; ++head) items.push_back({row, token, count, head, head + 1, 0, blocks, -1, 0});
      }
    }
  }

  void short_row(int32_t row, int32_t tokens, int64_t target, int64_t group) {
    const int32_t heads = call.num_kv_heads, blocks = ceil_div(call.kv_lens[row], kBlock);
    const int64_t pieces = ceil_div(blocks * heads, target);
    if (call.threads == 1 || pieces <= heads) {
      const int32_t step = call.threads == 1 ? heads : ceil_div(heads, pieces);
      for (int32_t head = 0; head < heads; head += step)
        items.push_back({row, 0, tokens, head, std::min(head + step, heads), 0, blocks, -1, 0});
      return;
    }
    const int32_t run = ceil_div(blocks * heads, pieces);
    const int64_t base = partial_total;
    partial_total += blocks * heads * partial_words(tokens * group, call.head_dim);
    const int32_t first = items.size();
    for (int32_t block = 0; block < blocks; block += run)
      for (int32_t head = 0; head < heads; ++head)
        items.push_back({row, 0, tokens, head, head + 1, block, std::min(block + run, blocks), base, static_cast<int32_t>(counters.size())});
    counters.push_back(static_cast<int32_t>(items.size()) - first);
  }
};

}  // namespace

extern "C" {

// The index of the level called `name`, or of the best one for an empty name; -1 if it is unknown, -2 if this machine lacks it.
int32_t setpoint_find_level(const char* name) {
  for (size_t i = 0; i < std::size(levels); ++i) {
    if (*name && std::strcmp(name, levels[i].name)) continue;
    if (levels[i].runs_here()) return static_cast<int32_t>(i);
    if (*name) return -2;
  }
  return -1;
}

const char* setpoint_level_name(int32_t level) { return levels[level].name; }

void setpoint_attention(int32_t level, const AttentionCall* call, int64_t num_rows) {
  thread_local std::vector<AttentionItem> items;
  thread_local std::vector<int32_t> counters;
  thread_local Buffer scratch, partials;
  items.clear();
  counters.clear();
  Planner planner{*call, num_rows, items, counters};
  planner.plan();
  const int64_t per_thread = attention_scratch_bytes(call->head_dim);
  const AttentionWork work{items.data(), static_cast<int32_t>(items.size()), counters.data(), scratch.at_least(per_thread * call->threads),
                           per_thread, partials.at_least(planner.partial_total * 4)};
  levels[level].table->attention(*call, work);
}

void setpoint_rms_norm(int32_t level, const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t cols, float eps,
                       int32_t dtype, int32_t threads) {
  levels[level].table->rms_norm(x, residual, weight, out, rows, cols, eps, dtype, threads);
}

void setpoint_rope_and_store(int32_t level, const RopeCall* call) { levels[level].table->rope_and_store(*call); }

void setpoint_silu_mul(int32_t level, const void* gate_up, void* out, int64_t rows, int64_t cols, int32_t dtype, int32_t threads) {
  levels[level].table->silu_mul(gate_up, out, rows, cols, dtype, threads);
}

void setpoint_linear(int32_t level, const LinearCall* call) { levels[level].table->linear(*call); }

}  // extern "C"
