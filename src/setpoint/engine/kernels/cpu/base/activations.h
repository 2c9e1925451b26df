// The activations of gated layers.
#pragma once
#include "base/simd.h"

// Whether results of this type are coarse enough for less precise exp2 and divisions.
template <class T>
constexpr bool kRoundedToBF16 = sizeof(T) == 2;

struct Silu {
  template <bool kCoarse>
  static inline vf of(vf g) {
    return divided<kCoarse>(g, exp2<kCoarse>(g * -1.44269504f) + 1.f);
  }
};

// x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  template <bool kCoarse>
  static inline vf of(vf g) {
    return divided<kCoarse>(g, exp2<kCoarse>((g * g * 0.044715f + 1.f) * g * -2.30220820f) + 1.f);
  }
};

// Of gpt-oss: the gate is limited above, what it multiplies on both sides. A NaN stays one.
struct ClampedSwiglu {
  template <bool kCoarse>
  static inline vf of(vf gate, vf up, float alpha, float limit) {
    const vf g = gate > splat(limit) ? splat(limit) : gate,
             low = up < splat(-limit) ? splat(-limit) : up,
             u = low > splat(limit) ? splat(limit) : low;
    return divided<kCoarse>(g, exp2<kCoarse>(g * (alpha * -1.44269504f)) + 1.f) * (u + 1.f);
  }
};
