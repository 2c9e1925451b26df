"""Token embedding."""

from __future__ import annotations

import torch
from torch import nn

from setpoint.engine.kernels.ops import Ops
from setpoint.engine.layers.base import Layer


class Embedding(Layer):
    """ids [T] -> [T, C], times ``scale`` (rounded as ``Ops.embedding`` says, which is what transformers does)."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, ids: torch.Tensor, ops: Ops) -> torch.Tensor:
        return ops.embedding(ids, self.weight, self.scale)
