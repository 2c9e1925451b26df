// y = x Wᵀ + bias on weights in panels (panels.h) of fp32 or bf16, and the product of gate and up with its activation.
//
// Up to kTileRows rows of x meet a panel while it streams through once, so one row costs reading the weights, and many rows run at the
// rate of the multipliers.
#include "gated.h"

namespace {

template <class Mul, class T, class Call>
void linear(const Call& call, const void* weight) {
  typedef typename Mul::word word;
  for_panels(call, [](int) { return 0; }, [&](int, int64_t panel, Range rows, bool last) {
    panel_rows<Mul, T>(call, rows, panel, (const word*)weight + panel * kPanel * call.k_words, last);
  });
}

template <class Mul, class T>
void linear(const LinearCall& call) {
  call.gate == kNoGate ? linear<Mul, T>(call, call.weight) : linear<Mul, T>(GatedLinearCall(call), call.weight);
}

}  // namespace

void multiply_panel(const LinearCall& call, Range rows, int64_t panel, const uint32_t* words) {
  call.gate == kNoGate ? panel_rows<MulBF16, bf16>(call, rows, panel, words, false)
                       : panel_rows<MulBF16, bf16>(GatedLinearCall(call), rows, panel, words, false);
}

extern "C" {

// Columns of a vector.
int64_t setpoint_vector_columns() { return W; }

void setpoint_linear(const LinearCall* call) {
  if (call->blocks) return linear_on_blocks(*call);
  call->dtype == kBF16 ? linear<MulBF16, bf16>(*call) : linear<MulF32, float>(*call);
}

}  // extern "C"
