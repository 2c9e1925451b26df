// What an exchange between two ranks costs (barriers.py --measure): two processes on a core each
// run setpoint_gather over and over.
//
//   gathers CORE CORE ROWS:BYTES...
//
// BYTES: of a whole row, of which each rank has half. Prints the nanoseconds that a cache line
// takes from one core to the other and back, then a line "ROWS BYTES minimum median" for each
// argument, in nanoseconds. The figures are of windows of about a millisecond.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "calls.h"
#include "ranks.h"

extern "C" void setpoint_gather(const GatherCall*);
extern "C" Ranks* setpoint_ranks_create(void*, int64_t, int32_t, int32_t);

namespace {

constexpr int64_t kBytes = 8 << 20;  // as in launch/ranks.py
constexpr int kWindows = 300, kRounds = 2000;

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

double round_trip(std::atomic<int>& ball, int rank) {
  double best = 1e9;
  for (int window = 0, i = 0; window < kWindows; ++window) {
    const int64_t begin = now();
    for (int round = 0; round < kRounds; ++round, ++i) {
      if (rank == 0) ball.store(2 * i + 1, std::memory_order_release);
      while (ball.load(std::memory_order_acquire) != 2 * i + 2 - rank);
      if (rank) ball.store(2 * i + 2, std::memory_order_release);
    }
    best = std::min(best, double(now() - begin) / kRounds);
  }
  return best;
}

void exchange(Ranks* ranks, int64_t rows, int64_t bytes) {
  std::vector<char> x(rows * bytes / 2, 1), out(rows * bytes);
  int64_t begins[] = {0, bytes / 2, bytes};
  GatherCall call{};
  call.ranks = ranks, call.x = x.data(), call.out = out.data(), call.begins = begins;
  call.rows = rows, call.element_bytes = 1, call.threads = 1;
  const int64_t loops = std::clamp<int64_t>((4 << 20) / (rows * bytes), 2, 1000);
  std::vector<double> costs;
  for (int window = 0; window < kWindows; ++window) {
    const int64_t begin = now();
    for (int i = 0; i < loops; ++i) setpoint_gather(&call);
    costs.push_back(double(now() - begin) / loops);
  }
  std::sort(costs.begin(), costs.end());
  if (ranks->rank == 0)
    std::printf("%lld %lld %.0f %.0f\n", (long long)rows, (long long)bytes, costs[0],
                costs[kWindows / 2]);
}

}  // namespace

int main(int count, char** arguments) {
  const int kShared = MAP_SHARED | MAP_ANONYMOUS, kAccess = PROT_READ | PROT_WRITE;
  void* memory = mmap(nullptr, kBytes, kAccess, kShared, -1, 0);
  auto* ball = (std::atomic<int>*)mmap(nullptr, 4096, kAccess, kShared, -1, 0);
  const int rank = fork() == 0;
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(std::atoi(arguments[1 + rank]), &core);
  sched_setaffinity(0, sizeof core, &core);
  const double there_and_back = round_trip(*ball, rank);
  if (rank == 0) std::printf("%.1f\n", there_and_back);
  Ranks* ranks = setpoint_ranks_create(memory, kBytes, rank, 2);
  for (int i = 3; i < count; ++i) {
    long long rows, bytes;
    if (std::sscanf(arguments[i], "%lld:%lld", &rows, &bytes) == 2) exchange(ranks, rows, bytes);
  }
  if (rank) return 0;
  wait(nullptr);
}
