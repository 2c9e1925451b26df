// Products of each head of some rows with the head's own weight: those of latent attention.
//
// A unit is a head with some rows, multiplied by the kernel that multiplies any weight. A row's
// result does not depend on the rows beside it (panels.h), nor on the division into units.
#include <cstring>
#include <utility>

#include "base/buffer.h"
#include "step/calls.h"
#include "base/threads.h"

extern "C" void setpoint_linear(const LinearCall* call);

namespace {

// Rows of a unit: enough to read the weight once for many, few enough to keep all threads busy.
constexpr int64_t kRows = 128;

// Within a unit, loops run on the calling thread alone.
class Alone {
 public:
  Alone() : team_(std::exchange(Team::led, nullptr)) {}
  ~Alone() { Team::led = team_; }

 private:
  Team* team_;
};

void multiply(const HeadsCall& call, int64_t head, int64_t begin, int64_t rows) {
  const Alone alone;
  thread_local Buffer copied_x, copied_out;
  const int64_t out_row = call.heads * call.out_bytes;
  const char* x = (const char*)call.x + begin * call.x_row + head * call.x_head;
  char* out = (char*)call.out + begin * out_row + head * call.out_bytes;
  LinearCall linear = ((const LinearCall*)call.weights)[head];
  linear.threads = 1;
  linear.rows = rows;
  linear.x = x;
  linear.out = out;
  if (rows > 1) {
    char* together = copied_x.at_least(rows * call.x_bytes);
    for (int64_t r = 0; r < rows; ++r)
      memcpy(together + r * call.x_bytes, x + r * call.x_row, call.x_bytes);
    linear.x = together;
    linear.out = copied_out.at_least(rows * call.out_bytes);
  }
  setpoint_linear(&linear);
  if (rows > 1)
    for (int64_t r = 0; r < rows; ++r)
      memcpy(out + r * out_row, (const char*)linear.out + r * call.out_bytes, call.out_bytes);
}

}  // namespace

extern "C" void setpoint_heads(const HeadsCall* call) {
  const int64_t parts = (call->rows + kRows - 1) / kRows;
  for_units(
      call->heads * parts, call->threads, [](int) { return 0; },
      [=](int, int64_t unit) {
        const int64_t begin = unit % parts * kRows,
                      rows = call->rows - begin < kRows ? call->rows - begin : kRows;
        multiply(*call, unit / parts, begin, rows);
      });
}
