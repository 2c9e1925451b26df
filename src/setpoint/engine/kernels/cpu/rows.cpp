// The first and the last kernel of a step: the position of each of its tokens, and the best token
// of each row of logits.
#include "calls.h"
#include "simd.h"
#include "threads.h"

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
