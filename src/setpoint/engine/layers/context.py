"""What the layers of one forward pass need besides activations; passed explicitly from the runner
down to each layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from setpoint.engine.attention.base import AttentionBackend, AttentionBatch
from setpoint.engine.kernels.ops import Ops


@dataclass(slots=True, frozen=True)
class ForwardContext:
    """Written by the runner for each forward pass; layers only read it."""

    ops: Ops
    attention: AttentionBackend
    batch: AttentionBatch
    cos_sin: tuple[torch.Tensor, ...]
    """Per rotary embedding of the model its table, [context_len, R], R <= D rotated dimensions
    (layers.rotary)."""
    kv: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Per layer the K and the V cache, [num_pages + 1, page_size, Hkv, D]."""
