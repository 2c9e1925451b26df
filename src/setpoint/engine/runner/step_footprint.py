"""Measures the memory of a step's temporaries without running it: the forward pass is recorded, and
its allocations are counted."""

from __future__ import annotations

import numpy as np
import torch

from setpoint.engine.kernels.kernel_registry import make_recorder
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.layers.context import Backends
from setpoint.engine.runner.forward_pass import ForwardPass, Inputs


def activation_bytes(forward_pass: ForwardPass, backends: Backends, num_tokens: int) -> int | None:
    """The peak size in bytes of the temporaries of a step of ``num_tokens`` tokens, without logits;
    None on a device that cannot record a step."""
    host = np.zeros(num_tokens + 1, np.int32)
    slots, cu_q = (
        torch.zeros(length, dtype=torch.int32, device=forward_pass.device)
        for length in (num_tokens, num_tokens + 1)
    )
    inputs = Inputs(num_tokens, slots, cu_q, slots, host, host[1:])
    try:
        recorder = make_recorder(forward_pass.device)
        with recorder.recording():
            forward_pass.hidden(inputs, backends)
    except (NotCapturable, KernelsUnavailable):
        return None
    return recorder.peak_bytes
