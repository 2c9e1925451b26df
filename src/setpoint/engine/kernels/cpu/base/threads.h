// Divides the loops of a kernel among threads: those of a new parallel region, or of a team that is
// already running.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

constexpr int kMaxThreads = 256;

// Spins for a few tens of microseconds, then yields the core.
class Patience {
 public:
  void wait() {
    if (++rounds_ > 1000) sched_yield();
#if defined(__x86_64__)
    else
      __builtin_ia32_pause();
#endif
  }

 private:
  int rounds_ = 0;
};

// Threads that stay together while the first of them runs one kernel after another (program.cpp)
// and the others wait for its loops.
//
// A loop is open from its first unit to its last. A thread that comes late finds it closed and
// waits for the next one; the first thread waits only for those that are inside. So a core that is
// taken away delays nobody but for the unit it works on.
class Team {
 public:
  explicit Team(int size) : size_(size < kMaxThreads ? size : kMaxThreads) {}

  // The team that the calling thread leads at the moment, or null.
  static inline thread_local Team* led = nullptr;

  int size() const { return size_; }

  // Called by the first thread: runs work(0), and work(thread) on each thread that arrives in time.
  template <class Work>
  void run(const Work& work) {
    job_ = [](const void* context, int thread) { (*static_cast<const Work*>(context))(thread); };
    context_ = &work;
    state_.store((++turn_ << 32) | kOpen, std::memory_order_release);
    work(0);
    state_.fetch_and(~kOpen, std::memory_order_relaxed);
    for (Patience patience; state_.load(std::memory_order_acquire) & kInside;) patience.wait();
  }

  // Called by the first thread after its last loop.
  void dismiss() { state_.store(kOver, std::memory_order_release); }

  // Run by every other thread until it is dismissed.
  void serve(int thread) {
    uint64_t helped = 0;  // the last turn
    for (Patience patience;;) {
      uint64_t state = state_.load(std::memory_order_relaxed);
      if (state & kOver) return;
      if ((state & kOpen) && state >> 32 != helped) {
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) continue;
        job_(context_, thread);
        state_.fetch_sub(1, std::memory_order_release);
        helped = state >> 32;
        patience = {};
      } else {
        patience.wait();
      }
    }
  }

 private:
  static constexpr uint64_t kInside = 0xffff, kOpen = 1 << 16, kOver = 1 << 17;

  // Threads inside the loop but the first, kOpen, kOver; above 32 bits the turn, so that no two
  // loops look alike.
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) uint64_t turn_ = 0;
  void (*job_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  const int size_;
};

// Runs work(thread) on the threads of the team if there is one, or of a new parallel region.
template <class Work>
static inline void together(int threads, const Work& work) {
  if (Team::led) return Team::led->run(work);
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num());
}

// body(worker, unit) for every unit, with worker = make(thread) on each thread. Each thread owns a
// run of neighbouring units (so that it streams through memory and may prefetch the next one); who
// is done with its own helps the others, one unit at a time, because a core may be taken away at
// any moment.
template <class Make, class Body>
static inline void for_units(int64_t units, int threads, const Make& make, const Body& body) {
  if (threads > kMaxThreads) threads = kMaxThreads;
  if (Team::led) threads = Team::led->size();
  if (threads <= 1 || units <= 1) {
    auto worker = make(0);
    for (int64_t unit = 0; unit < units; ++unit) body(worker, unit);
    return;
  }
  struct alignas(64) Run {
    int64_t next, end;
  } runs[kMaxThreads];
  for (int t = 0; t < threads; ++t) runs[t] = {units * t / threads, units * (t + 1) / threads};
  together(threads, [&](int thread) {
    auto worker = make(thread);
    for (int i = 0; i < threads; ++i) {
      Run& run = runs[(thread + i) % threads];
      for (int64_t unit; (unit = __atomic_fetch_add(&run.next, 1, __ATOMIC_RELAXED)) < run.end;)
        body(worker, unit);
    }
  });
}

// body(row) for every row, on several threads when there is enough to do: to call others costs
// about as much as 16k elements when a region has to be opened, 4k when they are there.
template <class Body>
static inline void for_rows(int64_t rows, int64_t elements_per_row, int threads, const Body& body) {
  const int64_t worth_it = Team::led ? 4096 : 16384,
                rows_per_unit = worth_it / 2 / elements_per_row + 1;
  if (rows * elements_per_row < worth_it) {
    for (int64_t i = 0; i < rows; ++i) body(i);
    return;
  }
  auto no_state = [](int) { return 0; };
  for_units((rows + rows_per_unit - 1) / rows_per_unit, threads, no_state, [&](int, int64_t unit) {
    const int64_t end = (unit + 1) * rows_per_unit < rows ? (unit + 1) * rows_per_unit : rows;
    for (int64_t i = unit * rows_per_unit; i < end; ++i) body(i);
  });
}
