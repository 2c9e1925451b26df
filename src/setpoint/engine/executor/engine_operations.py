"""Carries out operations on a running engine (``core.operations``): gives its memory back and
allocates it again, loads other weights, traces steps.

The loop calls it between two steps, after checking that the operation fits the state of the
requests.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from setpoint.core.errors import CheckpointError, OutOfMemoryError, RequestError, SetpointError
from setpoint.core.expert_placement import Placement
from setpoint.core.operations import (
    AttachStorage,
    ClearStorage,
    DetachStorage,
    FreezeGarbage,
    LoadWeights,
    MemoryPart,
    Operation,
    RecordExperts,
    ReleaseMemory,
    RestoreMemory,
    StartProfile,
    StopProfile,
)
from setpoint.core.progress import reported_to
from setpoint.engine.executor.build_runner import EngineConfig, load_experts, load_model
from setpoint.engine.executor.expert_recording import ExpertRecorder
from setpoint.engine.executor.profiling import Profiler
from setpoint.engine.parallel.split import mixtures
from setpoint.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


NO_TIERS = (
    "This server has no cache tiers. Start it with --enable-hierarchical-cache"
    " --hicache-storage-backend file."
)


class EngineOperator:
    """Implements ``core.operations.Operator`` for one runner."""

    def __init__(
        self,
        runner: ModelRunner,
        profiler: Profiler,
        config: EngineConfig,
        *,
        available_bytes: Callable[[], int],
        heartbeat: Callable[[], None],
    ) -> None:
        """profiler: that of the runner's executor. config: the runner's. available_bytes: returns
        the memory of the device that is free now. heartbeat: called at intervals while weights are
        loaded."""
        self._runner = runner
        self._profiler = profiler
        self._recorder = ExpertRecorder(runner)
        self._config = config
        self._available_bytes = available_bytes
        self._heartbeat = heartbeat
        self._released: set[MemoryPart] = set()
        """The parts that clients have released, and those that a failed operation has lost."""

    @property
    def released(self) -> frozenset[MemoryPart]:
        if not self._released and not self._runner.is_assembled:
            return frozenset({MemoryPart.CUDA_GRAPH})  # restoring it builds the steps again
        return frozenset(self._released)

    def operate(self, call_id: int, operation: Operation) -> str:
        match operation:
            case StartProfile():
                self._profiler.start(operation)
                return operation.path
            case StopProfile():
                return self._profiler.stop()
            case RecordExperts():
                return self._recorder.operate(operation)
            case AttachStorage() | DetachStorage() | ClearStorage():
                raise RequestError(NO_TIERS)
            case FreezeGarbage():
                gc.collect()
                gc.freeze()
                return ""
            case ReleaseMemory() | RestoreMemory() | LoadWeights():
                self._change(operation)
                return ""

    def load_experts(self, layer: int, placement: Placement) -> None:
        """``build_runner.load_experts``, of the weights that are in use. Raises CheckpointError or
        OutOfMemoryError with nothing changed."""
        with self._reading(self._config):
            load_experts(self._config, self._runner, layer, placement)

    def move_experts(self, layer: int, placement: Placement) -> None:
        """Fill the slots of a layer with the experts that have been loaded."""
        mixtures(self._runner.model)[layer].expert_slots.place(placement)

    def drop_experts(self, layer: int) -> None:
        """Give up the experts that have been loaded."""
        mixtures(self._runner.model)[layer].expert_slots.drop()

    def _change(self, operation: ReleaseMemory | RestoreMemory | LoadWeights) -> None:
        """Change memory or weights."""
        if self._runner.backends.data.size > 1:
            raise RequestError(
                "Memory and weights cannot be changed if the server runs with"
                " --enable-dp-attention: the engines compute in step and need each other's experts"
                " all the time. Start the server again."
            )
        if not self._runner.can_be_taken_apart:
            raise RequestError(
                "Memory and weights cannot be changed if the server runs with"
                " --enable-torch-compile: the compiled code would be lost."
            )
        match operation:
            case ReleaseMemory(parts):
                self._released |= set(parts)  # first, because a release that raises has begun
                self._runner.release(parts)
            case RestoreMemory(parts):
                self._restore(parts)
            case LoadWeights(folder, load_format):
                self._load(replace(self._config, model_folder=folder, load_format=load_format))

    def _restore(self, parts: Collection[MemoryPart]) -> None:
        if self._runner.weight_file is not None:
            self._runner.take_again(parts)
            self._released -= set(parts)
            return
        weights = MemoryPart.WEIGHTS in parts
        model = self._model(self._config) if weights else None
        self._put_back(parts, model)

    def _load(self, config: EngineConfig) -> None:
        """Load the new weights while the old ones are kept, so that these stay in use if that
        fails."""
        if MemoryPart.WEIGHTS in self._released:
            self._put_back([MemoryPart.WEIGHTS], self._model(config))
        else:
            needed, free = self._runner.report.weight_bytes, self._available_bytes()
            if needed > free:
                raise OutOfMemoryError(
                    f"The new weights do not fit next to the old ones: they need {needed >> 20}"
                    f" MiB, and {free >> 20} MiB are free. Release the weights first"
                    " (/release_memory_occupation)."
                )
            model = self._model(config)
            if self._released:
                self._runner.model = model
            else:
                self._runner.replace(model)
        self._config = config

    def _put_back(self, parts: Collection[MemoryPart], model: nn.Module | None) -> None:
        left = self._released - set(parts)
        self._runner.restore(pool=MemoryPart.KV_CACHE in parts, model=model, complete=not left)
        self._released = left

    def _model(self, config: EngineConfig) -> nn.Module:
        with self._reading(config):
            return load_model(config, self._runner)

    @contextmanager
    def _reading(self, config: EngineConfig) -> Iterator[None]:
        """Read weights in the block, whatever is in their files."""
        try:
            with reported_to(lambda doing: self._heartbeat()):
                yield
        except SetpointError:
            raise
        except Exception as error:  # a file that is cut short, a disk that fails
            logger.exception("Loading weights from %s failed.", config.model_folder)
            raise CheckpointError(
                f"The weights in {config.model_folder} cannot be read: {type(error).__name__};"
                " the server's log has the details."
            ) from None
