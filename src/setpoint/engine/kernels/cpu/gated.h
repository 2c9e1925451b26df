// Products of gate and up that end in their activation.
#pragma once
#include "activations.h"
#include "panels.h"

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

// Calls store(activated) with the activation of a gate as a function of one vector. Values stay in
// registers: no function call, no branch per row.
template <class T, class Store>
inline __attribute__((always_inline)) void with_activation(int32_t gate, const Store& store) {
  if (gate == kSilu)
    store([](vf v) __attribute__((always_inline)) { return Silu::of<kRoundedToBF16<T>>(v); });
  else
    store([](vf v) __attribute__((always_inline)) { return GeluTanh::of<kRoundedToBF16<T>>(v); });
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
  with_activation<T>(call.gate, [&](const auto& activated) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      store_part((T*)call.out + (row + m) * call.columns + at / 2,
                 activated(acc[m][0] + bias) * (acc[m][1] + up_bias), left);
  });
}
