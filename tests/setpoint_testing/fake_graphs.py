"""Graphs on CPU tensors: what a function computes is recorded once, and computed again on the same
tensors.

Kernels in Triton that are interpreted (``interpreted_triton``) are recorded, too. Like a graph of a
device, a replay repeats exactly the recorded operations on the recorded
addresses: values that Python read while it was captured are frozen, and nothing is allocated. So a
captured step that depends on anything but the tensors gives wrong results here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"{func} waits for the device, which a capture does not permit")
        result = func(*args, **kwargs)
        kept = _tensors(result)
        if kept:  # also of operations that may return a view: some do only for some shapes
            self.calls.append(lambda: _again(func, args, kwargs, kept))
        return result


def recording(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch of an interpreted kernel that a recording notes instead of what torch does for it."""

    def launched(*args: Any, **kwargs: Any) -> None:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, _Recording):
                mode.calls.append(lambda: launch(*args, **kwargs))
        with _disable_current_modes():
            launch(*args, **kwargs)

    return launched


READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


def _again(func: Any, args: Any, kwargs: Any, kept: list[torch.Tensor]) -> None:
    result = func(*args, **kwargs)
    for tensor, value in zip(kept, _tensors(result), strict=True):
        assert tensor.shape == value.shape, f"{func}: another shape than when it was captured"
        if tensor.data_ptr() != value.data_ptr():
            tensor.copy_(value)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


class FakeGraphs:
    """Implements ``kernels.graphs.Graphs``."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.free_bytes = 1 << 30
        self.num_captured = 0
        self.num_replays = 0

    def warm_up(self, launch: Callable[[], object]) -> None:
        launch()

    def capture(self, launch: Callable[[], T]) -> tuple[Callable[[], None], T]:
        recording = _Recording()
        with recording:
            result = launch()
        self.num_captured += 1

        def replay() -> None:
            self.num_replays += 1
            with torch.inference_mode():
                for call in recording.calls:
                    call()

        return replay, result
