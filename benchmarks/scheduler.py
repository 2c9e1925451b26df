"""What a step of the scheduler costs, without any model: 256 running and 2,000 waiting requests
with prompts of 32k tokens.

    python benchmarks/scheduler.py [--steps 400] [--policies fcfs,priority] [--page-sizes 1,16,64]
    [--profile]

Aim: schedule() + update() <= 1.5 ms at 256 decode rows under fcfs.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import pstats
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from machine import environment

from setpoint.core.messages import Abort
from setpoint.core.plan import StepPlan
from setpoint.core.records import Record
from setpoint.core.request import Request, RequestOptions, pack_ids
from setpoint.core.result import StepResult, one_each
from setpoint.core.sampling import SamplingParams
from setpoint.core.settings import PrioritySettings, Settings
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.policy import POLICIES, QUEUE_LIMIT
from setpoint.scheduler.scheduler import Scheduler
from setpoint.scheduler.scheduler_config import SchedulerConfig

NUM_RUNNING = 256
NUM_WAITING = 2000
PROMPT_TOKENS = 32_768
OUTPUT_TOKENS = 1_024
PAGE_SIZES = (1, 16, 64)
ADMISSIONS = 30
VOCAB = 128_000

PRIORITY = "priority"
"""fcfs with priority scheduling: each new request is more urgent than all running ones, and
preempts one of them."""

AIM_STEP_MS = 1.5


class Silent:
    """An observer that ignores everything: log lines are not the scheduler's cost."""

    def on(self, record: Record) -> None: ...


def answer(plan: StepPlan) -> StepResult:
    """The result of a plan, as from an engine that takes no time."""
    seq_ids = plan.rows.seq_ids[plan.rows.sampling]
    num_rows = len(seq_ids)
    return StepResult(plan.step_id, seq_ids, np.full(num_rows, 7, np.int32), one_each(num_rows))


@dataclass
class Times:
    """Seconds per call."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    def row(self, *, num_rows: int) -> str:
        both = [first + second for first, second in zip(self.schedule, self.update, strict=True)]
        columns = [
            f"{_us(values, point):>9.0f}"
            for values in (self.schedule, self.update, both)
            for point in (50, 99)
        ]
        return " | ".join([*columns, f"{_us(both, 50) / num_rows:>9.2f}"])

    @property
    def step_ms(self) -> float:
        return statistics.median(map(sum, zip(self.schedule, self.update, strict=True))) * 1e3


def _us(seconds: list[float], percentile: int) -> float:
    return float(np.percentile(seconds, percentile)) * 1e6


class Bench:
    """A full scheduler: a prefilled sequence has each slot, and the other requests are in the
    queue."""

    def __init__(self, *, policy: str, page_size: int, num_waiting: int) -> None:
        room = PROMPT_TOKENS + OUTPUT_TOKENS + 2 * page_size
        self._cache = KVCache(num_pages=(NUM_RUNNING + 1) * room // page_size, page_size=page_size)
        config = SchedulerConfig(
            num_slots=NUM_RUNNING,
            max_req_len=2 * PROMPT_TOKENS,
            max_req_input_len=2 * PROMPT_TOKENS,
            vocab_size=VOCAB,
        )
        settings = Settings(
            max_running_requests=NUM_RUNNING,
            policy="fcfs" if policy == PRIORITY else policy,
            priority=PrioritySettings(default=0) if policy == PRIORITY else None,
            chunked_prefill_size=None,
            max_prefill_tokens=PROMPT_TOKENS,
        )
        self._scheduler = Scheduler(config, settings, self._cache, observer=Silent())
        self._preempts = policy == PRIORITY
        self._urgency = 0
        self._requests = enumerate(_requests())
        self._num_waiting = num_waiting
        gc.collect()
        gc.freeze()  # as the engine does before it serves
        for _ in range(NUM_RUNNING + num_waiting):
            self._submit()
        while len(self._scheduler.state.running) < NUM_RUNNING:
            self._turn(Times())

    def decode(self, num_steps: int) -> Times:
        """The times of steps with NUM_RUNNING rows while the queue waits for a slot."""
        times = Times()
        for _ in range(num_steps):
            plan = self._turn(times)
            assert len(plan.rows) == NUM_RUNNING
        return times

    def admit(self, num_steps: int) -> Times:
        """The times of steps that admit one prompt: before each, a running request has ended or is
        preempted, and a new one has arrived."""
        times, running, queue = Times(), self._scheduler.state.running, self._scheduler.state.queue
        for _ in range(num_steps):
            num_waiting = len(queue)
            if self._preempts:
                self._urgency += 100
            else:
                self._scheduler.abort(Abort([next(iter(running.values())).seq_id]))
            self._submit()
            plan = self._turn(times)
            assert len(queue) == num_waiting + self._preempts
            assert len(plan.admits) == 1
            assert len(plan.rows) == 1
        return times

    def _submit(self) -> None:
        seq_id, request = next(self._requests)
        options = msgspec.structs.replace(request.options, priority=self._urgency or None)
        event = self._scheduler.add(seq_id, msgspec.structs.replace(request, options=options))
        assert event is None, event

    def _turn(self, times: Times) -> StepPlan:
        begin = time.perf_counter()
        plan = self._scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None
        result = answer(plan)
        executed = time.perf_counter()
        self._scheduler.update(result, 0.0)
        end = time.perf_counter()
        times.schedule.append(planned - begin)
        times.update.append(end - executed)
        return plan


def _requests() -> Iterator[Request]:
    """Yields requests whose prompts share nothing. They stream, so that every token is an event."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    for number in itertools.count():
        prompt = rng.integers(0, VOCAB, PROMPT_TOKENS, dtype=np.int32)
        yield Request(
            rid=f"request-{number:06}",
            prompt_ids=pack_ids(prompt),
            sampling=sampling,
            seed=0,
            options=RequestOptions(stream=True),
        )


def scenarios(policies: list[str]) -> list[tuple[str, int]]:
    """(policy, number of waiting requests) of each row. Policies that act as fcfs above a length of
    the queue are also measured just below it."""
    found = []
    for name in policies:
        found.append((name, NUM_WAITING))
        limit = POLICIES[name].queue_limit if name in POLICIES else None
        found += [(name, limit - 1)] if limit is not None else []
    return found


def report_steps(num_steps: int, policies: list[str], page_sizes: list[int]) -> bool:
    """Print the table; returns whether the aim for a step is met at every page size."""
    heads = ["schedule", "p99", "update", "p99", "both", "p99", "per row"]
    print(
        f"{f'µs, median and p99; {NUM_RUNNING} running':<62} | "
        + " | ".join(f"{head:>9}" for head in heads)
    )
    met = True
    for policy, num_waiting in scenarios(policies):
        for page_size in page_sizes:
            bench = Bench(policy=policy, page_size=page_size, num_waiting=num_waiting)
            name = f"{policy}, {num_waiting} waiting, page size {page_size}"
            decode = bench.decode(num_steps)
            print(f"{name + ': decode':<62} | {decode.row(num_rows=NUM_RUNNING)}", flush=True)
            print(
                f"{name + ': admit one':<62} | {bench.admit(ADMISSIONS).row(num_rows=1)}",
                flush=True,
            )
            met &= policy != "fcfs" or decode.step_ms <= AIM_STEP_MS
    print(
        f"(lpm and hrrn with more than {QUEUE_LIMIT} waiting act as fcfs, so they are also measured"
        " just below that;"
    )
    print(
        " priority admits by preempting a running request, and keeps its queue one longer for it.)"
    )
    return met


def profile(num_steps: int) -> None:
    bench = Bench(policy="fcfs", page_size=1, num_waiting=NUM_WAITING)
    with cProfile.Profile() as profiler:
        bench.decode(num_steps)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--steps", type=int, default=400, help=f"decode steps per scenario, below {OUTPUT_TOKENS}"
    )
    parser.add_argument(
        "--policies", default=",".join([*POLICIES, PRIORITY]), help="comma-separated"
    )
    parser.add_argument(
        "--page-sizes", default=",".join(map(str, PAGE_SIZES)), help="comma-separated"
    )
    parser.add_argument(
        "--profile", action="store_true", help="cProfile of the decode steps instead of the tables"
    )
    args = parser.parse_args()
    print(environment("numpy") + "\n")
    if args.profile:
        profile(args.steps)
        return
    step = report_steps(
        args.steps, args.policies.split(","), [int(size) for size in args.page_sizes.split(",")]
    )
    verdict = "met" if step else "NOT met"
    print(f"\naim a step of {NUM_RUNNING} decode rows <= {AIM_STEP_MS} ms (fcfs): {verdict}")


if __name__ == "__main__":
    main()
