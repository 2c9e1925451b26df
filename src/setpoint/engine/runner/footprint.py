"""What the temporaries of a step take, found out without running it: the forward pass is recorded,
and what it allocates is counted."""

from __future__ import annotations

import numpy as np
import torch

from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.kernels.registry import make_recorder
from setpoint.engine.layers.context import Backends
from setpoint.engine.runner.forward_pass import ForwardPass, Inputs


def activation_bytes(forward_pass: ForwardPass, backends: Backends, num_tokens: int) -> int | None:
    """The most that lives at the same moment of a step of ``num_tokens`` tokens, without logits;
    None where nothing can be recorded."""
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
