"""Counts the bytes of the tensors that operations make, while they live."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A block in which every new storage is counted until the last of its tensors is gone. Tensors
    that exist before are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._tensors: Counter[int] = Counter()
        self._old: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in _tensors((args, kwargs)):
            at = given.untyped_storage().data_ptr()
            if at not in self._sizes:
                self._old.add(at)
        result = func(*args, **(kwargs or {}))
        for made in _tensors(result):
            self._count(made)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if not storage.nbytes() or (at in self._old and at not in self._sizes):
            return
        if at not in self._sizes:
            self._sizes[at] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._tensors[at] += 1
        weakref.finalize(tensor, self._gone, at)

    def _gone(self, at: int) -> None:
        self._tensors[at] -= 1
        if not self._tensors[at]:
            self.now -= self._sizes.pop(at)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
