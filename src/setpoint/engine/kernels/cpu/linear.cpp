// y = x Wᵀ + bias on weights in panels (panels.h) of fp32 or bf16, and the product of gate and up with its activation.
//
// Up to kTileRows rows of x meet a panel while it streams through once, so one row costs reading the weights, and many rows run at the
// rate of the multipliers.
#include "activations.h"
#include "panels.h"

namespace {

// A call with a gate. Its columns are those of the panels.
struct GatedLinearCall {
  const LinearCall& call;
  const void* x;
  int64_t rows, columns, k_words;
  int32_t threads;
};

template <class T>
inline vf activated(int32_t gate, vf v) {
  return gate == kSilu ? Silu::of<kRoundedToBF16<T>>(v) : GeluTanh::of<kRoundedToBF16<T>>(v);
}

template <class T, int M>
inline __attribute__((always_inline)) void store_sums(const GatedLinearCall& gated, int64_t row, int64_t at, const vf (&acc)[M][kTileVectors]) {
  static_assert(kTileVectors == 2);
  const LinearCall& call = gated.call;
  const int64_t left = call.columns - at / 2;
  if (left <= 0) return;
  const vf bias = call.bias ? load((const T*)call.bias + at) : vf{}, up_bias = call.bias ? load((const T*)call.bias + at + W) : vf{};
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const vf v = activated<T>(call.gate, acc[m][0] + bias) * (acc[m][1] + up_bias);
    store_part((T*)call.out + (row + m) * call.columns + at / 2, v, left);
  }
}

template <class Mul, class T, class Call>
void linear(const Call& call, const void* weight) {
  typedef typename Mul::word word;
  for_panels(call, [](int) { return 0; }, [&](int, int64_t panel, Range rows, bool last) {
    panel_rows<Mul, T>(call, rows, panel, (const word*)weight + panel * kPanel * call.k_words, last);
  });
}

template <class Mul, class T>
void linear(const LinearCall& call) {
  if (call.gate == kNoGate) return linear<Mul, T>(call, call.weight);
  const int64_t panels = (2 * call.columns + kPanel - 1) / kPanel;
  linear<Mul, T>(GatedLinearCall{call, call.x, call.rows, panels * kPanel, call.k_words, call.threads}, call.weight);
}

}  // namespace

extern "C" {

// Columns of a vector.
int64_t setpoint_vector_columns() { return W; }

void setpoint_linear(const LinearCall* call) {
  call->dtype == kBF16 ? linear<MulBF16, bf16>(*call) : linear<MulF32, float>(*call);
}

}  // extern "C"
