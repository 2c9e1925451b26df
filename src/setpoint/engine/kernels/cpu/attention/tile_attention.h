// The products of attention on tiles (tiles.h), in place of those of strips.h. A block's keys are
// taken in steps of 32, so that a probability of zero beyond the keys that a row sees adds nothing,
// no matter how the row is computed.
#pragma once
#include "attention/plan.h"
#include "attention/strips.h"
#include "base/tiles.h"

#if SP_TILES

// A marker: the pool and the queries are bf16, the products are those of tiles.
struct MulTiles : MulBF16 {};

// Keys whose products are one sum.
constexpr int64_t kKeyStep = 2 * kTile;

// The first `rows` columns of c [16][16], turned: to[r * kBlock + i] = c[i][r].
inline void turn_columns(const float* c, int64_t rows, float* to) {
  for (int64_t r = 0; r < rows; r += 4) {
    __m512 lines[4];  // lane i: four columns of the row 4 i + n
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const float* from = c + n * kTile + r;
      lines[n] = _mm512_castps128_ps512(_mm_load_ps(from));
      lines[n] = _mm512_mask_broadcast_f32x4(lines[n], 0x00f0, _mm_load_ps(from + 4 * kTile));
      lines[n] = _mm512_mask_broadcast_f32x4(lines[n], 0x0f00, _mm_load_ps(from + 8 * kTile));
      lines[n] = _mm512_mask_broadcast_f32x4(lines[n], 0xf000, _mm_load_ps(from + 12 * kTile));
    }
    const __m512 a = _mm512_unpacklo_ps(lines[0], lines[1]),
                 b = _mm512_unpackhi_ps(lines[0], lines[1]);
    const __m512 d = _mm512_unpacklo_ps(lines[2], lines[3]),
                 e = _mm512_unpackhi_ps(lines[2], lines[3]);
    const __m512 columns[4] = {_mm512_shuffle_ps(a, d, 0x44), _mm512_shuffle_ps(a, d, 0xee),
                               _mm512_shuffle_ps(b, e, 0x44), _mm512_shuffle_ps(b, e, 0xee)};
    for (int64_t n = 0; n < 4 && r + n < rows; ++n) store(to + (r + n) * kBlock, (vf)columns[n]);
  }
}

// 16 rows of the pool as a tile of their words [k, k + 16): where they lie if they are evenly
// spaced and the words whole, else a copy. Of an 8-bit pool, a copy in bf16.
struct PoolTile {
  const void* rows;
  int64_t stride;

  PoolTile(const PoolReader<fp8>& reader, const fp8* const* keys, int64_t begin, int64_t k,
           int64_t dim, uint32_t (*copy)[kTile])
      : rows(copy), stride(sizeof(copy[0])) {
    const int64_t codes = dim - 2 * k < 2 * kTile ? dim - 2 * k : 2 * kTile;
    for (int i = 0; i < kTile; ++i) {
      fp8 row[2 * kTile] = {};
      __builtin_memcpy(row, keys[i] + begin + 2 * k, codes);
      store_raw(copy[i], key_words(MulBF16(), reader, row, 0));
    }
  }

  PoolTile(const PoolReader<bf16>&, const bf16* const* keys, int64_t begin, int64_t k, int64_t dim,
           uint32_t (*copy)[kTile]) {
    const int64_t words = dim / 2 - k < kTile ? dim / 2 - k : kTile;
    stride = (const char*)keys[1] - (const char*)keys[0];
    bool even = words == kTile;
    for (int i = 2; even && i < kTile; ++i)
      even = (const char*)keys[i] - (const char*)keys[i - 1] == stride;
    rows = keys[0] + begin + 2 * k;
    if (even) return;
    for (int i = 0; i < kTile; ++i) {
      __builtin_memset(copy[i], 0, sizeof(copy[i]));
      __builtin_memcpy(copy[i], keys[i] + begin + 2 * k, words * 4);
    }
    rows = copy;
    stride = sizeof(copy[0]);
  }
};

// Scores of up to 16 query rows with the keys [begin_key, end_key) of a block, which are read in
// place: the keys are the rows of the first factor, and the queries, turned by load_turned, the
// columns of the second.
template <class KV, class Touch>
inline void few_scores_on_tiles(const PoolReader<KV>& reader, const KV* const* keys, int64_t begin,
                                int64_t begin_key, int64_t end_key, int64_t dim, int64_t dim_words,
                                const uint32_t* turned, int64_t rows, float* scores,
                                const Touch& touch) {
  alignas(64) uint32_t copies[2][kTile][kTile];
  alignas(64) float sums[2][kTile * kTile];
  for (int64_t j = begin_key; j < end_key; j += kKeyStep) {
    Tiles::zero<0>();
    Tiles::zero<1>();
    for (int64_t k = 0; k < dim_words; k += kTile) {
      touch();
      const PoolTile a(reader, keys + j, begin, k, dim, copies[0]),
          b(reader, keys + j + kTile, begin, k, dim, copies[1]);
      Tiles::load<6>(turned + k * kTile, kTile * 4);
      Tiles::load<4>(a.rows, a.stride);
      Tiles::load<5>(b.rows, b.stride);
      Tiles::multiply_bf16<0, 4, 6>();
      Tiles::multiply_bf16<1, 5, 6>();
    }
    Tiles::store<0>(sums[0], kTile * 4);
    Tiles::store<1>(sums[1], kTile * 4);
    turn_columns(sums[0], rows, scores + j);
    turn_columns(sums[1], rows, scores + j + kTile);
  }
}

// C tiles 0 … N - 1 += the tile of A at a times N neighbouring tiles of B, b_next words apart.
template <int N, int I = 0>
inline __attribute__((always_inline)) void multiply_row(const uint32_t* b, int64_t b_next,
                                                        int64_t b_stride) {
  if constexpr (I < N) {
    Tiles::load<6 + I % 2>(b + I * b_next, b_stride);
    Tiles::multiply_bf16<I, 4, 6 + I % 2>();
    multiply_row<N, I + 1>(b, b_next, b_stride);
  }
}
template <int N, int I = 0>
inline void zero_tiles() {
  if constexpr (I < N) {
    Tiles::zero<I>();
    zero_tiles<N, I + 1>();
  }
}
template <int N, int I = 0>
inline void store_tiles(float* to, int64_t stride) {
  if constexpr (I < N) {
    Tiles::store<I>(to + I * kTile, stride);
    store_tiles<N, I + 1>(to, stride);
  }
}

// 16 rows of words a (a_stride bytes apart) x N neighbouring tiles of columns, to `to` (to_stride
// bytes apart); `steps` tiles of K, b_step words apart.
template <int N>
inline void strip_on_tiles(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_next,
                           int64_t b_step, int64_t b_stride, int64_t steps, float* to,
                           int64_t to_stride) {
  zero_tiles<N>();
  for (int64_t k = 0; k < steps; ++k) {
    Tiles::load<4>(a + k * kTile, a_stride);
    multiply_row<N>(b + k * b_step, b_next, b_stride);
  }
  store_tiles<N>(to, to_stride);
}

#endif
