#include "products/choices.h"

int32_t chosen_implementations[kProducts][kClasses] = {};

extern "C" {

// "product=name,name;…": what this level has of each product. Without a choice they run the first.
const char* setpoint_implementations() {
#if SP_TILES
  return "bf16=matrix tiles;int8=matrix tiles,vectors";
#elif defined(__AVX512BF16__)
  return "bf16=bf16 pairs,fp32;int8=vectors";
#elif SP_WIDTH > 4
  return "bf16=fp32 widened on the way,fp32 widened before;int8=vectors";
#else
  return "bf16=fp32;int8=vectors";
#endif
}

void setpoint_choose(int32_t product, int32_t size_class, int32_t implementation) {
  chosen_implementations[product][size_class] = implementation;
}
}
