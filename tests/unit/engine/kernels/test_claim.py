"""The memory of the KV pool."""

from __future__ import annotations

import psutil
import torch

from setpoint.engine.kernels.device import claim, claims_later


def test_a_pool_on_a_cpu_takes_memory_when_it_is_written() -> None:
    """What the log of a start says of it."""
    device, process = torch.device("cpu"), psutil.Process()
    assert claims_later(device)
    before = process.memory_info().rss
    pool = claim((2 << 30,), torch.uint8, device)
    assert process.memory_info().rss - before < 256 << 20
    pool[: 64 << 20].fill_(1)
    assert 64 << 20 <= process.memory_info().rss - before < 512 << 20
