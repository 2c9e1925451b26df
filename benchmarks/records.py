"""What the stream of records costs: making the records of a decode step, and reading them as a
server does, with and without metrics.

    python benchmarks/records.py [--rows 64,256] [--steps 500]

Aim: at most 1 % of a decode step of 64 rows, which takes 20 ms with SmolLM2-135M on two cores.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
from collections.abc import Callable

import numpy as np
from machine import environment

from setpoint.core.messages import Finish, Submit, ToFrontend, ToLoop
from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.records import Observer, Record, RequestAdmitted, RequestDone
from setpoint.core.request import Request, RequestOptions, pack_ids
from setpoint.core.result import StepResult, one_each
from setpoint.core.sampling import SamplingParams
from setpoint.core.settings import Settings
from setpoint.frontend.telemetry.latencies import Latencies
from setpoint.frontend.telemetry.metrics.requests import RequestMetrics
from setpoint.observe.moment_keeper import MomentKeeper
from setpoint.observe.readers import EngineReaders
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler
from setpoint.scheduler.scheduler_config import SchedulerConfig

PROMPT_TOKENS = 32
STEP_MS = 20.0
AIM = 0.01
REPETITIONS = 20_000


class Silent:
    """A reader that ignores everything."""

    def on(self, record: Record) -> None: ...


class Keeping:
    """A reader that keeps everything."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def on(self, record: Record) -> None:
        self.records.append(record)


def usual(*, metrics: bool = False) -> Observer:
    """The readers of a server. Log lines are made, but not written."""
    return EngineReaders(device="cpu", decode_log_interval=40, request_times=False, metrics=metrics)


class InstantStep:
    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def finish(self, masks: TokenMasks | None) -> None: ...

    def result(self) -> StepResult:
        rows = self._plan.rows
        seq_ids = rows.seq_ids[rows.sampling]
        ids = np.full(len(seq_ids), 7, np.int32)
        return StepResult(self._plan.step_id, seq_ids, ids, one_each(len(seq_ids)))


class Instant:
    """An executor that takes no time."""

    def submit(self, plan: StepPlan) -> InstantStep:
        return InstantStep(plan)

    def idle(self) -> bool:
        return True

    def shutdown(self) -> None: ...


class Wire:
    def __init__(self, messages: list[ToLoop]) -> None:
        self._messages = messages

    def receive(self, timeout_s: float) -> list[ToLoop]:
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: ToFrontend) -> None: ...


class Clock:
    def now(self) -> float:
        return time.perf_counter()


def decoding(num_rows: int, num_steps: int, observer: Observer) -> Loop:
    """A loop whose next turns are decode steps of ``num_rows`` rows."""
    sampling = SamplingParams(max_new_tokens=num_steps, temperature=0.0, ignore_eos=True)
    submits: list[ToLoop] = [
        Submit(
            number,
            Request(
                rid=f"request-{number:06}",
                prompt_ids=pack_ids(np.full(PROMPT_TOKENS, number, np.int32)),
                sampling=sampling,
                seed=0,
                options=RequestOptions(stream=True),
            ),
        )
        for number in range(num_rows)
    ]
    length = PROMPT_TOKENS + num_steps + 2
    config = SchedulerConfig(
        num_slots=num_rows, max_req_len=length, max_req_input_len=length, vocab_size=1000
    )
    settings = Settings(
        max_running_requests=num_rows, chunked_prefill_size=None, max_prefill_tokens=1 << 20
    )
    cache = KVCache(num_pages=num_rows * length, page_size=1)
    scheduler = Scheduler(config, settings, cache, observer=observer)
    wire = Wire(submits)
    loop = Loop(scheduler, Instant(), wire, depth=0, clock=Clock(), observer=observer)
    loop.step()
    assert scheduler.state.num_decoding == num_rows
    return loop


def turn_us(loop: Loop, num_steps: int) -> float:
    """The median time of a turn in µs."""
    found = []
    for _ in range(num_steps):
        began = time.perf_counter()
        loop.step()
        found.append(time.perf_counter() - began)
    return statistics.median(found) * 1e6


def each_us(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(REPETITIONS):
        work()
    return (time.perf_counter() - began) / REPETITIONS * 1e6


def making_and_reading(record: Record, reader: Observer) -> tuple[float, float]:
    """The time in µs to make a record, and to read it."""
    kind = type(record)
    values = {name: getattr(record, name) for name in kind.__struct_fields__}
    return each_us(lambda: kind(**values)), each_us(lambda: reader.on(record))


def report(num_rows: int, num_steps: int) -> float:
    """Print the table; returns the µs that the records of a step cost."""
    keeping = Keeping()
    loop = decoding(num_rows, 8, keeping)
    keeping.records.clear()
    loop.step()
    print(f"\n{num_rows} rows: records of a decode step{'':<8} | make µs | read µs")
    total = 0.0
    for record in keeping.records:
        make, read = making_and_reading(record, usual())
        total += make + read
        print(f"  {type(record).__name__:<42} | {make:7.2f} | {read:7.2f}")
    print(f"  all: {total:.1f} µs, {total / STEP_MS / 10:.3f} % of a step of {STEP_MS:g} ms")
    total += metrics_of_a_step(keeping.records, num_rows) + watching_a_step(
        keeping.records, num_rows
    )
    loops = {
        "no reader": Silent(),
        "a server's readers": usual(),
        "those and metrics": usual(metrics=True),
    }
    runs = {name: decoding(num_rows, 3 * num_steps + 2, reader) for name, reader in loops.items()}
    medians: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            medians[name].append(turn_us(run, num_steps))
    for name, found in medians.items():
        print(f"  a turn without a model, {name:<19}: {statistics.median(found):7.1f} µs")
    return total


def metrics_of_a_step(records: list[Record], num_rows: int) -> float:
    """Print and return what --enable-metrics adds to a step in µs: in the engine, and in the
    frontend, where the token of each row is an event of its own."""
    plain, counting = usual(), usual(metrics=True)
    engine = sum(
        each_us(lambda record=record: counting.on(record))
        - each_us(lambda record=record: plain.on(record))
        for record in records
    )
    request = Request(rid="r", prompt_ids=pack_ids([1]), sampling=SamplingParams(), seed=0)
    meter = RequestMetrics().meter(request, time.perf_counter(), {})
    frontend = num_rows * each_us(lambda: meter.tokens(1, time.perf_counter()))
    total = engine + frontend
    print(
        f"  --enable-metrics adds {engine:.1f} µs in the engine and {frontend:.1f} µs in the"
        f" frontend, {total / STEP_MS / 10:.3f} % of such a step"
    )
    return total


def watching_a_step(records: list[Record], num_rows: int) -> float:
    """Print what the doctor and the console add to a step of any server in µs: in the engine, which
    ``usual`` includes, and in the frontend, where the token of each row is an event of its own.
    Returns the latter."""
    keeper, latencies = MomentKeeper(), Latencies()
    engine = sum(each_us(lambda record=record: keeper.on(record)) for record in records)
    frontend = num_rows * each_us(lambda: latencies.between(0.02, 1, time.perf_counter()))
    total = engine + frontend
    print(
        f"  moments take {engine:.1f} µs of that in the engine, and latencies {frontend:.1f} µs in"
        f" the frontend, {total / STEP_MS / 10:.3f} % of such a step"
    )
    return frontend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="64,256", help="comma-separated")
    parser.add_argument("--steps", type=int, default=500, help="turns per measurement")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, handlers=[logging.NullHandler()])
    print(environment("numpy", "msgspec"))
    gc.freeze()
    costs = {rows: report(rows, args.steps) for rows in map(int, args.rows.split(","))}
    print("\nonce per request                                    | make µs | read µs")
    done = RequestDone(seq_id=1, rid="r", finish=Finish("length"), num_prompt=9, ended_at=1.0)
    for record in (RequestAdmitted(1, "r", 0, 0.1, 0), done):
        make, read = making_and_reading(record, usual())
        print(f"  {type(record).__name__:<49} | {make:7.2f} | {read:7.2f}")
    if 64 in costs:
        met = "met" if costs[64] <= AIM * STEP_MS * 1e3 else "NOT met"
        print(f"\naim at most {AIM:.0%} of a decode step of 64 rows: {met}")


if __name__ == "__main__":
    main()
