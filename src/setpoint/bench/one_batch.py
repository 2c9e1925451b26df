"""``setpoint bench one-batch``: the time of single steps by batch size and context, measured
directly on an executor.

Works on plans of rows; there is no scheduler, no prefix cache and no text. Prompts are random ids.
A prefill runs in steps of at most ``chunk_tokens``, as in the engine, and REPEATS times; then all
sequences decode together, one step after the other. The breakdown of a step comes from two more
runs: one counts the work of each part, the other takes the times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import numpy as np

from setpoint.bench import breakdown, comparison, report
from setpoint.bench.bench_progress import waiting
from setpoint.bench.breakdown import PHASES, LoopTimes, PeakRates, Shape, shape_text
from setpoint.config.bench import OneBatchOptions
from setpoint.core.executor import Executor
from setpoint.core.plan import OWN_LENGTH, Admit, PlanBuilder, StepPlan
from setpoint.core.sampling import SamplingParams
from setpoint.core.work import Work

HEAD = (
    f"{'batch':>6} {'input':>6} {'output':>6} {'prefill ms':>11} {'tok/s':>9} {'decode ms':>10}"
    f" {'tok/s':>9}"
)
REPEATS = 3
WARMUP_STEPS = 2


class MeasuringExecutor(Executor, Protocol):
    """An executor that counts the work of each kind of operation."""

    def take(self) -> dict[str, Work]:
        """The work of the steps since the last call."""
        ...


class Measure(Protocol):
    def __call__(self, *, eager: bool) -> MeasuringExecutor:
        """An executor on the same memory. eager: True counts all work, at the cost of speed; False
        only takes times."""
        ...


@dataclass(slots=True, frozen=True)
class Subject:
    """What is measured; made by ``bench.engines.bare``."""

    executor: Executor
    page_size: int
    num_groups: int
    """Number of the model's cache groups."""
    vocab_size: int
    chunk_tokens: int
    """Most tokens of a step."""
    about: Mapping[str, Any]
    """Model and kernels, for the results."""
    measure: Measure
    limits: PeakRates | None
    """None if the limits of this machine cannot be measured."""


@dataclass(slots=True, frozen=True)
class Times:
    """The times of one combination of batch size and lengths."""

    prefills: list[float]
    """Seconds of whole prefills, one per repetition."""
    decodes: list[float]
    """Seconds of each decode step. The context of step k is the prompt and k more tokens."""
    works: dict[str, list[dict[str, Work]]] = field(
        default_factory=lambda: {phase: [] for phase in PHASES}
    )
    """The work of each prefill and decode step, measured by a measuring executor."""


def bench_one_batch(
    own: OneBatchOptions,
    build: Callable[[int, int], Subject],
    engine_turns: Callable[[Sequence[Shape]], Mapping[Shape, Mapping[str, LoopTimes]]],
) -> int:
    """Measure all combinations. ``build(num_slots, length)`` makes a Subject with room for that
    many sequences of that length; ``engine_turns`` measures the same batches in a whole engine.
    Raises SetpointError."""
    report.check_writable(own.output_file)
    others = comparison.by_shape(own.compare) if own.compare is not None else None
    shapes = list(product(own.batch_size, own.input_len, own.output_len))
    turns = (
        engine_turns(shapes) if own.breakdown else {}
    )  # before a second copy of the model exists
    subject = build(max(own.batch_size), max(own.input_len) + max(own.output_len))
    steps = _Steps(subject)
    print(HEAD + (comparison.STEP_RATIOS if others is not None else ""))
    for shape in shapes:
        batch_size, input_len, output_len = shape
        with waiting(f"Measuring {shape_text(shape)}"):
            steps.run(batch_size, input_len, WARMUP_STEPS, repeats=1)
            result = _result(own, subject, shape, steps.run(*shape))
        ratios = comparison.step_ratios(result, others.get(shape, [])) if others is not None else ""
        print(
            f"{batch_size:>6} {input_len:>6} {output_len:>6}"
            f" {result['prefill_latency'] * 1e3:>11.2f} {result['prefill_throughput']:>9.0f}"
            f" {result['median_decode_latency'] * 1e3:>10.3f}"
            f" {result['median_decode_throughput']:>9.1f}{ratios}",
            flush=True,
        )
        if own.breakdown:
            with waiting(f"Measuring the parts of {shape_text(shape)}"):
                counted = steps.run(*shape, repeats=1, measured=subject.measure(eager=True))
                timed = steps.run(*shape, measured=subject.measure(eager=False))
            result |= _breakdown(subject, result, counted, timed, turns[shape])
        if own.output_file is not None:
            report.append(own.output_file, result)
    subject.executor.shutdown()
    return 0


def _breakdown(
    subject: Subject,
    result: Mapping[str, Any],
    counted: Times,
    timed: Times,
    turns: Mapping[str, LoopTimes],
) -> dict[str, Any]:
    """Print the tables; returns the entries for the result."""
    found: dict[str, Any] = {}
    totals = {"prefill": timed.prefills, "decode": timed.decodes}
    untimed_s = {"prefill": result["prefill_latency"], "decode": result["median_decode_latency"]}
    titles = {
        "prefill": f"Prefill of {result['batch_size']} x {result['input_len']} tokens",
        "decode": f"Decode step of {result['batch_size']}, median of {len(timed.decodes)}",
    }
    for phase in PHASES:
        with waiting("Measuring the limits of this machine"):  # for types not used before
            parts = breakdown.parts_of(
                counted.works[phase],
                timed.works[phase],
                totals[phase],
                subject.limits,
                turns[phase],
            )
        found[phase] = breakdown.as_json(parts, turns[phase])
        print("\n".join(breakdown.table(titles[phase], parts, untimed_s[phase], turns[phase])))
    limits = None if subject.limits is None else subject.limits.measured()
    words = (
        "No bounds: the limits of this machine cannot be measured."
        if limits is None
        else breakdown.limits_text(limits)
    )
    print(f"\n{words}\n", flush=True)
    return {"breakdown": found, "limits": limits}


def _result(own: OneBatchOptions, subject: Subject, shape: Shape, times: Times) -> dict[str, Any]:
    """The result with the names of SGLang's ``bench_one_batch``, in seconds and tokens per second,
    then with our own."""
    batch_size, input_len, output_len = shape
    prefill, decode = statistics.median(times.prefills), statistics.median(times.decodes)
    total = prefill + sum(times.decodes)
    return {
        "run_name": own.run_name,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_latency": prefill,
        "prefill_throughput": batch_size * input_len / prefill,
        "median_decode_latency": decode,
        "median_decode_throughput": batch_size / decode,
        "total_latency": total,
        "overall_throughput": batch_size * (input_len + output_len) / total,
        "prefill_latencies": times.prefills,
        "decode_latencies": times.decodes,
        "chunk_tokens": subject.chunk_tokens,
        **subject.about,
    }


class _Steps:
    """Builds plans and times them. In every run, slot s owns the pages from 1 + s · (pages of a
    sequence) on."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._num_steps = 0
        self._rng = np.random.default_rng(0)

    def run(
        self,
        batch_size: int,
        input_len: int,
        output_len: int,
        *,
        repeats: int = REPEATS,
        measured: MeasuringExecutor | None = None,
    ) -> Times:
        """The times of a prefill, repeated, and of its decode steps. ``measured``: an executor that
        runs the steps instead of the subject's."""
        slots, times = range(batch_size), Times([], [])
        executor = self._subject.executor if measured is None else measured
        for _ in range(repeats):
            times.prefills.append(self._prefill(executor, slots, input_len, input_len + output_len))
            if measured is not None:
                times.works["prefill"].append(measured.take())
        for _ in range(output_len - 1):
            plan = self._plan()
            for slot in slots:
                plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
            times.decodes.append(_time(executor, plan.build()))
            if measured is not None:
                times.works["decode"].append(measured.take())
        _time(executor, self._plan().build(releases=tuple(slots)))
        return times

    def _prefill(self, executor: Executor, slots: range, input_len: int, length: int) -> float:
        """Admit all sequences again; returns the seconds of the steps that compute their prompts
        and sample a first token for each."""
        plan, num_rows = self._plan(), -(-length // self._subject.page_size)
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=length - input_len, ignore_eos=True
        )
        for slot in slots:
            ids = self._rng.integers(0, self._subject.vocab_size, size=input_len).astype(np.int32)
            plan.admits.append(Admit(slot, slot, ids, input_len, sampling, seed=0))
            plan.map_own_rows(slot, num_rows, first=slot * num_rows)
        spent, room = 0.0, self._subject.chunk_tokens
        for slot in slots:
            done = 0
            while done < input_len:
                if room == 0:
                    spent += _time(executor, plan.build())
                    plan, room = self._plan(), self._subject.chunk_tokens
                count = min(input_len - done, room)
                plan.add_row(slot, slot, done, count, int(done + count == input_len))
                done, room = done + count, room - count
        return spent + _time(executor, plan.build())

    def _plan(self) -> PlanBuilder:
        self._num_steps += 1
        return PlanBuilder(self._num_steps, self._subject.num_groups)


def _time(executor: Executor, plan: StepPlan) -> float:
    """Run one step; returns its seconds."""
    began = time.perf_counter()
    step = executor.submit(plan)
    step.finish(None)
    step.result()
    return time.perf_counter() - began
