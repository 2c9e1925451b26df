"""Linear layers on the unchanged weight: torch's own product, for every device and dtype."""

from __future__ import annotations

import torch


class PlainWeight:
    """Implements ``quant.linear_method.PackedWeight``; keeps the tensors that it is given."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def invariant(self, x: torch.Tensor) -> torch.Tensor:
        """See ``quant.linear_method.InvariantProduct``."""
        from setpoint.engine.kernels.triton.grouped import multiply_pairs

        weights = self.weight.unsqueeze(0)
        return multiply_pairs(x, weights, None, dtype=x.dtype, biases=self.bias, fixed=True)


class PlainLinear:
    """Implements ``quant.linear_method.LinearMethod``."""

    copies = False

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PlainWeight:
        return PlainWeight(weight, bias)


def create(dtype: torch.dtype) -> PlainLinear:
    """The plain method, which runs everywhere."""
    return PlainLinear()
