// The first and the last kernels of a step: the position of each of its tokens, and the best tokens
// of each row of logits.
#include <algorithm>
#include <vector>

#include "step/calls.h"
#include "base/simd.h"
#include "base/threads.h"

namespace {

// The first of the largest; -1 if the largest is not finite or anything is NaN.
template <class T>
int64_t best(const T* logits, int64_t cols) {
  vf largest = splat(-__builtin_inff());
  vi strange = vi{};
  int64_t c = 0;
  for (; c + W <= cols; c += W) {
    const vf v = load(logits + c);
    largest = vmax(v, largest);
    strange |= v != v;
  }
  float top = max(largest);
  bool ok = true;
  for (int i = 0; i < W; ++i) ok &= !strange[i];
  auto value = [=](int64_t at) { return load_part(logits + at, 1)[0]; };
  for (; c < cols; ++c) {
    top = value(c) > top ? value(c) : top;
    ok &= value(c) == value(c);
  }
  if (!ok || !__builtin_isfinite(top)) return -1;
  for (c = 0; c + W <= cols; c += W) {
    const vi equal = load(logits + c) == top;
    for (int i = 0; i < W; ++i)
      if (equal[i]) return c + i;
  }
  for (; value(c) != top;) ++c;
  return c;
}

struct Ranked {
  float value;
  int64_t token;
  // The larger first, of equal ones that with the lower id.
  bool operator<(const Ranked& other) const {
    return value > other.value || (value == other.value && token < other.token);
  }
};

// The first "count" of the row, in order. The heap has the last of those found so far on top; as
// tokens come by rising id, one with the same value as that comes after it.
template <class T>
void top(const T* logits, int64_t cols, int64_t count, int64_t* out) {
  std::vector<Ranked> heap(count);
  auto value = [=](int64_t at) { return load_part(logits + at, 1)[0]; };
  for (int64_t c = 0; c < count; ++c) heap[c] = {value(c), c};
  std::make_heap(heap.begin(), heap.end());
  float least = heap[0].value;
  auto enter = [&](int64_t c, float v) {
    if (!(v > least)) return;
    std::pop_heap(heap.begin(), heap.end());
    heap.back() = {v, c};
    std::push_heap(heap.begin(), heap.end());
    least = heap[0].value;
  };
  constexpr int kAtOnce = 4;
  int64_t c = count;
  for (; c + kAtOnce * W <= cols; c += kAtOnce * W) {
    vf largest = load(logits + c);
    for (int i = 1; i < kAtOnce; ++i) largest = vmax(largest, load(logits + c + i * W));
    if (!(max(largest) > least)) continue;
    for (int i = 0; i < kAtOnce; ++i) {
      const vf v = load(logits + c + i * W);
      for (int lane = 0; lane < W; ++lane) enter(c + i * W + lane, v[lane]);
    }
  }
  for (; c < cols; ++c) enter(c, value(c));
  std::sort_heap(heap.begin(), heap.end());
  for (int64_t i = 0; i < count; ++i) out[i] = heap[i].token;
}

// Writes "minus", the bits of -inf, where the mask has no bit. Most words of a mask are all ones or
// all zeros.
template <class T>
void mask(T* logits, const int32_t* words, int64_t cols, T minus) {
  for (int64_t begin = 0; begin < cols; begin += 32) {
    const uint32_t allowed = words[begin / 32];
    if (allowed == 0xffffffffu) continue;
    const int64_t count = cols - begin < 32 ? cols - begin : 32;
    T* at = logits + begin;
    if (allowed == 0)
      for (int64_t i = 0; i < count; ++i) at[i] = minus;
    else
      for (int64_t i = 0; i < count; ++i) at[i] = allowed >> i & 1 ? at[i] : minus;
  }
}

}  // namespace

extern "C" {

void setpoint_place_tokens(const PlaceCall* call) {
  for (int64_t row = 0; row < call->rows; ++row) {
    const int64_t slot = call->slots[row], begin = call->cu_q[row], end = call->cu_q[row + 1];
    const int32_t *known = call->known + slot * call->known_stride,
                  *pages = call->page_table + slot * call->table_stride;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = call->kv_lens[row] - end + t;
      call->ids[t] = known[position];
      call->positions[t] = position;
      call->kv_index[t] =
          pages[position / call->page_size] * call->page_size + position % call->page_size;
    }
  }
}

void setpoint_best_tokens(const BestCall* call) {
  for_rows(call->rows, call->cols, call->threads, [=](int64_t row) {
    call->out[row] = call->dtype == kBF16
                         ? best((const bf16*)call->logits + row * call->cols, call->cols)
                         : best((const float*)call->logits + row * call->cols, call->cols);
  });
}

void setpoint_top_tokens(const TopCall* call) {
  for_rows(call->rows, call->cols, call->threads, [=](int64_t row) {
    int64_t* out = call->out + row * call->count;
    call->dtype == kBF16
        ? top((const bf16*)call->logits + row * call->cols, call->cols, call->count, out)
        : top((const float*)call->logits + row * call->cols, call->cols, call->count, out);
  });
}

void setpoint_mask_tokens(const MaskCall* call) {
  for_rows(call->rows, call->cols, call->threads, [=](int64_t row) {
    const int64_t first = call->which[row] * call->cols;
    const int32_t* words = call->words + row * call->words_per_row;
    if (call->dtype == kBF16)
      mask((uint16_t*)call->logits + first, words, call->cols, (uint16_t)0xff80);
    else
      mask((uint32_t*)call->logits + first, words, call->cols, 0xff800000u);
  });
}

}  // extern "C"
