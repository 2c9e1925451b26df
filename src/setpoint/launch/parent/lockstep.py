"""Starts engines that compute in step (DP attention, decision 0069)."""

from __future__ import annotations

import os
from functools import partial
from types import TracebackType

from setpoint.launch.lockstep_memory import new_memory
from setpoint.launch.parent.process import EngineProcess, spawn_child


class SteppingEngines:
    """Starts engines that compute in step; a context manager, whose object is a ``Spawn``. All
    start together, and again when all have ended: each time with new memory."""

    def __init__(self, size: int, *, stderr: int | None) -> None:
        self._size = size
        self._spawn = partial(spawn_child, None, num_ranks=1, stderr=stderr)
        self._descriptors: list[int] = []
        """The file descriptors of the memory and of the bells."""
        self._started: set[int] = set()
        """The ranks that have them."""

    def __enter__(self) -> SteppingEngines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def __call__(self, rank: int) -> EngineProcess:
        if not self._descriptors or rank in self._started:
            self._renew()
        self._started.add(rank)
        return self._spawn(inherits=self._descriptors)

    def _renew(self) -> None:
        self._close()
        self._descriptors = new_memory(self._size)

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._started.clear()
