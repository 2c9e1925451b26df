// The activations of gated layers.
#pragma once
#include "simd.h"

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
