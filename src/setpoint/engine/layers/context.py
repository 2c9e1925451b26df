"""What the layers of one forward pass need besides activations: what computes, and what is read and
written. Passed explicitly from the runner down to each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from setpoint.engine.attention.base import AttentionBackend, AttentionBatch
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.quant.base import PackedWeight


@dataclass(slots=True, frozen=True)
class Backends:
    """What computes a forward pass. Layers compute through nothing else, so another way to run them
    (timed, traced) is another ``Backends``, and the model stays as it is."""

    ops: Ops
    attention: AttentionBackend
    multiply: Callable[[PackedWeight, torch.Tensor], torch.Tensor]
    """As calling the weight: x [T, K], contiguous -> [T, N]."""


def multiply(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    """``Backends.multiply`` by the weight itself."""
    return weight(x)


@dataclass(slots=True, frozen=True)
class ForwardContext(Backends):
    """Written by the runner for each forward pass; layers only read it."""

    batches: tuple[AttentionBatch, ...]
    """Per layer the rows on the pages of its cache group; layers of a group share one object, and
    all share the positions."""
    cos_sin: tuple[torch.Tensor, ...]
    """Per rotary embedding of the model its table, [context_len, R], R <= D rotated dimensions
    (layers.rotary)."""
    kv: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Per layer the K and the V cache, [num_pages + 1, page_size, Hkv, D]."""
