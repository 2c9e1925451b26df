"""Measures the memory of a step's temporaries. On a CPU the forward pass is recorded, without
running it, and its allocations are counted; on a device with an allocator that counts, it runs."""

from __future__ import annotations

import numpy as np
import torch

from setpoint.core.errors import OutOfMemoryError
from setpoint.engine.kernels.device import lack_of, peak_bytes
from setpoint.engine.kernels.kernel_registry import make_recorder
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.layers.context import Backends
from setpoint.engine.runner.batch import NO_ROWS
from setpoint.engine.runner.forward_pass import ForwardPass, Inputs


def activation_bytes(forward_pass: ForwardPass, backends: Backends, num_tokens: int) -> int | None:
    """The peak size in bytes of the temporaries of a step of ``num_tokens`` tokens, without logits;
    None if a step cannot be recorded, or if other ranks would have to run it too. Raises
    OutOfMemoryError if a device has too little memory for it."""
    if forward_pass.block is not None:
        is_alone = backends.group.size == backends.data.size == 1
        return _run(forward_pass, backends, num_tokens) if is_alone else None
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


def _run(forward_pass: ForwardPass, backends: Backends, num_tokens: int) -> int:
    """Run a step on the device whose tokens are no row's, so that they are written nowhere, as
    when a graph is captured (``runner.graph_way``)."""
    forward_pass.send(NO_ROWS, 1)
    rows, host = forward_pass.block.rows, np.zeros(2, np.int32)
    inputs = Inputs(num_tokens, rows.slots[:1], rows.cu_q[:2], rows.kv_lens[:1], host, host[1:])
    try:
        return peak_bytes(forward_pass.device, lambda: forward_pass.hidden(inputs, backends))
    except torch.OutOfMemoryError as error:
        lack = lack_of(error, forward_pass.device)
    raise OutOfMemoryError(
        f"The device has too little memory for a step of {num_tokens} tokens beside the weights:"
        f" {lack.why}. Lower --chunked-prefill-size, or use a smaller model."
    )
