// The memory that the ranks of one model share, and the order in which they write and read it.
//
// Every rank runs the same exchanges in the same order. In an exchange a rank writes its part into
// one half of the memory, says that it has arrived, waits for the others and reads their parts. The
// halves take turns, so one wait is enough: who arrives at an exchange has read everything of the
// exchange before it, and what is overwritten is older than that.
#pragma once
#include <atomic>
#include <cstdint>

#include "threads.h"

constexpr int kMaxRanks = 64;

struct RanksHeader {
  // How many exchanges the rank has arrived at. Written by that rank alone.
  struct alignas(64) Arrived {
    std::atomic<int64_t> count;
  } arrived[kMaxRanks];
};

// One rank's view of it. Only the thread that runs the exchanges changes it.
struct Ranks {
  RanksHeader* header;
  uint8_t* data;  // two halves
  int64_t half_bytes;
  int64_t exchanges;  // begun so far
  int32_t rank, size;

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
