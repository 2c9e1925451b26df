// Matrices in the kinds of blocks with codes of 2, 3 and 5 bits and in those with a table: see
// blocks.cpp.
#include "blocks/block_products.h"

namespace {

// As core.model.BLOCK_KINDS says.
static_assert(Layout<kQ5_0>::kGroupBytes == kPanel * 26);
static_assert(Layout<kQ5_1>::kGroupBytes == kPanel * 28);
static_assert(Layout<kQ2_K>::kGroupBytes == kPanel * 164);
static_assert(Layout<kQ3_K>::kGroupBytes == kPanel * 146);
static_assert(Layout<kQ5_K>::kGroupBytes == kPanel * 212);
static_assert(Layout<kIQ4_NL>::kGroupBytes == kPanel * 18);
static_assert(Layout<kIQ4_XS>::kGroupBytes == kPanel * 138);

}  // namespace

const BlockCode* code_of_small(int32_t kind) {
  switch (kind) {
    case kQ5_0:
      return &kCodeOf<kQ5_0>;
    case kQ5_1:
      return &kCodeOf<kQ5_1>;
    case kQ2_K:
      return &kCodeOf<kQ2_K>;
    case kQ3_K:
      return &kCodeOf<kQ3_K>;
    case kQ5_K:
      return &kCodeOf<kQ5_K>;
    case kIQ4_NL:
      return &kCodeOf<kIQ4_NL>;
    case kIQ4_XS:
      return &kCodeOf<kIQ4_XS>;
  }
  return nullptr;
}
