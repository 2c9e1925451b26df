"""Steps of whole models, without a scheduler: how long loading and capturing take, decode steps one
ahead of their results as an engine runs them, a long prefill, and a profile."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu.models import GPT_OSS, LLAMA_8B, V2_LITE, write_model
from gpu.results import Results, write
from gpu.roofline import BF16, CHIPS, PREFILL, Step, spec_of, step_s
from gpu.timing import device, stall

from setpoint.bench.engines.bare import bare_engine
from setpoint.bench.one_batch import Subject
from setpoint.config.commandline import parse
from setpoint.config.commands import COMMANDS
from setpoint.config.environment import read_environment
from setpoint.core.graph_sizes import GraphSizes
from setpoint.core.plan import OWN_LENGTH, Admit, PlanBuilder, StepPlan
from setpoint.core.result import StepResult
from setpoint.core.sampling import SamplingParams
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.planning.memory import graph_bytes

H200 = next(chip for chip in CHIPS if chip.name == "H200")
WARM, TIMED, ALONE, PROFILED = 8, 40, 9, 5
DECODES = ((1, 1024), (1, 1536), (8, 1536), (64, 1536), (256, 1536))
OF_MIXTURES = ((1, 1536), (256, 1536))
"""Rows, and the position of their tokens."""
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=None, ignore_eos=True)
KERNELS = 15
"""Kernels of a profile that are results; the others are in its file."""


def decode_name(model: str, rows: int, length: int) -> str:
    """Name of the result of a decode step."""
    return f"{model} bf16, {rows} row{'s' if rows > 1 else ''} at {length:,}"


def prefill_name(model: str, tokens: int) -> str:
    return f"{model} bf16, prefill of {tokens:,}"


def not_hidden_name(model: str, rows: int) -> str:
    """Name of the share of a decode step in which the device waits for the host."""
    return f"{model} bf16, host not hidden at {rows} rows"


def graphs_name(model: str) -> str:
    """Name of the difference between the graphs' memory and its estimate."""
    return f"{model} bf16, graphs beyond the estimate"


def steps(out: Results) -> None:
    """Llama-3.1-8B: the start, decode steps of 1 to 256 rows, a prefill of 8,192 tokens."""
    _measure(out, LLAMA_8B, DECODES, prefill=True, profiled=64)


def mixtures(out: Results) -> None:
    """Decode steps of gpt-oss-20b and DeepSeek-V2-Lite."""
    for name in (GPT_OSS, V2_LITE):
        out.attempt(name, lambda name=name: _measure(out, name, OF_MIXTURES))


def _measure(
    out: Results,
    name: str,
    at: tuple[tuple[int, int], ...],
    *,
    prefill: bool = False,
    profiled: int = 0,
) -> None:
    """at: the rows and positions of decode steps. profiled: rows of those that are profiled."""
    if out.rehearsal:
        at, profiled = tuple({(min(rows, 3), 24): None for rows, _ in at}), 3 if profiled else 0
    new = 32 if out.rehearsal else PREFILL.new
    decoded = max(length for _, length in at) + 2 * (WARM + TIMED + ALONE + PROFILED)
    began = time.perf_counter()
    subject = _start(out, name, length=max(new if prefill else 0, decoded))
    batch, spec = _Batch(subject, max(rows for rows, _ in at), decoded), spec_of(name)
    out.add(f"{name}: start", time.perf_counter() - began, "s")
    _about_start(out, name, subject.executor.runner)
    for rows, length in at:
        label = decode_name(name, rows, length)
        predicted = step_s(spec, BF16, Step(rows, length), H200)
        batch.admit(rows, length)
        whole, on_device = batch.decode(rows), batch.decode_alone(rows)
        out.add(label, whole * 1e3, "ms", predicted=predicted * 1e3)
        out.add(f"{label}, on the device", on_device * 1e3, "ms")
        waits = 100 * max(whole - on_device, 0.0) / whole
        out.add(not_hidden_name(name, rows), waits, "%")
        if rows == profiled:
            _profile(out, batch, rows)
        batch.release(rows)
    if prefill:
        seconds = min(batch.prefill(new) for _ in range(3))
        predicted = step_s(spec, BF16, PREFILL, H200) * 1e3
        out.add(prefill_name(name, new), seconds * 1e3, "ms", predicted=predicted)
    subject.executor.shutdown()


def _start(out: Results, name: str, *, length: int) -> Subject:
    """The model, with room for one sequence."""
    folder = write_model(out.folder / "models", name, tiny=out.rehearsal)
    arguments = [str(folder), "--load-format", "dummy", "--device", device().type]
    arguments += ["--context-length", str(length), "--log-level", "info"]
    line = parse(COMMANDS["bench one-batch"], arguments)
    return bare_engine(line, read_environment(os.environ), num_slots=1, length=length)


def _about_start(out: Results, name: str, runner: ModelRunner) -> None:
    report = runner.report
    out.add(f"{name}: loading", report.load_seconds, "s")
    kinds = f"{report.ops}, {report.linear}, {report.attention}; steps: {runner.ways[0].name}"
    out.add(f"{name}: kernels, products, attention", kinds + (runner.why_eager and " because ")
            + runner.why_eager)  # fmt: skip
    out.add(f"{name}: capturing", runner.allocate_seconds, "s")
    slots = len(runner.slots.columns)
    sizes = runner.graph_sizes
    captured = GraphSizes(tuple(each for each in sizes.rows if each <= slots), sizes.tokens)
    estimated, taken = graph_bytes(captured), runner.ways[0].num_bytes
    out.add(f"{name}: graphs", taken / 1e6, "MB", predicted=estimated / 1e6)
    if estimated:
        beyond = 100 * abs(taken - estimated) / estimated
        out.add(graphs_name(name), beyond, "%")


class _Batch:
    """Sequences whose keys and values are whatever the pool holds: a step takes as long with them
    as with others."""

    def __init__(self, subject: Subject, rows: int, length: int) -> None:
        """Make room for ``rows`` sequences of ``length`` tokens, or for one as long as the context,
        and capture steps of so many rows."""
        runner, self._subject = subject.executor.runner, subject
        self._pages = -(-length // subject.page_size)
        self._most = -(-runner.slots.context_len // subject.page_size)
        runner.allocate(
            num_pages=max(rows * self._pages, self._most) * subject.num_groups,
            max_slots=rows,
            context_len=runner.slots.context_len,
        )
        self._step_id = 0
        self._rng = np.random.default_rng(0)
        self._first: StepPlan | None = None

    def admit(self, rows: int, length: int) -> None:
        """Let the next step decode the last of ``length`` known tokens in each row."""
        plan = self._plan()
        for slot in range(rows):
            self._admit(plan, slot, length, self._pages)
            plan.add_row(slot, slot, length - 1, 1, 1)
        self._first = plan.build()

    def decode(self, rows: int) -> float:
        """Mean seconds of a step, as an engine runs it: submitted before the result of the one
        before is taken."""
        assert self._first is not None
        executor, times = self._subject.executor, []
        before = executor.submit(self._first)
        before.finish(None)
        for _ in range(WARM + TIMED):
            step = executor.submit(self.plan(rows))
            before.result()
            times.append(time.perf_counter())
            step.finish(None)
            before = step
        before.result()
        return (times[-1] - times[WARM - 1]) / TIMED

    def decode_alone(self, rows: int) -> float:
        """Median seconds of a step's work on the device, which never waits for the host."""
        found = []
        for _ in range(ALONE):
            plan = self.plan(rows)
            stall()
            result = self.run(plan)
            found.append(result.forward_s + result.sample_s)
        return statistics.median(found)

    def plan(self, rows: int) -> StepPlan:
        """A decode step."""
        plan = self._plan()
        for slot in range(rows):
            plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
        return plan.build()

    def run(self, plan: StepPlan) -> StepResult:
        """A step that no other overlaps."""
        step = self._subject.executor.submit(plan)
        step.finish(None)
        return step.result()

    def prefill(self, length: int) -> float:
        """Seconds of a step with all tokens of one prompt."""
        plan = self._plan()
        self._admit(plan, 0, length, self._most)
        plan.add_row(0, 0, 0, length, 1)
        built, begin = plan.build(), time.perf_counter()
        self.run(built)
        seconds = time.perf_counter() - begin
        self.release(1)
        return seconds

    def release(self, rows: int) -> None:
        self.run(self._plan().build(releases=tuple(range(rows))))

    def _admit(self, plan: PlanBuilder, slot: int, length: int, pages: int) -> None:
        ids = self._rng.integers(0, self._subject.vocab_size, length).astype(np.int32)
        plan.admits.append(Admit(slot, slot, ids, length, GREEDY, seed=0))
        plan.map_own_rows(slot, pages, first=slot * pages)

    def _plan(self) -> PlanBuilder:
        self._step_id += 1
        return PlanBuilder(self._step_id, self._subject.num_groups)


def _profile(out: Results, batch: _Batch, rows: int) -> None:
    """The kernels of steady decode steps, by their time on the device, and all in a file."""
    plans = [batch.plan(rows) for _ in range(PROFILED)]
    with torch.profiler.profile() as trace:
        for plan in plans:
            with torch.profiler.record_function("a whole step, by the host"):
                batch.run(plan)
    on_gpu = device().type == "cuda"
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found: Any = trace.key_averages()
    path = Path(out.folder) / f"profile-{rows}-rows.txt"
    write(path, found.table(sort_by=key, row_limit=60))
    slowest = sorted(found, key=lambda each: -getattr(each, key))[:KERNELS]
    for each in slowest:
        label = f"{rows} rows, a step's {each.count / PROFILED:g} × {each.key[:60]}"
        out.add(label, getattr(each, key) / PROFILED, "µs")
