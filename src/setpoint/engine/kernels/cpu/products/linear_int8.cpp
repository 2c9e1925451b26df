// y = x Wᵀ + bias with weights and activations of 8 bits: what quant/w8a8_int8.py defines. Sums are
// integers, hence exact, so that a row has the same bits in any batch and at any level (where the
// bias is added, levels differ in how often that rounds).
//
// Each row of x is rotated, unless the weights are not, and rounded once per call, to scratch, as
// the unsigned numbers q + 128. The 128s add 128 times the sum of a column's weights to its result,
// which is taken off again at the end.
#include "products/choices.h"
#include "products/gated.h"
#include "products/int8_rows.h"

namespace {

// The call that panels.h works on; with a gate the columns are those of the panels.
struct Rounded {
  const void* x;  // [M][k_words] in scratch
  const float* row_scales;
  const Int8LinearCall& call;
  int64_t rows, columns, k_words;
  int32_t threads;
};
struct GatedRounded : Rounded {};

struct Rounding {
  bool rotates;
  float scale;  // 0: each row has its own
};

// Rounds numbers to q + 128 by a scale that is known before; larger ones become the largest.
inline void round_by(const float* x, float scale, uint8_t* out, int64_t bytes) {
  typedef uint8_t vb __attribute__((vector_size(W)));
  for (int64_t i = 0; i < bytes; i += W) {
    vf v = load(x + i) / scale;
    v = v < 127.f ? v : splat(127.f);
    v = v > -128.f ? v : splat(-128.f);
    const vb q = __builtin_convertvector(nearest(v) + 128, vb);
    __builtin_memcpy(out + i, &q, bytes - i < W ? bytes - i : W);
  }
}

// Converts one row of x to q + 128, `bytes` of them (K padded to whole words), and returns its
// scale.
template <class T>
float round_row(const T* x, int64_t k, uint8_t* out, int64_t bytes, Rounding how) {
  thread_local Buffer buffer;
  float* row = (float*)buffer.at_least((bytes + W) * 4);
  const int32_t bits = most_of(how.rotates ? rotate_row(x, k, row) : rotate<1>(x, k, row));
  if (how.scale <= 0.f) return round_numbers(row, bits, out, bytes);
  round_by(row, how.scale, out, bytes);
  return bits < 0x7f800000 ? how.scale : __builtin_nanf("");
}

// Converts the sums of a vector of columns to fp32.
template <class T>
struct Columns {
  vf scale, bias;
  vi shift;
  inline Columns(const Int8LinearCall& call, int64_t at, int64_t left)
      : scale(load(call.scales + at)),
        bias(call.bias ? load_part((const T*)call.bias + at, left) : vf{}),
        shift(load_raw<vi>(call.shifts + at)) {}
  inline vf operator()(vi sums, float row_scale) const {
    return __builtin_convertvector(sums + shift, vf) * (scale * row_scale) + bias;
  }
};

template <class T, int M>
inline __attribute__((always_inline)) void store_sums(const Rounded& x, int64_t row, int64_t at,
                                                      const vi (&acc)[M][kTileVectors]) {
  const Int8LinearCall& call = x.call;
#pragma GCC unroll 4
  for (int v = 0; v < kTileVectors; ++v, at += W) {
    const int64_t left = call.columns - at;
    if (left <= 0) return;
    const Columns<T> columns(call, at, left);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      store_part((T*)call.out + (row + m) * call.columns + at,
                 columns(acc[m][v], x.row_scales[row + m]), left);
  }
}

template <class T, int M>
inline __attribute__((always_inline)) void store_sums(const GatedRounded& x, int64_t row,
                                                      int64_t at,
                                                      const vi (&acc)[M][kTileVectors]) {
  static_assert(kTileVectors == 2);
  const Int8LinearCall& call = x.call;
  const int64_t left = call.columns - at / 2;
  if (left <= 0) return;
  const Columns<T> gate(call, at, W), up(call, at + W, W);
  with_activation<T>(call, [&](const auto& activated) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const float scale = x.row_scales[row + m];
      store_part((T*)call.out + (row + m) * call.columns + at / 2,
                 activated(gate(acc[m][0], scale), up(acc[m][1], scale)), left);
    }
  });
}

template <class T>
void round_rows(const T* x, int64_t rows, int64_t k, uint8_t* out, int64_t bytes, float* scales,
                Rounding how, int threads) {
  for_rows(rows, k, threads, [&](int64_t row) {
    scales[row] = round_row(x + row * k, k, out + row * bytes, bytes, how);
  });
}

template <class T, class X>
void multiply_on_vectors(const X& x) {
  for_panels(
      x, [](int) { return 0; },
      [&](int, int64_t panel, Range range, bool last) {
        const uint32_t* words = (const uint32_t*)x.call.weight + panel * kPanel * x.k_words;
        panel_rows<MulInt8, T>(x, range, panel, words,
                               Ahead::behind(words, kPanel * x.k_words * 4, last));
      });
}

template <class T, class X>
void multiply(const X& x) {
#if SP_TILES
  if (chosen(kProductInt8, x.rows) == kOnVectors) return multiply_on_vectors<T>(x);
  const TileRows rows(x.x, x.k_words);
  const int64_t steps = x.k_words / kTile;
  for_panels(
      x, [](int) { return Tiles(); },
      [&](Tiles&, int64_t panel, Range range, bool last) {
        tile_rows<TileInt8, T>(x, rows, range, panel,
                               (const uint32_t*)x.call.weight + panel * steps * kStepWords, steps,
                               last);
      });
#else
  multiply_on_vectors<T>(x);
#endif
}

template <class T>
void linear_int8(const Int8LinearCall& call) {
  thread_local Buffer scratch;
  const int64_t bytes = call.k_words * 4;
  const int64_t held = (call.rows + kRowAlign - 1) / kRowAlign * kRowAlign;
  uint8_t* rows = (uint8_t*)scratch.at_least(held * (bytes + 4));
  float* scales = (float*)(rows + held * bytes);
  const Rounding how{call.rotated != 0, call.x_scale};
  round_rows((const T*)call.x, call.rows, call.k, rows, bytes, scales, how, call.threads);
  const Rounded x{rows, scales, call, call.rows, call.columns, call.k_words, call.threads};
  if (call.gate == kNoGate) return multiply<T>(x);
  GatedRounded gated{x};
  gated.columns = (2 * call.columns + kPanel - 1) / kPanel * kPanel;
  multiply<T>(gated);
}

}  // namespace

extern "C" {

void setpoint_linear_int8(const Int8LinearCall* call) {
  call->dtype == kBF16 ? linear_int8<bf16>(*call) : linear_int8<float>(*call);
}

// Rows of a weight as those of x: x [rows, k] -> out [rows, bytes], q + 128, and scales [rows].
void setpoint_int8_round(const void* x, int64_t rows, int64_t k, uint8_t* out, int64_t bytes,
                         float* scales, int32_t dtype, int32_t threads) {
  const Rounding how{true, 0.f};
  if (dtype == kBF16)
    round_rows((const bf16*)x, rows, k, out, bytes, scales, how, threads);
  else
    round_rows((const float*)x, rows, k, out, bytes, scales, how, threads);
}
}
