// What dividing a loop among threads costs (barriers.py --measure): every thread of a team gets one
// unit that takes exactly kUnit, so what a loop takes beyond it is the cost.
//
//   barriers MOST
//
// prints the nanoseconds that a cache line takes from one core to another and back, then a line
// with "threads nanoseconds" for 2, 4, ... MOST threads. Both are the best of many windows of about
// a millisecond, because most of those are not interrupted.
#include "threads.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kUnit = 5000;
constexpr int kWindows = 200, kLoops = 100, kRounds = 2000;

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

double round_trip() {
  alignas(64) std::atomic<int> ball{0};
  std::thread other([&] {
    for (int i = 0; i < kRounds * kWindows; ++i) {
      while (ball.load(std::memory_order_acquire) != 2 * i + 1);
      ball.store(2 * i + 2, std::memory_order_release);
    }
  });
  double best = 1e9;
  for (int window = 0, i = 0; window < kWindows; ++window) {
    const int64_t begin = now();
    for (int round = 0; round < kRounds; ++round, ++i) {
      ball.store(2 * i + 1, std::memory_order_release);
      while (ball.load(std::memory_order_acquire) != 2 * i + 2);
    }
    best = std::min(best, double(now() - begin) / kRounds);
  }
  other.join();
  return best;
}

// The median of a window's loops.
int64_t window() {
  std::vector<int64_t> costs;
  for (int i = 0; i < kLoops; ++i) {
    const int64_t begin = now();
    const int threads = Team::led->size();
    for_units(
        threads, threads, [](int) { return 0; },
        [](int, int64_t) { for (const int64_t end = now() + kUnit; now() < end;); });
    costs.push_back(now() - begin - kUnit);
  }
  std::nth_element(costs.begin(), costs.begin() + kLoops / 2, costs.end());
  return costs[kLoops / 2];
}

int64_t loop_cost(int threads) {
  int64_t best = INT64_MAX;
  Team team(threads);
#pragma omp parallel num_threads(threads)
  if (omp_get_thread_num() == 0) {
    Team::led = &team;
    for (int i = 0; i < kWindows; ++i) best = std::min(best, window());
    Team::led = nullptr;
    team.dismiss();
  } else {
    team.serve(omp_get_thread_num());
  }
  return best;
}

}  // namespace

int main(int, char** arguments) {
  std::printf("%.1f\n", round_trip());
  for (int threads = 2; threads <= std::atoi(arguments[1]); threads *= 2)
    std::printf("%d %lld\n", threads, (long long)loop_cost(threads));
}
