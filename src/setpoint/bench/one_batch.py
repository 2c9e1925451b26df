"""``setpoint bench one-batch``: the time of single steps by batch size and context, straight on an executor.

Works on plans of rows; there is no scheduler, no cache and no text. Prompts are random ids. A prefill runs in steps of at most
``chunk_tokens``, as the engine would run it, and REPEATS times; then every sequence decodes, all in one step after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from setpoint.bench import report
from setpoint.config.bench import OneBatchOptions
from setpoint.core.executor import Executor
from setpoint.core.plan import OWN_LENGTH, Admit, PlanBuilder
from setpoint.core.sampling import SamplingParams

REPEATS = 3
WARMUP_STEPS = 2


@dataclass(slots=True, frozen=True)
class Subject:
    """What is measured; made by ``launch.bare``."""

    executor: Executor
    page_size: int
    vocab_size: int
    chunk_tokens: int
    """Most tokens of a step."""
    about: Mapping[str, Any]
    """Model and kernels, for the results."""


@dataclass(slots=True, frozen=True)
class Times:
    """Seconds of one combination."""

    prefills: list[float]
    """Of whole prefills, one per repetition."""
    decodes: list[float]
    """Of each step. The context of step k is the prompt and k more tokens."""


def bench_one_batch(own: OneBatchOptions, build: Callable[[int, int], Subject]) -> int:
    """``build(num_slots, length)``: a Subject with room for that many sequences of that length. Raises SetpointError."""
    report.check_writable(own.output_file)
    subject = build(max(own.batch_size), max(own.input_len) + max(own.output_len))
    steps = _Steps(subject)
    print(f"{'batch':>6} {'input':>6} {'output':>6} {'prefill ms':>11} {'tok/s':>9} {'decode ms':>10} {'tok/s':>9}")
    for batch_size, input_len, output_len in product(own.batch_size, own.input_len, own.output_len):
        steps.run(batch_size, input_len, WARMUP_STEPS)
        result = _result(own, subject, (batch_size, input_len, output_len), steps.run(batch_size, input_len, output_len))
        print(
            f"{batch_size:>6} {input_len:>6} {output_len:>6} {result['prefill_latency'] * 1e3:>11.2f} {result['prefill_throughput']:>9.0f} "
            f"{result['median_decode_latency'] * 1e3:>10.3f} {result['median_decode_throughput']:>9.1f}",
            flush=True,
        )
        if own.output_file is not None:
            report.append(own.output_file, result)
    subject.executor.shutdown()
    return 0


def _result(own: OneBatchOptions, subject: Subject, shape: tuple[int, int, int], times: Times) -> dict[str, Any]:
    """In the names of SGLang's ``bench_one_batch``, in seconds and tokens per second; then ours."""
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
    """Builds plans and times them. Slot s owns the pages from 1 + s · (pages of a sequence) on, anew in every run."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._num_steps = 0
        self._rng = np.random.default_rng(0)

    def run(self, batch_size: int, input_len: int, output_len: int) -> Times:
        slots = range(batch_size)
        prefills = [self._prefill(slots, input_len, input_len + output_len) for _ in range(REPEATS)]
        decodes = []
        for _ in range(output_len - 1):
            plan = self._plan()
            for slot in slots:
                plan.add_row(slot, slot, OWN_LENGTH, 1, True)
            decodes.append(self._time(plan))
        plan = self._plan()
        self._time(plan, releases=tuple(slots))
        return Times(prefills, decodes)

    def _prefill(self, slots: range, input_len: int, length: int) -> float:
        """Admits the slots anew; seconds of the steps that compute their prompts and sample a first token each."""
        plan, num_pages = self._plan(), -(-length // self._subject.page_size)
        sampling = SamplingParams(temperature=0.0, max_new_tokens=length - input_len, ignore_eos=True)
        for slot in slots:
            ids = self._rng.integers(0, self._subject.vocab_size, size=input_len).astype(np.int32)
            plan.admits.append(Admit(slot, slot, ids, input_len, sampling, seed=0))
            plan.map_pages(slot, 0, np.arange(num_pages, dtype=np.int32) + 1 + slot * num_pages)
        spent, room = 0.0, self._subject.chunk_tokens
        for slot in slots:
            done = 0
            while done < input_len:
                if room == 0:
                    spent += self._time(plan)
                    plan, room = self._plan(), self._subject.chunk_tokens
                count = min(input_len - done, room)
                plan.add_row(slot, slot, done, count, done + count == input_len)
                done, room = done + count, room - count
        return spent + self._time(plan)

    def _plan(self) -> PlanBuilder:
        self._num_steps += 1
        return PlanBuilder(self._num_steps)

    def _time(self, plan: PlanBuilder, releases: tuple[int, ...] = ()) -> float:
        built = plan.build(releases)
        began = time.perf_counter()
        step = self._subject.executor.submit(built)
        step.finish(None)
        step.result()
        return time.perf_counter() - began
