"""Matrix products and attention as operations that are opaque to a compiler, so that the engine's
own kernels compute them.

A traced forward pass (``runner.compiled_way``) consists of these two operations and of torch
operations between them, which the compiler fuses. A traced operation takes only tensors and
numbers; everything else is in the ``Pass`` that is set while the traced code runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from setpoint.engine.attention.attention_backend import AttentionBatch, AttentionVariant
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.layers.attention import store_and_attend
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.quant.grouped import GroupedWeight
from setpoint.engine.quant.linear_method import PackedWeight


@dataclass(slots=True, frozen=True)
class Pass:
    """The objects that the operations of one forward pass use."""

    ctx: ForwardContext
    weights: Sequence[PackedWeight]
    """The weights, in the order of ``linear``'s index."""
    grouped: Sequence[GroupedWeight]
    """The weights of experts, in the order of ``experts``' index."""
    variants: Mapping[int, AttentionVariant]
    """Layer -> its variant."""


_current: list[Pass] = []
"""The pass that is running, as a list of at most one: operations have no other access to objects.
An engine process runs one forward pass at a time."""


@contextmanager
def running(forward_pass: Pass) -> Iterator[None]:
    """Let the traced operations within the block use the objects of ``forward_pass``."""
    _current.append(forward_pass)
    try:
        yield
    finally:
        _current.pop()


W = TypeVar("W")


class TracedProducts(Generic[W]):
    """``Backends.multiply`` and ``multiply_grouped`` for traced code."""

    def __init__(self, products: Iterable[tuple[W, int]]) -> None:
        """products: every weight that the code multiplies by, with its number of columns."""
        self.weights: list[W] = []
        self._places: dict[int, tuple[int, int]] = {}
        """id() of a weight -> (its index in ``weights``, its number of columns)."""
        for index, (weight, num_columns) in enumerate(products):
            self.weights.append(weight)
            self._places[id(weight)] = index, num_columns

    def multiply(self, weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
        index, num_columns = self._places[id(weight)]
        return torch.ops.setpoint.linear(x, index, num_columns)

    def multiply_grouped(
        self, weight: GroupedWeight, x: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        index, num_columns = self._places[id(weight)]
        return torch.ops.setpoint.experts(x, ids, index, num_columns)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    """``layers.attention.store_and_attend`` in the current pass, for traced code."""
    return torch.ops.setpoint.attend(q, k, v, layer)


def _linear(x: torch.Tensor, index: int, num_columns: int) -> torch.Tensor:
    forward_pass = _current[-1]
    return forward_pass.ctx.multiply(forward_pass.weights[index], x)


def _linear_shape(x: torch.Tensor, index: int, num_columns: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], num_columns))


def _experts(x: torch.Tensor, ids: torch.Tensor, index: int, num_columns: int) -> torch.Tensor:
    forward_pass = _current[-1]
    return forward_pass.ctx.multiply_grouped(forward_pass.grouped[index], x, ids)


def _experts_shape(
    x: torch.Tensor, ids: torch.Tensor, index: int, num_columns: int
) -> torch.Tensor:
    return x.new_empty((ids.shape[0] * ids.shape[1], num_columns))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    forward_pass = _current[-1]
    return store_and_attend(q, k, v, forward_pass.ctx, layer, forward_pass.variants[layer])


def _attend_shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    return q.new_empty(q.shape)


_library = torch.library.Library("setpoint", "DEF")
for _signature, _run, _shape in (
    ("linear(Tensor x, int index, int num_columns) -> Tensor", _linear, _linear_shape),
    (
        "experts(Tensor x, Tensor ids, int index, int num_columns) -> Tensor",
        _experts,
        _experts_shape,
    ),
    ("attend(Tensor q, Tensor k, Tensor v, int layer) -> Tensor", _attend, _attend_shape),
):
    _name = _library.define(_signature)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"setpoint::{_name}", _shape, lib=_library)


class TracedOps(RefOps):
    """The reference operations, for traced code. The rotated tensors are passed on to
    ``TracedAttention``, which stores them."""

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
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """Returns [T, H + 2 Hkv, D]: rotated q, rotated k, v. Stores nothing."""
        return torch.cat((*self.rotate(q, k, cos_sin, positions), v), dim=1)


class TracedAttention:
    """Replaces an ``AttentionBackend`` in traced code, together with ``TracedOps``. Its ``q`` is
    the output of ``TracedOps.rope_and_store``, and its ``k_cache`` the layer's number."""

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
