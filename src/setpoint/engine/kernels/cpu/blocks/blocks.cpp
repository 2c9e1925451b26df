// Matrices in blocks: which code multiplies, packs and reads each kind. Three files instantiate it,
// because the compiler needs longer for it than for anything else.
#include "blocks/block_products.h"

// Of the kinds in small_blocks.cpp and in folder_blocks.cpp; nullptr: it is none of them.
const BlockCode* code_of_small(int32_t kind);
const BlockCode* code_of_folders(int32_t kind);

namespace {

// As core.model.BLOCK_KINDS says, by which memory is allocated.
static_assert(Layout<kQ4_0>::kGroupBytes == kPanel * 18);
static_assert(Layout<kQ4_1>::kGroupBytes == kPanel * 20);
static_assert(Layout<kQ8_0>::kGroupBytes == kPanel * 34);
static_assert(Layout<kQ4_K>::kGroupBytes == kPanel * 148);
static_assert(Layout<kQ6_K>::kGroupBytes == kPanel * 210);
static_assert(Layout<kMXFP4>::kGroupBytes == kPanel * 17);

const BlockCode& code_of_kind(int32_t kind) {
  switch (kind) {
    case kQ4_0:
      return kCodeOf<kQ4_0>;
    case kQ4_1:
      return kCodeOf<kQ4_1>;
    case kQ8_0:
      return kCodeOf<kQ8_0>;
    case kQ4_K:
      return kCodeOf<kQ4_K>;
    case kQ6_K:
      return kCodeOf<kQ6_K>;
    case kMXFP4:
      return kCodeOf<kMXFP4>;
  }
  const BlockCode* small = code_of_small(kind);
  return small ? *small : *code_of_folders(kind);
}

}  // namespace

// call.weight: packed; x, bias and out in bf16.
void linear_on_blocks(const LinearCall& call) { code_of_kind(call.blocks).multiply(call); }

extern "C" {

// raw: rows of the file, each of `blocks` times kBlock values; `blocks` is a multiple of kGroup.
// gated: the first half of them is the gate, the second one up, and they are laid out as LinearCall
// says. to: as many panels as the columns need.
void setpoint_pack_blocks(const uint8_t* raw, int64_t rows, int64_t blocks, uint8_t* to,
                          int32_t kind, int32_t gated, int32_t threads) {
  code_of_kind(kind).pack(raw, rows, blocks, to, gated, threads);
}

void setpoint_block_rows(const BlockRowsCall* call) {
  const BlockCode& code = code_of_kind(call->kind);
  look_up(*call, [&](int64_t id, bf16* to) { code.read_row(call->weight, id, call->blocks, to); });
}
}
