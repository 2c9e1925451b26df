// The C entry points: pick the level's table, lend memory. Raw pointers and sizes only; the Python side has checked
// dtypes, shapes and contiguity.
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

#include "kernels.h"
#include "plan.h"

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

void* setpoint_plan_create() { return new AttentionPlan; }

void setpoint_plan_free(void* plan) { delete static_cast<AttentionPlan*>(plan); }

// Reads everything of `call` but q, out and the caches.
void setpoint_plan_build(void* plan, const AttentionCall* call, int32_t num_rows) {
  static_cast<AttentionPlan*>(plan)->build(*call, num_rows);
}

void setpoint_attention(int32_t level, const void* plan_pointer, const AttentionCall* call) {
  const AttentionPlan& plan = *static_cast<const AttentionPlan*>(plan_pointer);
  thread_local std::vector<int32_t> open_items;
  thread_local Buffer scratch, partials;
  open_items = plan.open_items;
  const int64_t per_thread = attention_scratch_bytes(call->head_dim);
  const AttentionWork work{plan.segments.data(),
                           plan.items.data(),
                           static_cast<int32_t>(plan.items.size()),
                           open_items.data(),
                           plan.partial_begin.data(),
                           reinterpret_cast<float*>(partials.at_least(plan.num_partial_words * 4)),
                           scratch.at_least(per_thread * call->threads),
                           per_thread};
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
