"""Operations: what an operator may ask of an engine besides requests, e.g. to give memory back,
load other weights or trace its steps. An operation runs between two steps, with no step in flight.
"""

from __future__ import annotations

import enum
from typing import Literal, Protocol

import msgspec


class MemoryPart(enum.StrEnum):
    """The engine's large pieces of memory (SGLang's tags)."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"  # captured steps


class ReleaseMemory(msgspec.Struct, frozen=True, tag=True):
    """Give these parts back to the system. No step runs until all of them are restored."""

    parts: list[MemoryPart]


class RestoreMemory(msgspec.Struct, frozen=True, tag=True):
    """Allocate these parts again: weights are read from disk, the KV pool is empty, steps are
    captured again."""

    parts: list[MemoryPart]


class LoadWeights(msgspec.Struct, frozen=True, tag=True):
    """Replace the weights, or restore released ones, from a checkpoint of the same shapes."""

    folder: str
    load_format: str
    """"auto", "safetensors" or "dummy"."""
    flush_cache: bool
    """Empty the prefix cache, whose K and V were computed with the old weights."""


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Trace the coming steps with torch's profiler. It needs no idle engine."""

    path: str
    """The file to write, which must not exist yet; its folder is made if missing."""
    start_step: int = 0
    """Number of steps to run before the first one that is traced."""
    num_steps: int | None = None
    """Number of steps to trace, after which the trace is written. None: until StopProfile or the
    engine's own limit."""
    cpu: bool = True
    gpu: bool = True
    """Also trace kernels of a GPU, if there is one."""
    memory: bool = False
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """End the trace and write it. ``OperationDone.path`` names the file."""


class RecordExperts(msgspec.Struct, frozen=True, tag=True):
    """Count the tokens of each expert from a start to a stop, or write what was counted."""

    action: Literal["start", "stop", "dump"]
    path: str = ""
    """The file for a dump, which must not exist yet; its folder is made if missing."""


RECORDING = {
    "start": "Starting a record of experts",
    "stop": "Stopping the record of experts",
    "dump": "Writing the record of experts",
}
"""Action of RecordExperts -> what the log calls it."""


class FreezeGarbage(msgspec.Struct, frozen=True, tag=True):
    """Exclude all present Python objects from future garbage collections."""


class AttachStorage(msgspec.Struct, frozen=True, tag=True):
    """Keep prefixes in a storage from now on, where there is none."""

    backend: str
    settings: str
    """JSON, as --hicache-storage-backend-extra-config takes it."""
    replaces: bool = False
    """Whether it takes the place of the storage that there is; otherwise there must be none."""


class DetachStorage(msgspec.Struct, frozen=True, tag=True):
    """Neither load from the storage nor save to it any more."""


class ClearStorage(msgspec.Struct, frozen=True, tag=True):
    """Remove the blocks from the storage that this engine's model wrote."""


StorageOrder = AttachStorage | DetachStorage
STORAGE = (AttachStorage, DetachStorage, ClearStorage)
"""The operations on the storage of cached prefixes."""

NEEDS_REST = (ReleaseMemory, RestoreMemory, LoadWeights)
"""The operations for which the engine must be idle or paused."""
Operation = (
    ReleaseMemory
    | RestoreMemory
    | LoadWeights
    | StartProfile
    | StopProfile
    | RecordExperts
    | FreezeGarbage
    | AttachStorage
    | DetachStorage
    | ClearStorage
)


class Operator(Protocol):
    """The part of the engine that carries operations out."""

    @property
    def released(self) -> frozenset[MemoryPart]:
        """The parts of memory that are given back at present, also after an operation that raised.
        No step may run while there are any."""
        ...

    def operate(self, call_id: int, operation: Operation) -> str:
        """Carry out an operation. Returns the path of the file that it writes, or "".

        call_id: the id of the call, for a replay. Raises SetpointError, with nothing changed, if
        the operation is impossible. Any other exception is a failure of the operation; ``released``
        is correct afterwards.
        """
        ...
