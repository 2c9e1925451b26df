// What the ranks of one model tell each other in a step. Every output of a matrix is computed whole
// by one rank, so an exchange copies and adds nothing: the bits are those of one rank.
#include "step/ranks.h"

#include <cstring>
#include <new>

#include "step/calls.h"
#include "base/threads.h"

namespace {

// memcpy by several threads.
void copy(uint8_t* to, const uint8_t* from, int64_t bytes, int threads) {
  const int64_t unit = 1 << 14;
  for_rows((bytes + unit - 1) / unit, unit, threads, [=](int64_t i) {
    const int64_t begin = i * unit, left = bytes - begin;
    memcpy(to + begin, from + begin, left < unit ? left : unit);
  });
}

void gather(const GatherCall& call) {
  Ranks& ranks = *call.ranks;
  const int64_t size = call.element_bytes, *begins = call.begins;
  const int64_t whole = begins[ranks.size] * size;
  const int64_t own = (begins[ranks.rank + 1] - begins[ranks.rank]) * size;
  const int64_t most = ranks.half_bytes / whole;
  for (int64_t first = 0, rows; first < call.rows; first += rows) {
    rows = call.rows - first < most ? call.rows - first : most;
    const uint8_t* x = (const uint8_t*)call.x + first * own;
    uint8_t* out = (uint8_t*)call.out + first * whole;
    uint8_t* half = ranks.begin();
    // The part of each rank lies in one piece.
    copy(half + begins[ranks.rank] * size * rows, x, rows * own, call.threads);
    ranks.arrive();
    if (call.first_only && ranks.rank) continue;
    ranks.await();
    for_rows(rows, whole, call.threads, [=, &ranks](int64_t row) {
      for (int other = 0; other < ranks.size; ++other) {
        const int64_t part = (begins[other + 1] - begins[other]) * size;
        const uint8_t* from = other == ranks.rank ? x : half + begins[other] * size * rows;
        memcpy(out + row * whole + begins[other] * size, from + row * part, part);
      }
    });
  }
}

void gather_rows(const GatherRowsCall& call) {
  Ranks& ranks = *call.ranks;
  const int64_t bytes = call.row_bytes, most = ranks.half_bytes / bytes;
  for (int64_t first = 0, rows; first < call.rows; first += rows) {
    rows = call.rows - first < most ? call.rows - first : most;
    const uint8_t* x = (const uint8_t*)call.x + first * bytes;
    uint8_t* half = ranks.begin();
    for (int64_t i = 0; i < rows; ++i)
      if ((uint64_t)(call.ids[first + i] - call.first) < (uint64_t)call.count)
        memcpy(half + i * bytes, x + i * bytes, bytes);
    ranks.arrive();
    ranks.await();
    copy((uint8_t*)call.out + first * bytes, half, rows * bytes, call.threads);
  }
}

// The rows of rank r are begins[r] to begins[r + 1] of all.
void gather_tokens(const GatherTokensCall& call) {
  Ranks& ranks = *call.ranks;
  const int64_t bytes = call.row_bytes, most = ranks.half_bytes / bytes;
  const int64_t own = ranks.begins[ranks.rank], own_end = ranks.begins[ranks.rank + 1];
  for (int64_t first = 0, rows; first < call.rows; first += rows) {
    rows = call.rows - first < most ? call.rows - first : most;
    const int64_t begin = own > first ? own : first;
    const int64_t end = own_end < first + rows ? own_end : first + rows;
    uint8_t* half = ranks.begin();
    if (begin < end)
      copy(half + (begin - first) * bytes, (const uint8_t*)call.x + (begin - own) * bytes,
           (end - begin) * bytes, call.threads);
    ranks.arrive();
    ranks.await();
    copy((uint8_t*)call.out + first * bytes, half, rows * bytes, call.threads);
  }
}

void own_tokens(const OwnTokensCall& call) {
  const int64_t bytes = call.row_bytes, first = call.ranks->begins[call.ranks->rank];
  copy((uint8_t*)call.out, (const uint8_t*)call.x + first * bytes, call.rows * bytes, call.threads);
}

}  // namespace

extern "C" void setpoint_gather(const GatherCall* call) { gather(*call); }

extern "C" void setpoint_gather_rows(const GatherRowsCall* call) { gather_rows(*call); }

extern "C" void setpoint_gather_tokens(const GatherTokensCall* call) { gather_tokens(*call); }

extern "C" void setpoint_own_tokens(const OwnTokensCall* call) { own_tokens(*call); }

extern "C" void setpoint_own_ids(const OwnIdsCall* call) {
  for (int64_t i = 0; i < call->rows; ++i) {
    const int64_t id = call->ids[i] - call->first;
    call->out[i] = (uint64_t)id < (uint64_t)call->count ? (int32_t)id : 0;
  }
}

// memory: zeros at first, the same for all ranks.
extern "C" Ranks* setpoint_ranks_create(void* memory, int64_t num_bytes, int32_t rank,
                                        int32_t size) {
  const int64_t half = (num_bytes - (int64_t)sizeof(RanksHeader)) / 2 & ~(int64_t)63;
  return new (std::nothrow) Ranks{
      (RanksHeader*)memory, (uint8_t*)memory + sizeof(RanksHeader), half, 0, rank, size, 0, {}};
}

extern "C" void setpoint_ranks_announce(Ranks* ranks, int64_t rows) { ranks->announce(rows); }

extern "C" int32_t setpoint_ranks_is_awaited(const Ranks* ranks) { return ranks->is_awaited(); }

// Returns a rank that begins no more, or -1. rows: those of all ranks.
extern "C" int32_t setpoint_ranks_meet(Ranks* ranks, int64_t* rows) {
  const int32_t gone = ranks->meet();
  if (gone < 0) *rows = ranks->begins[ranks->size];
  return gone;
}

extern "C" void setpoint_ranks_leave(Ranks* ranks) { ranks->leave(); }

extern "C" void setpoint_ranks_free(Ranks* ranks) { delete ranks; }
