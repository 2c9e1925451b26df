"""What an operator may have the engine's process do besides requests: give memory back, load other
weights, trace its steps. An operation works between two steps, with no step in flight.
"""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec


class MemoryPart(enum.StrEnum):
    """The engine's large pieces of memory (SGLang's tags)."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"  # captured steps


class ReleaseMemory(msgspec.Struct, frozen=True, tag=True):
    """Give these parts back to the system. No step runs until all are restored."""

    parts: list[MemoryPart]


class RestoreMemory(msgspec.Struct, frozen=True, tag=True):
    """Take these parts again: weights are read from disk, the KV pool is empty, steps are captured
    anew."""

    parts: list[MemoryPart]


class LoadWeights(msgspec.Struct, frozen=True, tag=True):
    """Replace the weights, or restore released ones, from a checkpoint of the same shapes."""

    folder: str
    load_format: str
    """"auto", "safetensors" or "dummy"."""
    flush_cache: bool
    """Empty the prefix cache, whose K and V the old weights have computed."""


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Trace the coming steps with torch's profiler. It needs no idle engine."""

    path: str
    """The file to write, which must not exist yet; its folder is made if missing."""
    start_step: int = 0
    """How many steps to run before the first one that is traced."""
    num_steps: int | None = None
    """How many steps to trace, after which the trace is written. None: until StopProfile, or a
    limit of the engine's."""
    cpu: bool = True
    gpu: bool = True
    """Also trace kernels of a GPU, if there is one."""
    memory: bool = False
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """End the trace and write it. The answer's value has the ``path``."""


class FreezeGarbage(msgspec.Struct, frozen=True, tag=True):
    """Leave all present objects of Python out of future garbage collections."""


NEEDS_REST = (ReleaseMemory, RestoreMemory, LoadWeights)
"""The operations for which the engine must be idle or paused."""
Operation = ReleaseMemory | RestoreMemory | LoadWeights | StartProfile | StopProfile | FreezeGarbage


class Operator(Protocol):
    """The part of the engine that carries operations out."""

    @property
    def released(self) -> frozenset[MemoryPart]:
        """The parts of memory that are given back now. It is true after an operation that raised,
        too: no step may run while there are any."""
        ...

    def operate(self, call_id: int, operation: Operation) -> str:
        """Returns the path of the file that the operation writes, or "". call_id: the id of the
        message, for a replay.

        Raises SetpointError, with everything as it was, if the operation is impossible; any other
        exception fails the operation, and ``released`` says what is left.
        """
        ...
