// A layer of experts: the choice of each token's experts, products in which every row has the
// weight of its own expert, and the sum over a token's experts.
//
// The rows of an expert are multiplied together, by the kernel that multiplies any weight of that
// kind. A row's result does not depend on the rows beside it (panels.h), and a token's sum is in
// the order of its choice, so a token's bits do not depend on the batch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/buffer.h"
#include "step/calls.h"
#include "base/simd.h"
#include "base/threads.h"

extern "C" {
void setpoint_linear(const LinearCall* call);
void setpoint_linear_int8(const Int8LinearCall* call);
}

namespace {

// Memory of the calling thread for one use at a time.
template <int kUse>
char* scratch(int64_t bytes) {
  thread_local Buffer buffer;
  return buffer.at_least(bytes);
}

// A NaN counts as the least value, so that the order is one.
inline float ordered(float value) { return value == value ? value : -__builtin_inff(); }

// The indices of the `count` largest of values, the largest first, of equal ones the lower index.
void largest(const float* values, int64_t num_values, int64_t count, std::vector<int32_t>& found) {
  found.resize(num_values);
  for (int64_t i = 0; i < num_values; ++i) found[i] = i;
  std::partial_sort(found.begin(), found.begin() + count, found.end(), [=](int32_t a, int32_t b) {
    const float x = ordered(values[a]), y = ordered(values[b]);
    return x > y || (x == y && a < b);
  });
}

// In place.
void softmax(float* values, int64_t count) {
  float most = -__builtin_inff(), sum = 0;
  for (int64_t i = 0; i < count; ++i) most = values[i] > most ? values[i] : most;
  for (int64_t i = 0; i < count; ++i) sum += values[i] = std::exp(values[i] - most);
  for (int64_t i = 0; i < count; ++i) values[i] /= sum;
}

// Sets the scores outside of the groups that a token may choose from to minus infinity.
void close_groups(const RouteCall& call, float* scores) {
  thread_local std::vector<float> sums;
  thread_local std::vector<int32_t> order;
  const int64_t size = call.experts / call.groups;
  sums.assign(call.groups, 0.f);
  for (int64_t g = 0; g < call.groups; ++g) {
    largest(scores + g * size, size, call.best, order);
    for (int64_t i = 0; i < call.best; ++i) sums[g] += scores[g * size + order[i]];
  }
  largest(sums.data(), call.groups, call.groups, order);
  for (int64_t i = call.open; i < call.groups; ++i)
    std::fill_n(scores + order[i] * size, size, -__builtin_inff());
}

template <class T>
void route(const RouteCall& call) {
  const int64_t experts = call.experts, chosen = call.chosen;
  for_rows(call.rows, 16 * experts, call.threads, [=, &call](int64_t row) {
    thread_local std::vector<float> scores, choice;
    thread_local std::vector<int32_t> order;
    scores.resize(experts);
    const T* logits = (const T*)call.logits + row * experts;
    bool has_nan = false;
    for (int64_t e = 0; e < experts; ++e) {
      scores[e] = load_part(logits + e, 1)[0];
      has_nan |= scores[e] != scores[e];
      if (call.scoring == kSigmoid) scores[e] = 1 / (1 + std::exp(-scores[e]));
    }
    if (call.scoring == kSoftmax) softmax(scores.data(), experts);
    choice = scores;
    if (call.correction)
      for (int64_t e = 0; e < experts; ++e) choice[e] += call.correction[e];
    if (call.groups > 1) close_groups(call, choice.data());
    largest(choice.data(), experts, chosen, order);
    float* weights = call.weights + row * chosen;
    for (int64_t i = 0; i < chosen; ++i) {
      call.ids[row * chosen + i] = order[i];
      weights[i] = has_nan ? __builtin_nanf("") : scores[order[i]];
    }
    if (call.scoring == kSoftmaxOfChosen) softmax(weights, chosen);
    float sum = 1;
    if (call.normalise) {
      sum = 1e-20f;  // scores of zero give weights of zero
      for (int64_t i = 0; i < chosen; ++i) sum += weights[i];
    }
    for (int64_t i = 0; i < chosen; ++i) weights[i] = weights[i] / sum * call.scaling;
  });
}

void place(const PlaceExpertsCall& call) {
  for (int64_t i = 0; i < call.rows * call.chosen; ++i) {
    int32_t slot = call.ids[i];
    if (call.places) {
      const int32_t* of_expert = call.places + slot * call.width;
      slot = call.slots[i] = of_expert[1 + call.positions[i / call.chosen] % of_expert[0]];
    }
    ++call.load[slot];
  }
}

void multiply(const LinearCall& call) { setpoint_linear(&call); }
void multiply(const Int8LinearCall& call) { setpoint_linear_int8(&call); }

template <class Linear>
void multiply(const ExpertsCall& call) {
  const int64_t pairs = call.rows, experts = call.experts;
  // The pairs by expert: those of expert e are order[begins[e]] to order[begins[e + 1]].
  auto* begins = (int64_t*)scratch<0>((experts + 2 + pairs) * 8);
  int64_t* order = begins + experts + 2;
  std::fill_n(begins, experts + 2, 0);
  // The expert of a pair; all that are elsewhere count as one more.
  const auto expert_of = [=, &call](int64_t pair) {
    const auto expert = (uint64_t)(call.ids[pair] - call.first);
    return expert < (uint64_t)experts ? (int64_t)expert : experts;
  };
  for (int64_t i = 0; i < pairs; ++i) ++begins[expert_of(i) + 1];
  for (int64_t e = 0; e <= experts; ++e) begins[e + 1] += begins[e];
  for (int64_t i = pairs - 1; i >= 0; --i) order[--begins[expert_of(i) + 1]] = i;
  // Each begin has become that of the expert before it.
  const auto range = [=](int64_t e) { return std::pair(begins[e + 1], begins[e + 2]); };
  const auto x_of = [&](int64_t pair) {
    return (const char*)call.x + pair / call.pairs_per_row * call.x_bytes;
  };
  const auto out_of = [&](int64_t pair) { return (char*)call.out + pair * call.out_bytes; };
  for (int64_t e = 0; e < experts; ++e) {
    const auto [begin, end] = range(e);
    if (begin == end) continue;
    Linear linear = ((const Linear*)call.weights)[e];
    linear.threads = call.threads;
    linear.rows = end - begin;
    if (linear.rows == 1) {
      linear.x = x_of(order[begin]);
      linear.out = out_of(order[begin]);
      multiply(linear);
      continue;
    }
    char* x = scratch<1>(linear.rows * call.x_bytes);
    char* out = scratch<2>(linear.rows * call.out_bytes);
    for_rows(linear.rows, call.x_bytes / 4, call.threads, [&, begin = begin](int64_t i) {
      memcpy(x + i * call.x_bytes, x_of(order[begin + i]), call.x_bytes);
    });
    linear.x = x;
    linear.out = out;
    multiply(linear);
    for_rows(linear.rows, call.out_bytes / 4, call.threads, [&, begin = begin](int64_t i) {
      memcpy(out_of(order[begin + i]), out + i * call.out_bytes, call.out_bytes);
    });
  }
}

template <class T>
void combine(const CombineCall& call) {
  const int64_t cols = call.cols, chosen = call.chosen;
  for_rows(call.rows, cols * chosen, call.threads, [=, &call](int64_t row) {
    const T* parts = (const T*)call.parts + row * chosen * cols;
    const float* weights = call.weights + row * chosen;
    const T* shared = call.shared ? (const T*)call.shared + row * cols : nullptr;
    float share = 1;
    if (call.gate) share = 1 / (1 + std::exp(-load_part((const T*)call.gate + row, 1)[0]));
    T* out = (T*)call.out + row * cols;
    for_vectors(cols, [=](int64_t c, int64_t n) {
      vf sum = vf{};
      for (int64_t i = 0; i < chosen; ++i)
        sum = load_part(parts + i * cols + c, n) * weights[i] + sum;
      if (shared) sum = load_part(shared + c, n) * share + sum;
      store_part(out + c, sum, n);
    });
  });
}

}  // namespace

extern "C" {

void setpoint_route(const RouteCall* call) {
  call->dtype == kBF16 ? route<bf16>(*call) : route<float>(*call);
}

void setpoint_place_experts(const PlaceExpertsCall* call) { place(*call); }

void setpoint_experts(const ExpertsCall* call) {
  call->is_int8 ? multiply<Int8LinearCall>(*call) : multiply<LinearCall>(*call);
}

void setpoint_combine(const CombineCall* call) {
  call->dtype == kBF16 ? combine<bf16>(*call) : combine<float>(*call);
}
}
