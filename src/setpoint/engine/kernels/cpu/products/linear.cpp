// y = x Wᵀ + bias on weights in panels (panels.h) of fp32 or bf16, and the product of gate and up
// with its activation.
//
// Up to kTileRows rows of x meet a panel while it streams through once, so one row costs reading
// the weights, and many rows run at the rate of the multipliers.
#if defined(SETPOINT_TILES)
#include <cpuid.h>
#endif

#include "products/choices.h"
#include "products/gated.h"
#include "products/widened.h"

namespace {

template <class Mul, class T, class Call>
void linear(const Call& call, const void* weight) {
  typedef typename Mul::packed packed;
  for_panels(
      call, [](int) { return 0; },
      [&](int, int64_t panel, Range rows, bool last) {
        const packed* words = (const packed*)weight + panel * kPanel * call.k_words;
        panel_rows<Mul, T>(call, rows, panel, words,
                           Ahead::behind(words, kPanel * call.k_words * 4, last));
      });
}

template <class Mul, class T>
void linear(const LinearCall& call) {
  call.gate == kNoGate ? linear<Mul, T>(call, call.weight)
                       : linear<Mul, T>(GatedLinearCall(call), call.weight);
}

#if SP_TILES
template <class Call>
void linear_on_tiles(const Call& call, const void* weight) {
  const TileRows x(call.x, call.rows, call.k_words);
  const int64_t steps = tile_words(call.k_words) / kTile;
  for_panels(
      call, [](int) { return Tiles(); },
      [&](Tiles&, int64_t panel, Range rows, bool last) {
        tile_rows<TileBF16, bf16>(call, x, rows, panel,
                                  (const uint32_t*)weight + panel * steps * kStepWords, steps,
                                  last);
      });
}
#endif

}  // namespace

#if !SP_TILES
template <class Mul>
static void multiply_panel(const LinearCall& call, Range rows, int64_t panel, const uint32_t* words,
                           Ahead ahead) {
  call.gate == kNoGate ? panel_rows<Mul, bf16>(call, rows, panel, words, ahead)
                       : panel_rows<Mul, bf16>(GatedLinearCall(call), rows, panel, words, ahead);
}

void multiply_panel(const LinearCall& call, const WidenedPair* widened, Range rows, int64_t panel,
                    const uint32_t* words, Ahead ahead) {
  if (!widened) return multiply_panel<MulBF16>(call, rows, panel, words, ahead);
  LinearCall on_widened = call;
  on_widened.x = widened;
  multiply_panel<MulWidened>(on_widened, rows, panel, words, ahead);
}
#endif

extern "C" {

// Columns of a vector.
int64_t setpoint_vector_columns() { return W; }

// Whether the processor has what this level's tiles need: some hypervisors name the instructions
// and offer no palette to configure.
int32_t setpoint_has_tiles() {
#if defined(SETPOINT_TILES)
  unsigned palettes = 0, b, c, d;
  return __get_cpuid_count(0x1d, 0, &palettes, &b, &c, &d) && palettes >= 1;
#else
  return 1;
#endif
}

// Words of K that a weight of bf16 or int8 is filled up to with zeros in its panels.
int64_t setpoint_k_multiple() {
#if SP_TILES
  return kTile;
#else
  return 1;
#endif
}

void setpoint_linear(const LinearCall* call) {
  if (call->rounded) return linear_on_rounded_blocks(*call);
  if (call->blocks) return linear_on_blocks(*call);
  if (call->dtype != kBF16) return linear<MulF32, float>(*call);
#if SP_TILES
  call->gate == kNoGate ? linear_on_tiles(*call, call->weight)
                        : linear_on_tiles(GatedLinearCall(*call), call->weight);
#else
  if (chosen(kProductBF16, call->rows) == kPairs) return linear<MulBF16, bf16>(*call);
  in_widened_batches(*call, [](LinearCall part, const WidenedPair* x) {
    part.x = x;
    linear<MulWidened, bf16>(part);
  });
#endif
}

}  // extern "C"
