// How the loops of a kernel are divided among threads.
#pragma once
#include <omp.h>

#include <cstdint>

constexpr int kMaxThreads = 256;

// body(worker, unit) for every unit, with worker = make(thread) on each thread. Each thread owns a run of neighbouring units (so that it
// streams through memory and may prefetch the next one); who is done with its own helps the others, one unit at a time, because a core
// may be taken away at any moment.
template <class Make, class Body>
static inline void for_units(int64_t units, int threads, const Make& make, const Body& body) {
  if (threads > kMaxThreads) threads = kMaxThreads;
  if (threads > units) threads = (int)units;
  if (threads <= 1) {
    auto worker = make(0);
    for (int64_t unit = 0; unit < units; ++unit) body(worker, unit);
    return;
  }
  struct alignas(64) Run {
    int64_t next, end;
  } runs[kMaxThreads];
  for (int t = 0; t < threads; ++t) runs[t] = {units * t / threads, units * (t + 1) / threads};
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    auto worker = make(thread);
    for (int i = 0; i < threads; ++i) {
      Run& run = runs[(thread + i) % threads];
      for (int64_t unit; (unit = __atomic_fetch_add(&run.next, 1, __ATOMIC_RELAXED)) < run.end;) body(worker, unit);
    }
  }
}

// body(row) for every row, on several threads when there is enough to do: a parallel region costs about as much as 16k elements.
template <class Body>
static inline void for_rows(int64_t rows, int64_t elements_per_row, int threads, const Body& body) {
  if (threads > 1 && rows > 1 && rows * elements_per_row >= 16384) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; ++i) body(i);
  } else {
    for (int64_t i = 0; i < rows; ++i) body(i);
  }
}
