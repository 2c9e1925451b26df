// y = x Wᵀ + bias on weights in panels (panels.h) of fp32 or bf16.
//
// Up to kTileRows rows of x meet a panel while it streams through once, so one row costs reading the weights, and many rows run at the
// rate of the multipliers.
#include "panels.h"

namespace {

template <class Mul, class T>
void linear(const LinearCall& call) {
  typedef typename Mul::word word;
  for_panels(call, [](int) { return 0; }, [&](int, int64_t panel, Range rows, bool last) {
    panel_rows<Mul, T>(call, rows, panel, (const word*)call.weight + panel * kPanel * call.k_words, last);
  });
}

}  // namespace

extern "C" void setpoint_linear(const LinearCall* call) {
  call->dtype == kBF16 ? linear<MulBF16, bf16>(*call) : linear<MulF32, float>(*call);
}
