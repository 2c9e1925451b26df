// Measures what the machine can do at best: reading memory in order, and multiplying in registers.
// The time is the result; the computed values are not used.
#include "base/simd.h"
#include "base/threads.h"
#include "base/tiles.h"

namespace {

constexpr int64_t kReadBlock = 64 * 1024;
constexpr int kStreams = 8;

#if SP_WIDTH == 16
constexpr int kA = 5,
              kB = 4;  // 20 sums and 9 factors in 32 registers: more sums than latency times ports
#else
constexpr int kA = 3, kB = 3;  // 9 and 6 in 16
#endif

// Makes the compiler forget what it knows of a register, so that it can neither hoist nor drop what
// depends on it.
template <class V>
inline void forget(V& v) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(v));
#else
  asm volatile("" : "+w"(v));
#endif
}

struct F32 {
  typedef vf vec;
  static constexpr int per_lane = 1;
  static inline vf step(vf acc, vf a, vf b) { return a * b + acc; }
};
// On levels without products of bf16, a bf16 is multiplied as the fp32 whose upper half it is.
#if defined(__AVX512BF16__) && SP_WIDTH == 16
struct BF16 {
  typedef vf vec;
  static constexpr int per_lane = 2;
  static inline vf step(vf acc, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }
};
#else
typedef F32 BF16;
#endif
// Without an instruction for four bytes, two products of a lane take two instructions: as many as
// in fp32.
#if defined(__AVX512VNNI__) && SP_WIDTH == 16
struct Int8 {
  typedef vi vec;  // as vf, sums would be copied at every round
  static constexpr int per_lane = 4;
  static inline vi step(vi acc, vi a, vi b) {
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
  }
};
#elif defined(__AVXVNNI__) && SP_WIDTH == 8
struct Int8 {
  typedef vi vec;
  static constexpr int per_lane = 4;
  static inline vi step(vi acc, vi a, vi b) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
  }
};
#else
typedef F32 Int8;
#endif

template <class Product>
void multiply_registers(int64_t rounds) {
  typedef typename Product::vec vec;
  vec a[kA], b[kB], acc[kA][kB];
  for (int i = 0; i < kA; ++i) a[i] = (vec)splat(1e-3f * (i + 1));
  for (int j = 0; j < kB; ++j) b[j] = (vec)splat(1e-3f * (j + 1));
  for (int i = 0; i < kA; ++i)
    for (int j = 0; j < kB; ++j) acc[i][j] = vec{};
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 8
    for (int j = 0; j < kB; ++j) forget(b[j]);
#pragma GCC unroll 8
    for (int i = 0; i < kA; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < kB; ++j) acc[i][j] = Product::step(acc[i][j], a[i], b[j]);
  }
  for (int i = 0; i < kA; ++i)
    for (int j = 0; j < kB; ++j) forget(acc[i][j]);
}

#if SP_TILES
// On tiles, with every operand loaded from the first-level cache, as kernels load them: two by two
// products.
constexpr int kSteps = 4;

struct TileOperands {
  alignas(64) uint32_t tiles[kSteps][4][kTile][kTile] = {};
};

template <class Product>
void multiply_tiles(int64_t rounds) {
  static const TileOperands operands;
  Tiles tiles;
  Tiles::zero<0>();
  Tiles::zero<1>();
  Tiles::zero<2>();
  Tiles::zero<3>();
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 4
    for (int k = 0; k < kSteps; ++k) {
      const auto& at = operands.tiles[k];
      Tiles::load<4>(at[0], kTile * 4);
      Tiles::load<6>(at[1], kTile * 4);
      Product::template multiply<0, 4, 6>();
      Tiles::load<7>(at[2], kTile * 4);
      Product::template multiply<1, 4, 7>();
      Tiles::load<5>(at[3], kTile * 4);
      Product::template multiply<2, 5, 6>();
      Product::template multiply<3, 5, 7>();
    }
}
#endif

void read_block(const char* p, int64_t bytes) {
  vu acc[kStreams] = {};
  for (int64_t i = 0; i + kStreams * (int64_t)sizeof(vu) <= bytes; i += kStreams * sizeof(vu))
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) acc[s] ^= load_raw<vu>(p + i + s * sizeof(vu));
  for (int s = 0; s < kStreams; ++s) forget(acc[s]);
}

}  // namespace

// Reads `bytes` from `data` on, each thread its own part in order.
extern "C" void setpoint_read_memory(const void* data, int64_t bytes, int32_t threads) {
  auto no_state = [](int) { return 0; };
  for_units((bytes + kReadBlock - 1) / kReadBlock, threads, no_state, [&](int, int64_t block) {
    const int64_t left = bytes - block * kReadBlock;
    read_block((const char*)data + block * kReadBlock, left < kReadBlock ? left : kReadBlock);
  });
}

// `rounds` of independent multiply-adds on every thread; -> operations of one round on one thread.
template <class Product>
static int64_t multiply(int64_t rounds, int32_t threads) {
  auto no_state = [](int) { return 0; };
  for_units(threads, threads, no_state, [&](int, int64_t) { multiply_registers<Product>(rounds); });
  return 2 * kA * kB * W * Product::per_lane;
}

#if SP_TILES
template <class Product>
static int64_t multiply_on_tiles(int64_t rounds, int32_t threads) {
  auto no_state = [](int) { return 0; };
  for_units(threads, threads, no_state, [&](int, int64_t) { multiply_tiles<Product>(rounds); });
  return 2 * 4 * kSteps * kTile * kTile * kTile * Product::per_word;
}
#endif

// product: limits.py, PRODUCTS.
extern "C" int64_t setpoint_multiply(int32_t product, int64_t rounds, int32_t threads) {
  switch (product) {
    case 0:
      return multiply<F32>(rounds, threads);
#if SP_TILES
    case 1:
      return multiply_on_tiles<TileBF16>(rounds, threads);
    default:
      return multiply_on_tiles<TileInt8>(rounds, threads);
#else
    case 1:
      return multiply<BF16>(rounds, threads);
    default:
      return multiply<Int8>(rounds, threads);
#endif
  }
}
