// Products of gate and up that end in their activation.
#pragma once
#include "base/activations.h"
#include "products/panels.h"

// A call with a gate. Its columns are those of the panels.
struct GatedLinearCall {
  const LinearCall& call;
  const void* x;
  int64_t rows, columns, k_words;
  int32_t threads;

  explicit GatedLinearCall(const LinearCall& c)
      : call(c),
        x(c.x),
        rows(c.rows),
        columns((2 * c.columns + kPanel - 1) / kPanel * kPanel),
        k_words(c.k_words),
        threads(c.threads) {}
};

// Calls store(activated) with what the call's gate makes of a vector of gate and one of up. Values
// stay in registers: no function call, no branch per row.
template <class T, class Call, class Store>
inline __attribute__((always_inline)) void with_activation(const Call& call, const Store& store) {
  constexpr bool kCoarse = kRoundedToBF16<T>;
  if (call.gate == kSilu)
    store([](vf g, vf u) __attribute__((always_inline)) { return Silu::of<kCoarse>(g) * u; });
  else if (call.gate == kGeluTanh)
    store([](vf g, vf u) __attribute__((always_inline)) { return GeluTanh::of<kCoarse>(g) * u; });
  else
    store([alpha = call.alpha, limit = call.limit](vf g, vf u) __attribute__((always_inline)) {
      return ClampedSwiglu::of<kCoarse>(g, u, alpha, limit);
    });
}

template <class T, int M>
inline __attribute__((always_inline)) void store_sums(const GatedLinearCall& gated, int64_t row,
                                                      int64_t at,
                                                      const vf (&acc)[M][kTileVectors]) {
  static_assert(kTileVectors == 2);
  const LinearCall& call = gated.call;
  const int64_t left = call.columns - at / 2;
  if (left <= 0) return;
  const vf bias = call.bias ? load((const T*)call.bias + at) : vf{},
           up_bias = call.bias ? load((const T*)call.bias + at + W) : vf{};
  with_activation<T>(call, [&](const auto& activated) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      store_part((T*)call.out + (row + m) * call.out_row + at / 2,
                 activated(acc[m][0] + bias, acc[m][1] + up_bias), left);
  });
}
