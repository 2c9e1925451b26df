"""Compiles a runner's small steps at start and tests the result: compiled code is used only if it
gives the same answers as before, and faster.

Works on a runner whose memory is allocated and holds no sequences, with plans like those of any
step. It writes nothing to the log; its report says what was done.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from setpoint.core.plan import Admit, PlanBuilder, StepPlan
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.trial import TOLERANCE
from setpoint.engine.kernels.cpu.build import cache_dir
from setpoint.engine.kernels.device import marker, seconds_between, wait
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.runner.compiled_way import CompiledWay
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.engine.runner.way import Way

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Torch's environment variable for the folder that holds compiled graphs."""
GROWTH = 4
"""Factor between one tested step size and the next."""
HISTORY = 15
"""Number of tokens that precede a tested row. A sequence's first token alone would prove little,
because its hidden state is unlike all others."""
REPEATS = 7
"""Runs per step size of compiled and of uncompiled code, alternately; the medians are compared."""


@dataclass(slots=True, frozen=True)
class Duration:
    """Times of a step with ``num_tokens`` tokens, without sampling."""

    num_tokens: int
    compiled_s: float
    uncompiled_s: float

    def __str__(self) -> str:
        return (
            f"{self.num_tokens}: {self.compiled_s * 1e3:.2f} ms, uncompiled"
            f" {self.uncompiled_s * 1e3:.2f}"
        )


@dataclass(slots=True, frozen=True)
class CompileReport:
    """What start-up reports about compiling."""

    max_tokens: int = 0
    """Most tokens of a step that runs compiled; 0 if none does."""
    why_not_more: str = ""
    """Why ``max_tokens`` is smaller than was asked for; empty if it is not."""
    folder: str = ""
    """Folder of the compiled graphs."""
    seconds: float = 0.0
    """Seconds spent on compiling, or on reading graphs that were compiled earlier."""
    num_graphs: int = 0
    num_reused: int = 0
    """Number of graphs that were read from the folder."""
    durations: tuple[Duration, ...] = ()


class NotUsable(Exception):
    """Compiled code cannot be used here; the message says why."""


def compile_steps(runner: ModelRunner, max_tokens: int) -> CompileReport:
    """Compile steps of up to ``max_tokens`` tokens. If anything fails, the runner stays as it was
    and the report says why."""
    ops = runner.backends.ops
    if runner.report.model_impl == "setpoint" and not isinstance(ops, RefOps):
        return CompileReport(
            why_not_more=(
                f"a layer consists of the engine's own kernels ({runner.report.ops}) and has no"
                " torch operations to compile"
            )
        )
    if not os.environ.get(CACHE_VARIABLE):
        os.environ[CACHE_VARIABLE] = str(cache_dir().parent / "inductor")
    folder, begin = os.environ[CACHE_VARIABLE], time.perf_counter()
    try:
        compiled = CompiledWay(
            runner.forward_pass, runner.backends, runner.spec, otherwise=runner.ways[-1]
        )
        most = min(max_tokens, runner.longest_row - HISTORY)
        expected = _first_logits(runner, HISTORY + most)
        plans = [_last_tokens(HISTORY + most, size) for size in _sizes(most)]
        before = _graphs()
        with compiled.compiling(most):
            for plan in (plans[0], plans[-1]):
                runner.forward(plan, (compiled,))
        seconds = time.perf_counter() - begin
        num_graphs, num_reused = (now - then for now, then in zip(_graphs(), before, strict=True))
        durations = [_duration(runner, plan, compiled, expected) for plan in plans]
    except Exception as error:  # tracing, the compiler and its cache can raise anything
        return CompileReport(
            why_not_more=_one_line(error), folder=folder, seconds=time.perf_counter() - begin
        )
    runner.forward(PlanBuilder(0).build(releases=(0,)))
    compiled.max_tokens, why = _worth_it(durations)
    if compiled.max_tokens:
        runner.prefer(compiled)
    if compiled.max_tokens == most < max_tokens:
        why = f"no sequence can have more than {runner.longest_row} tokens here"
    return CompileReport(
        compiled.max_tokens, why, folder, seconds, num_graphs, num_reused, tuple(durations)
    )


def _sizes(largest: int) -> list[int]:
    """The step sizes to test: 1, GROWTH, GROWTH², …, and the largest."""
    sizes = [1]
    while sizes[-1] * GROWTH < largest:
        sizes.append(sizes[-1] * GROWTH)
    return sizes if largest == 1 else [*sizes, largest]


def _first_logits(runner: ModelRunner, length: int) -> torch.Tensor:
    """Put a sequence of ``length`` tokens into slot 0. Returns the logits after its last token,
    [1, V]."""
    if length <= HISTORY:
        raise NotUsable(f"no sequence can have more than {runner.longest_row} tokens here")
    ids = np.array(
        [(11 + 7919 * index) % runner.spec.vocab_size for index in range(length)], np.int32
    )
    plan = PlanBuilder(0, runner.num_groups)
    plan.admits.append(Admit(0, 0, ids, length, SamplingParams(temperature=0.0), seed=0))
    plan.map_own_rows(0, -(-length // runner.page_size))
    plan.add_row(0, 0, 0, length, 1)
    return _logits(runner, plan.build())


def _last_tokens(length: int, size: int) -> StepPlan:
    """A plan that computes the last ``size`` tokens of that sequence again. Except for attention,
    this is the work of a decode step with ``size`` rows."""
    plan = PlanBuilder(0)
    plan.add_row(0, 0, length - size, size, 1)
    return plan.build()


def _logits(runner: ModelRunner, plan: StepPlan, way: Way | None = None) -> torch.Tensor:
    """Logits of the plan, computed by ``way`` or by the runner's own choice."""
    logits = runner.forward(plan, None if way is None else (way,)).logits
    assert logits is not None, "a row samples"
    return logits


def _duration(
    runner: ModelRunner, plan: StepPlan, compiled: CompiledWay, expected: torch.Tensor
) -> Duration:
    """Time both ways alternately. Raises NotUsable if compiled code does not give the expected
    logits."""
    mark = marker(runner.device)
    seconds: dict[Way | None, list[float]] = {compiled: [], None: []}
    for _ in range(REPEATS):
        for way, measured in seconds.items():
            begin = mark()
            logits = _logits(runner, plan, way)
            end = mark()
            wait(end)
            measured.append(seconds_between(begin, end))
            error = float((logits - expected).double().norm() / expected.double().norm())
            if way is compiled and not error <= TOLERANCE[runner.dtype]:
                raise NotUsable(
                    f"its logits differ by {error:.2g} of their norm (allowed:"
                    f" {TOLERANCE[runner.dtype]:g})"
                )
    return Duration(
        int(plan.rows.counts[0]),
        statistics.median(seconds[compiled]),
        statistics.median(seconds[None]),
    )


def _worth_it(durations: Sequence[Duration]) -> tuple[int, str]:
    """(number of tokens up to which compiled code is faster, why it is not the largest one)."""
    most = 0
    for duration in durations:
        if duration.compiled_s >= duration.uncompiled_s:
            return most, f"compiled code is not faster at {duration.num_tokens} tokens"
        most = duration.num_tokens
    return most, ""


def _graphs() -> tuple[int, int]:
    """(number of graphs that this process has obtained so far, number of those that came from the
    cache)."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"]


def _one_line(error: Exception) -> str:
    words = (str(error).strip() or "no message").splitlines()[0].rstrip(".:")
    return words if isinstance(error, NotUsable) else f"{type(error).__name__}: {words}"
