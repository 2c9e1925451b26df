// Attention on a pool in fp8.
#include "attention/attention_run.h"

void attention_on_fp8(const AttentionCall& call, const AttentionWork& work) {
  narrow_attention<fp8>(call, work);
}
