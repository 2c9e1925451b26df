"""RMS normalisation, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import nn

from setpoint.engine.kernels.ops import Ops
from setpoint.engine.layers.module import Layer


class RMSNorm(Layer):
    """x [T, C] (or heads [T, H, C], without a residual) and the residual stream (None at the first
    layer) -> (normalised, new residual).

    ``offset`` is added to the weight; it is 1 if the checkpoint stores weight - 1. It is not added
    when the weight is loaded, because that would round the sum.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ops: Ops
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps, self.offset), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps, self.offset)
