// Matrices in the kinds of blocks that are made of quantised folders (decision 0080): see
// blocks.cpp.
#include "blocks/block_products.h"

namespace {

// As core.model.BLOCK_KINDS says.
static_assert(Layout<kINT4Z>::kGroupBytes == kPanel * 19);
static_assert(Layout<kINT8Z>::kGroupBytes == kPanel * 37);
static_assert(Layout<kFP8>::kGroupBytes == kPanel * 36);

}  // namespace

const BlockCode* code_of_folders(int32_t kind) {
  switch (kind) {
    case kINT4Z:
      return &kCodeOf<kINT4Z>;
    case kINT8Z:
      return &kCodeOf<kINT8Z>;
    case kFP8:
      return &kCodeOf<kFP8>;
  }
  return nullptr;
}
