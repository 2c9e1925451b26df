"""The context that the layers of a forward pass need besides activations: the operations that
compute, and the tables and caches that are read and written. It is passed explicitly to each
layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from setpoint.engine.attention.attention_backend import AttentionBackend, AttentionBatch
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.parallel.data_ranks import DataRanks
from setpoint.engine.parallel.group import Group
from setpoint.engine.quant.grouped import GroupedWeight
from setpoint.engine.quant.linear_method import InvariantProduct, PackedWeight


@dataclass(slots=True, frozen=True)
class Backends:
    """The operations that compute a forward pass. Layers compute with nothing else, so another way
    to run them (timed, traced) only needs another ``Backends``; the model stays the same."""

    ops: Ops
    attention: AttentionBackend
    multiply: Callable[[PackedWeight, torch.Tensor], torch.Tensor]
    """(weight, x [T, K], contiguous) -> [T, N], the same as calling the weight."""
    multiply_grouped: Callable[[GroupedWeight, torch.Tensor, torch.Tensor], torch.Tensor]
    """(weights of experts, x, ids), the same as calling the weights."""
    group: Group
    """The ranks that compute the model together."""
    data: DataRanks
    """The engines that compute its experts together; with DP attention, more than ``group``."""


def multiply(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    """The ``Backends.multiply`` that simply calls the weight."""
    return weight(x)


def multiply_grouped(weight: GroupedWeight, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The ``Backends.multiply_grouped`` that simply calls the weights."""
    return weight(x, ids)


def multiply_invariant(weight: InvariantProduct, x: torch.Tensor) -> torch.Tensor:
    """The ``Backends.multiply`` that gives a row the same bits in every batch on a GPU."""
    return weight.invariant(x)


def multiply_grouped_invariant(
    weight: InvariantProduct, x: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The ``Backends.multiply_grouped`` that gives a row the same bits in every batch on a GPU."""
    return weight.invariant(x, ids)


@dataclass(slots=True, frozen=True)
class ForwardContext(Backends):
    """Written by the runner for each forward pass. Layers only read it."""

    batches: tuple[AttentionBatch, ...]
    """For each layer, the rows with the pages of its cache group. Layers of a group share one
    object, and all layers share the positions."""
    cos_sin: tuple[torch.Tensor, ...]
    """The table of each of the model's rotary embeddings, [context_len, R], with R <= D rotated
    dimensions (layers.rotary)."""
    kv: tuple[tuple[torch.Tensor, ...], ...]
    """For each layer, the caches of its parts (``ModelSpec.cache_parts``), K and V for most,
    [num_pages + 1, page_size, heads, size]."""
