// All kernels for one instruction-set level; compiled once per level with -DSP_LEVEL=... and the level's flags (build.py).
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

extern "C" int omp_get_thread_num();

#define SP_JOIN2(a, b) a##b
#define SP_JOIN(a, b) SP_JOIN2(a, b)
#if defined(__AVX512F__)
#define SP_WIDTH 16
#elif defined(__AVX2__)
#define SP_WIDTH 8
#else
#define SP_WIDTH 4
#endif

namespace SP_JOIN(level_, SP_LEVEL) {
#include "simd.h"
#include "threads.h"
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
}  // namespace

namespace level = SP_JOIN(level_, SP_LEVEL);
// Constant initialisation: nothing of this file runs while the library is being loaded.
constexpr KernelTable SP_JOIN(table_, SP_LEVEL) = {level::attention, level::rms_norm, level::rope_and_store, level::silu_mul, level::linear};
