// The division of a step's attention (plan.h), and its computation on a pool in fp32 or bf16.
#include <vector>

#include "attention/attention_run.h"
#include "base/buffer.h"

// attention_fp8.cpp, which is compiled beside this file.
void attention_on_fp8(const AttentionCall& call, const AttentionWork& work);

extern "C" {

void* setpoint_plan_create() { return new AttentionPlan; }

void setpoint_plan_free(void* plan) { delete static_cast<AttentionPlan*>(plan); }

// Reads everything of `call` but q, out, the caches and what differs between layers (scale,
// softcap, window, sinks).
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
  switch (call.kv_dtype) {
    case kF32:
      return attention<MulF32, float>(call, work);
    case kBF16:
      return narrow_attention<bf16>(call, work);
    default:
      return attention_on_fp8(call, work);
  }
}

}  // extern "C"
