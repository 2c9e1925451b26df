"""RMS normalisation, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import nn

from setpoint.engine.kernels.ops import Ops
from setpoint.engine.layers.base import Layer


class RMSNorm(Layer):
    """x [T, C] and the residual stream (None at the first layer) -> (normalised, new residual)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
