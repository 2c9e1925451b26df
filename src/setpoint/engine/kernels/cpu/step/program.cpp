// Runs a captured step: a list of kernels and their structs, written by capture.py.
#include <time.h>

#include "step/calls.h"
#include "base/threads.h"

namespace {

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

void run(const ProgramCall& program) {
  int64_t begin = program.nanoseconds ? now() : 0;
  for (const ProgramOp* op = program.ops; op < program.ops + program.num_ops; ++op) {
    *op->rows = op->per_count * program.counts[op->counts];
    if (*op->rows) op->kernel(op->call);
    if (program.nanoseconds) {
      const int64_t end = now();
      program.nanoseconds[op->kind] += end - begin;
      begin = end;
    }
  }
}

}  // namespace

extern "C" void setpoint_program(const ProgramCall* program) {
  if (program->threads <= 1) return run(*program);
  Team team(program->threads);
#pragma omp parallel num_threads(team.size())
  if (omp_get_thread_num() == 0) {
    Team::led = &team;
    run(*program);
    Team::led = nullptr;
    team.dismiss();
  } else {
    team.serve(omp_get_thread_num());
  }
}
