"""What operators ask of a simulated engine besides requests."""

from __future__ import annotations

from collections.abc import Callable

from setpoint.core.errors import RequestError
from setpoint.core.operations import (
    AttachStorage,
    DetachStorage,
    LoadWeights,
    MemoryPart,
    Operation,
    ReleaseMemory,
    RestoreMemory,
    StartProfile,
    StopProfile,
)
from setpoint.launch.job import EngineJob


class SimulatedOperator:
    """Implements ``core.operations.Operator``."""

    def __init__(self, job: EngineJob, take_pool: Callable[[], None]) -> None:
        """take_pool: called when the pool has new memory."""
        self._take_pool = take_pool
        self.released: frozenset[MemoryPart] = frozenset()
        self.weights = job.folder
        """The folder of those that it has."""
        self.loaded: set[str] = set()
        """The folders from which it has loaded weights since its start."""
        self.num_releases = 0
        attached = job.storage
        self.storage = attached.backend if isinstance(attached, AttachStorage) else None
        """The backend of the storage of cached prefixes; without ``EngineTiers`` nothing is kept in
        it."""
        self.is_profiled = False
        self.refuses_next = False
        """Whether it refuses its next operation."""

    def operate(self, call_id: int, operation: Operation) -> str:
        self._only_if(not self.refuses_next)
        match operation:
            case LoadWeights(folder):
                self.weights = folder
                self.loaded.add(folder)
                self.released -= {MemoryPart.WEIGHTS}
            case ReleaseMemory(parts):
                self.released |= set(parts)
                self.num_releases += 1
            case RestoreMemory(parts):
                self.released -= set(parts)
                if MemoryPart.KV_CACHE in parts:
                    self._take_pool()
            case AttachStorage(backend, replaces=replaces):
                self._only_if(self.storage is None or replaces)
                self.storage = backend
            case DetachStorage():
                self._only_if(self.storage is not None)
                self.storage = None
            case StartProfile():
                self._only_if(not self.is_profiled)
                self.is_profiled = True
            case StopProfile():
                self._only_if(self.is_profiled)
                self.is_profiled = False
            case _:
                raise AssertionError(f"{operation} is not simulated")
        return ""

    def _only_if(self, is_possible: bool) -> None:
        self.refuses_next = False
        if not is_possible:
            raise RequestError("It is not in a state for that.")
