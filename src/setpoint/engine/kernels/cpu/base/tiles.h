// Matrix tiles (AMX): registers of 16 rows of 16 words that are multiplied by one instruction. Two
// backends with the same bits: the instructions, and plain code in their order
// (SETPOINT_TILES_EMULATED), for machines without them.
//
// The order of a sum of bf16 products, which every number of rows has in common because every
// number of rows takes tiles: the 32 elements of K that a tile holds are two chains of fused
// multiply-adds from zero, one of the even and one of the odd elements; the two are added, and that
// is added to the sum of the tiles before. Subnormal numbers count as zeros, on the way in and on
// the way out. (Intel's manual, TDPBF16PS.) Sums of int8 products are exact.
#pragma once
#include "base/simd.h"

// Rows of a tile, and words in a row of it.
constexpr int kTile = 16;

#if defined(SETPOINT_TILES) || defined(SETPOINT_TILES_EMULATED)
#define SP_TILES 1

#if defined(SETPOINT_TILES)

// All eight tiles are 16 rows of 64 bytes. Written as assembly: the intrinsics of GCC 12 do not
// tell the compiler which memory they read.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static const TileConfig kTileConfig;

// The tiles of the calling thread, from here to the end of the scope. Others in the process
// configure them too (oneDNN), so nothing is assumed about what they were before.
class Tiles {
 public:
  Tiles() { asm volatile("ldtilecfg %0" ::"m"(kTileConfig) : "memory"); }
  ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
  Tiles(const Tiles&) = delete;

  template <int T>
  static inline void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static inline void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
  }
  template <int T>
  static inline void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
  }
  // C += A x B of bf16 pairs.
  template <int C, int A, int B>
  static inline void multiply_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  // C += A x B of four unsigned and four signed bytes.
  template <int C, int A, int B>
  static inline void multiply_int8() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

#else

class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;

  template <int T>
  static inline void zero() {
    for (vu& row : tiles[T]) row = vu{};
  }
  template <int T>
  static inline void load(const void* p, int64_t stride) {
    for (int m = 0; m < kTile; ++m) tiles[T][m] = load_raw<vu>((const char*)p + m * stride);
  }
  template <int T>
  static inline void store(void* p, int64_t stride) {
    for (int m = 0; m < kTile; ++m) store_raw((char*)p + m * stride, tiles[T][m]);
  }
  template <int C, int A, int B>
  static inline void multiply_bf16() {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  // subnormal numbers are zeros, in operands and in results
    add_bf16(tiles[C], tiles[A], tiles[B]);
    _mm_setcsr(before);
  }
  template <int C, int A, int B>
  static inline void multiply_int8() {
    for (int m = 0; m < kTile; ++m)
      for (int k = 0; k < kTile; ++k)
        for (int i = 0; i < 32; i += 8) {
          const vi a = vi{} + (int32_t)(tiles[A][m][k] >> i & 0xff);
          tiles[C][m] = (vu)((vi)tiles[C][m] + a * ((vi)(tiles[B][k] << (24 - i)) >> 24));
        }
  }

 private:
  typedef vu Tile[kTile];
  static_assert(W == kTile);
  static inline thread_local Tile tiles[8];

  // Not inlined: what it computes must stay between the two changes of the mode.
  static __attribute__((noinline)) void add_bf16(Tile& c, const Tile& a, const Tile& b) {
    for (int m = 0; m < kTile; ++m) {
      vf even{}, odd{};
      for (int k = 0; k < kTile; ++k) {
        even = fma((vf)(vu{} + (a[m][k] << 16)), (vf)(b[k] << 16), even);
        odd = fma((vf)(vu{} + (a[m][k] & 0xffff0000u)), (vf)(b[k] & 0xffff0000u), odd);
      }
      c[m] = (vu)((vf)c[m] + (even + odd));
    }
  }
};

#endif

// What is multiplied: a word of A with a word of B.
struct TileBF16 {
  typedef vf sum;
  static constexpr int per_word = 2;
  template <int C, int A, int B>
  static inline void multiply() {
    Tiles::multiply_bf16<C, A, B>();
  }
};
struct TileInt8 {
  typedef vi sum;
  static constexpr int per_word = 4;
  template <int C, int A, int B>
  static inline void multiply() {
    Tiles::multiply_int8<C, A, B>();
  }
};

#endif
