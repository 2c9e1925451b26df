// Which implementation of a product runs. Those of one product give the same bits; which of them is
// the fastest depends on the processor and on the number of rows. probe.py measures it when the
// library is loaded, before any other kernel runs; nothing changes it afterwards.
#pragma once
#include <cstdint>

#include "base/tiles.h"

// In the order of setpoint_implementations (choices.cpp).
enum Product : int32_t { kProductBF16 = 0, kProductInt8 = 1, kProducts = 2 };
// Of bf16, where there are no tiles: pairs as they lie in memory, or widened to fp32 before.
enum : int32_t { kPairs = 0, kWidened = 1 };
// Of int8, where there are tiles.
enum : int32_t { kOnTiles = 0, kOnVectors = 1 };

// The most rows of each class but the last (choices.py has the same).
constexpr int64_t kClassRows[] = {1, 8, 32};
constexpr int kClasses = 4;

extern int32_t chosen_implementations[kProducts][kClasses];

inline int32_t chosen(Product product, int64_t rows) {
  int size_class = 0;
  while (size_class < kClasses - 1 && rows > kClassRows[size_class]) ++size_class;
  return chosen_implementations[product][size_class];
}
