"""Token embedding."""

from __future__ import annotations

import torch
from torch import nn

from setpoint.engine.layers.base import Layer


class Embedding(Layer):
    """ids [T] -> [T, C]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]
