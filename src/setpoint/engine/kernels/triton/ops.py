"""The factory of the operations in Triton, which are imported only where they can run."""

from __future__ import annotations

import torch

from setpoint.engine.kernels.ops import Ops
from setpoint.engine.kernels.triton.availability import require_triton


def create(dtype: torch.dtype) -> Ops:
    """The operations. Raises KernelsUnavailable with the reason if they cannot run."""
    require_triton(dtype)
    from setpoint.engine.kernels.triton.triton_ops import TritonOps

    return TritonOps()
