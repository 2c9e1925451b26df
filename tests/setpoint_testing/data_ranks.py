"""Engines with DP attention as threads of one process, for tests: the real exchanges and runners,
each driven by a function of its own."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.parallel.shared_tokens import SharedMemoryDataRanks
from setpoint_testing.plans import allocate_rows
from setpoint_testing.ranks import SMALL_BYTES, CheckedExecutor

IDLE_S = 0.0005
T = TypeVar("T")


def together(
    configs: Sequence[EngineConfig], works: Sequence[Callable[[CheckedExecutor], T]], **rows: int
) -> list[tuple[T, list[int]]]:
    """What each work returns, and the checksums of the logits, if engine i does works[i] and then
    takes part in the steps of the others. rows: of the pools (``allocate_rows``)."""
    memory = mmap.mmap(-1, SMALL_BYTES)
    size = len(works)
    ranks = [SharedMemoryDataRanks(memory, rank, size) for rank in range(size)]
    runners = [build_runner(config, data=data) for config, data in zip(configs, ranks, strict=True)]
    # One after the other: threads share the state in which calls are recorded.
    for runner in runners:
        allocate_rows(runner, **rows)
    left = threading.Semaphore(0)
    over = threading.Event()

    def run(rank: int) -> tuple[T, list[int]]:
        executor = CheckedExecutor(InprocExecutor(runners[rank]))
        try:
            found = works[rank](executor)
        except BaseException:
            ranks[rank].leave()
            raise
        left.release()
        while not over.is_set():
            if not runners[rank].accompany():
                time.sleep(IDLE_S)
        return found, executor.checksums

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
        for _ in running:
            while not left.acquire(timeout=1.0):
                if any(each.done() for each in running):
                    break
        over.set()
        return [each.result() for each in running]
