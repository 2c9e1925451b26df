// The memory that the ranks of one model share, and the order in which they write and read it.
//
// Every rank runs the same exchanges in the same order. In an exchange a rank writes its part into
// one half of the memory, says that it has arrived, waits for the others and reads their parts. The
// halves take turns, so one wait is enough: who arrives at an exchange has read everything of the
// exchange before it, and what is overwritten is older than that.
//
// Ranks with requests of their own (decision 0069) have different rows and begin each step
// together: a rank says how many rows it has, waits until all have said so, and only then
// exchanges.
#pragma once
#include <atomic>
#include <cstdint>

#include "base/threads.h"

constexpr int kMaxRanks = 64;

struct RanksHeader {
  // How many exchanges the rank has arrived at. Written by that rank alone.
  struct alignas(64) Arrived {
    std::atomic<int64_t> count;
  } arrived[kMaxRanks];
  // The last step that the rank has begun, kGone once it begins no more, and its rows: those of
  // step s are rows[s & 1]. A rank writes them only after all have read those of the step before
  // the last.
  struct alignas(64) Begun {
    std::atomic<int64_t> step;
    int64_t rows[2];
  } begun[kMaxRanks];
};

constexpr int64_t kGone = INT64_MAX;

// One rank's view of it. Only the thread that runs the exchanges changes it.
struct Ranks {
  RanksHeader* header;
  uint8_t* data;  // two halves
  int64_t half_bytes;
  int64_t exchanges;  // begun so far
  int32_t rank, size;
  int64_t step;                   // the last one begun
  int64_t begins[kMaxRanks + 1];  // of the step: the first row of each rank among those of all

  // Says that this rank begins its next step, with so many rows.
  void announce(int64_t rows) {
    header->begun[rank].rows[++step & 1] = rows;
    header->begun[rank].step.store(step, std::memory_order_release);
  }

  // Whether another rank has begun a step that this one has not.
  bool is_awaited() const {
    for (int other = 0; other < size; ++other) {
      const int64_t begun = header->begun[other].step.load(std::memory_order_acquire);
      if (begun > step && begun != kGone) return true;
    }
    return false;
  }

  // Waits until every rank has begun this step. Returns a rank that begins no more, or -1.
  int32_t meet() {
    begins[0] = 0;
    for (int other = 0; other < size; ++other) {
      int64_t begun;
      for (Patience patience;
           (begun = header->begun[other].step.load(std::memory_order_acquire)) < step;)
        patience.wait();
      if (begun == kGone) return other;
      begins[other + 1] = begins[other] + header->begun[other].rows[step & 1];
    }
    return -1;
  }

  // Says that this rank begins no more steps.
  void leave() { header->begun[rank].step.store(kGone, std::memory_order_release); }

  // Returns the half to write to, once nobody reads it any more.
  uint8_t* begin() {
    ++exchanges;
    // A rank that only gives (setpoint_gather with `first_only`) has not waited in the exchange
    // before.
    await(exchanges - 1);
    return data + (exchanges & 1) * half_bytes;
  }

  // Says that this rank has written its part.
  void arrive() { header->arrived[rank].count.store(exchanges, std::memory_order_release); }

  // Waits until every rank has arrived at this exchange.
  void await() { await(exchanges); }

 private:
  void await(int64_t exchange) {
    for (int other = 0; other < size; ++other)
      for (Patience patience;
           header->arrived[other].count.load(std::memory_order_acquire) < exchange;)
        patience.wait();
  }
};
