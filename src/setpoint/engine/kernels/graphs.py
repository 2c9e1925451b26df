"""Graphs of a device: what a function launches is captured once, and replayed with one call.

Works on functions that launch work and allocate tensors; knows nothing of steps or models. Unlike
``kernels.program``, which records calls of our own C++ kernels for every size up to that of the
recording, a graph repeats exactly what was launched, on the same addresses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from setpoint.engine.kernels.device import free_bytes
from setpoint.engine.kernels.ops import KernelsUnavailable

T = TypeVar("T")


class Graphs(Protocol):
    """The graphs of one model, which share their memory: they run one at a time, so the tensors of
    one may lie where another's are."""

    @property
    def num_bytes(self) -> int:
        """Device memory that the graphs keep."""
        ...

    @property
    def free_bytes(self) -> int:
        """Free memory of the device."""
        ...

    def warm_up(self, launch: Callable[[], object]) -> None:
        """Run what will be captured next, which may compile kernels."""
        ...

    def capture(self, launch: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Capture what ``launch`` does. Returns (replay, result): ``replay()`` does it again, and
        writes the tensors of the result again. Nothing in ``launch`` may wait for the device or
        read a value from it. Raises RuntimeError if that cannot be captured."""
        ...


class CudaGraphs:
    """Implements ``Graphs`` with the graphs of CUDA, through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.num_bytes = 0

    @property
    def free_bytes(self) -> int:
        return free_bytes(self._device)

    def warm_up(self, launch: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.synchronize(self._device)

    def capture(self, launch: Callable[[], T]) -> tuple[Callable[[], None], T]:
        before = self.free_bytes
        graph = torch.cuda.CUDAGraph()
        # A collection could free tensors of another stream while this one is captured. Other
        # threads (transfers of pages) go on with their own streams.
        gc.disable()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = launch()
        finally:
            gc.enable()
        self.num_bytes += max(before - self.free_bytes, 0)
        self._graphs.append(graph)
        return graph.replay, result


class LaunchedGraphs:
    """Implements ``Graphs`` where nothing is computed (``kernels.triton.absent_gpu``): what would
    be captured is launched once, so that its kernels are compiled."""

    num_bytes = 0
    free_bytes = 0

    def __init__(self, device: torch.device) -> None:
        """device: unused."""

    def warm_up(self, launch: Callable[[], object]) -> None:
        """``capture`` launches it."""

    def capture(self, launch: Callable[[], T]) -> tuple[Callable[[], None], T]:
        result = launch()
        return lambda: None, result


GRAPHS: dict[str, Callable[[torch.device], Graphs]] = {"cuda": CudaGraphs}
"""Device type -> factory, for the devices that have graphs."""


def make_graphs(device: torch.device) -> Graphs:
    """Graphs on this device. Raises KernelsUnavailable with the reason if it has none."""
    if device.type not in GRAPHS:
        raise KernelsUnavailable(f"{device.type} has no graphs")
    return GRAPHS[device.type](device)
