"""Token embedding."""

from __future__ import annotations

import torch
from torch import nn

from setpoint.engine.layers.base import Layer


class Embedding(Layer):
    """ids [T] -> [T, C], times ``scale``, which is rounded to fp32 and then to the weight's dtype, as transformers does."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.weight[ids]
        return x if self.scale == 1.0 else x.mul_(torch.tensor(self.scale, dtype=torch.float32).to(x.dtype))
