"""Matrix products and attention as operations that a compiler does not look into: they stay what
the engine's seams chose.

A traced forward pass (``runner.ways.compiled``) consists of these two and of torch operations
between them, which are what is fused. A traced operation takes tensors and numbers only; what else
it needs it finds in the ``Pass`` that is set while the traced code runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from setpoint.engine.attention.base import AttentionBatch, AttentionVariant
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.layers.attention import store_and_attend
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.quant.base import PackedWeight


@dataclass(slots=True, frozen=True)
class Pass:
    """What the operations of one forward pass work on."""

    ctx: ForwardContext
    weights: Sequence[PackedWeight]
    """By the index that ``linear`` is given."""
    variants: Mapping[int, AttentionVariant]
    """By the layer that ``attend`` is given."""


_current: list[Pass] = []
"""The one under way; operations have no other way to objects. An engine process runs one forward
pass at a time."""


@contextmanager
def current(under_way: Pass) -> Iterator[None]:
    _current.append(under_way)
    try:
        yield
    finally:
        _current.pop()


class TracedProducts:
    """``Backends.multiply`` in traced code."""

    def __init__(self, products: Iterable[tuple[PackedWeight, int]]) -> None:
        """Every weight that the code multiplies by, and its number of columns."""
        self.weights: list[PackedWeight] = []
        self._places: dict[int, tuple[int, int]] = {}
        """By a weight's identity its index among the weights, and its number of columns."""
        for index, (weight, num_columns) in enumerate(products):
            self.weights.append(weight)
            self._places[id(weight)] = index, num_columns

    def multiply(self, weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
        index, num_columns = self._places[id(weight)]
        return torch.ops.setpoint.linear(x, index, num_columns)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    """For traced code: ``layers.attention.store_and_attend`` in the current pass."""
    return torch.ops.setpoint.attend(q, k, v, layer)


def _linear(x: torch.Tensor, index: int, num_columns: int) -> torch.Tensor:
    under_way = _current[-1]
    return under_way.ctx.multiply(under_way.weights[index], x)


def _linear_shape(x: torch.Tensor, index: int, num_columns: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], num_columns))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    under_way = _current[-1]
    return store_and_attend(q, k, v, under_way.ctx, layer, under_way.variants[layer])


def _attend_shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    return q.new_empty(q.shape)


_library = torch.library.Library("setpoint", "DEF")
for _signature, _run, _shape in (
    ("linear(Tensor x, int index, int num_columns) -> Tensor", _linear, _linear_shape),
    ("attend(Tensor q, Tensor k, Tensor v, int layer) -> Tensor", _attend, _attend_shape),
):
    _name = _library.define(_signature)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"setpoint::{_name}", _shape, lib=_library)


class TracedOps(RefOps):
    """The reference operations, for traced code: what is rotated is handed on to
    ``TracedAttention``, which stores it."""

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        k_cache: Any,
        v_cache: Any,
        kv_index: torch.Tensor,
    ) -> torch.Tensor:
        """-> [T, H + 2 Hkv, D]: rotated q, rotated k, v."""
        return torch.cat((*self.rotated(q, k, cos_sin, positions), v), dim=1)


class TracedAttention:
    """Stands for an ``AttentionBackend`` in traced code, behind ``TracedOps``; the "caches" are the
    layer's number."""

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self.heads = [num_heads, num_kv_heads, num_kv_heads]

    def forward(
        self,
        q: torch.Tensor,
        k_cache: Any,
        v_cache: Any,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        q, k, v = (heads.contiguous() for heads in q.split(self.heads, dim=1))
        return attend(q, k, v, k_cache)
