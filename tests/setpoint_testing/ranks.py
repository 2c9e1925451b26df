"""Ranks of one model as threads of one process, for tests: the real group, messages and executor."""

from __future__ import annotations

import mmap
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.result import StepResult
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.engine_operations import EngineOperator
from setpoint.engine.executor.inproc import InprocExecutor, InprocStep
from setpoint.engine.executor.profiling import Profiler
from setpoint.engine.executor.tensor_parallel import (
    OtherRanks,
    TensorParallelExecutor,
    TensorParallelOperator,
    follow,
)
from setpoint.engine.kernels.cpu.rank_memory import SharedMemoryGroup
from setpoint.engine.parallel.group import ALONE, Group
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.plans import allocate_rows

SMALL_BYTES = 1 << 16
"""Size of the shared memory, so small that large exchanges are made in several parts."""


KEEP: dict[str, Any] = {"available_bytes": lambda: 1 << 40, "heartbeat": lambda: None}
"""What an operator is given besides."""


class CheckedExecutor:
    """Implements ``core.executor.Executor`` by another one, and keeps a checksum of the logits of
    each of its steps."""

    def __init__(
        self, executor: InprocExecutor, operator: TensorParallelOperator | None = None
    ) -> None:
        """operator: of all ranks, if there are several."""
        self.executor = executor
        self.operator = operator
        self.checksums: list[int] = []

    def submit(self, plan: StepPlan) -> _CheckedStep:
        return _CheckedStep(self.executor.submit(plan), self.checksums)

    def idle(self) -> bool:
        return False

    def shutdown(self) -> None: ...


class _CheckedStep:
    def __init__(self, step: InprocStep, checksums: list[int]) -> None:
        self._step = step
        self._checksums = checksums
        logits = step.forward.logits
        if logits is not None:
            self._checksums.append(checksum(logits))

    def finish(self, masks: TokenMasks | None) -> None:
        self._step.finish(masks)

    def result(self) -> StepResult:
        return self._step.result()


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@contextmanager
def ranks(
    config: EngineConfig, size: int, groups: Sequence[Group] = (), **rows: int
) -> Iterator[CheckedExecutor]:
    """An executor of a model on ``size`` ranks that have allocated a pool (``allocate_rows``). Its
    exit ends the other ranks and raises what they have raised. groups: of the ranks; those of
    shared memory if not given."""
    memory = mmap.mmap(-1, SMALL_BYTES)
    groups = groups or [SharedMemoryGroup(memory, rank, size) for rank in range(size)]
    runners = [build_runner(config, group if size > 1 else ALONE) for group in groups]
    # One after the other: threads share the state in which calls are recorded.
    for runner in runners:
        allocate_rows(runner, **rows)
    if size == 1:
        yield CheckedExecutor(InprocExecutor(runners[0]))
        return
    with led(runners, config) as (executor, others):
        operator = TensorParallelOperator(
            runners[0], executor.profiler, config, **KEEP, others=others
        )
        yield CheckedExecutor(executor, operator)


@contextmanager
def led(
    runners: Sequence[ModelRunner], config: EngineConfig
) -> Iterator[tuple[TensorParallelExecutor, OtherRanks]]:
    """An executor on the first of these runners, which are the ranks of a model. The others follow
    it in threads. Its exit ends them and raises what they have raised."""
    links, errors, threads = [], list[BaseException](), []
    for runner in runners[1:]:
        ours, theirs = Pipe()
        thread = threading.Thread(
            target=_follow, args=(runner, theirs, config, errors), daemon=True
        )
        thread.start()
        links.append(ours)
        threads.append(thread)
    try:
        others = OtherRanks(runners[0].backends.group, links, num_sharing=len(runners))
        yield TensorParallelExecutor(runners[0], others), others
    finally:
        for link in links:
            link.close()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _follow(
    runner: ModelRunner, link: Connection, config: EngineConfig, errors: list[BaseException]
) -> None:
    try:
        follow(runner, link, EngineOperator(runner, Profiler(runner.device), config, **KEEP))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        errors.append(error)
