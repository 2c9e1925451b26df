"""Copies through pinned blocks: no block is written while the device may still copy it, and nothing
takes memory of the host but the ring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import OutOfMemoryError
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.kernels.pinned_ring import WeightCopies
from setpoint.engine.models import loader, weight_sources
from setpoint_testing.late_copies import pretend_late
from setpoint_testing.live_bytes import LiveBytes
from setpoint_testing.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
SOURCES = {
    "rows": torch.randn(100, 16),
    "numbers": torch.randn(1000),
    "one block": torch.randn(16, 16),
    "columns of a matrix": torch.randn(100, 40)[:, 5:21],
    "none": torch.randn(0, 16),
    "narrow": torch.randn(33, 16).bfloat16(),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_is_what_was_sent(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = pretend_late(monkeypatch, 1024)
    source, copies = SOURCES[kind], WeightCopies(CPU)
    expected = source.to(dtype)
    to = torch.zeros(source.shape, dtype=dtype)
    copies.fill(to, source)
    device.wait(device.mark())
    assert torch.equal(to, expected)
    assert sum(device.copied) == expected.nbytes
    assert all(size <= 1024 for size in device.copied)
    assert device.pinned == [1024, 1024]


def test_the_host_is_one_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits only for a block that it needs again."""
    device = pretend_late(monkeypatch, 1024)
    WeightCopies(CPU).fill(torch.zeros(2, 256), torch.randn(2, 256))
    assert (device.num_waits, len(device.queue)) == (0, 2)
    WeightCopies(CPU).fill(torch.zeros(5, 256), torch.randn(5, 256))
    assert device.num_waits == 3


def test_a_folder_is_loaded_through_the_ring_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes beside the weights is less than a matrix."""
    folder = write_tiny_llama(tmp_path, vocab_size=4096, hidden_size=64)
    config = EngineConfig(str(folder), read_spec(folder), dtype="float32", num_threads=1)
    plain = dict(build_runner(config).model.named_parameters())
    device = pretend_late(monkeypatch, 16 << 10)
    check = weight_sources.check_finite
    peaks = []

    def checks(weights: torch.Tensor, *args: object) -> None:
        device.wait(device.mark())  # reading a value waits for the device
        check(weights, *args)

    fill = WeightCopies.fill

    def fills(self: WeightCopies, *args: torch.Tensor) -> None:
        with LiveBytes() as live:  # what is read is a view of the mapped file
            fill(self, *args)
        peaks.append(live.peak)

    monkeypatch.setattr(weight_sources, "check_finite", checks)
    monkeypatch.setattr(WeightCopies, "fill", fills)
    sent = dict(build_runner(config).model.named_parameters())
    assert sent.keys() == plain.keys()
    assert all(torch.equal(sent[name], plain[name]) for name in plain)
    largest = 4 * 4096 * 64
    assert sum(device.copied) >= 2 * largest, "embedding and head"
    assert device.pinned == [16 << 10] * 2, "one ring for the whole model"
    assert max(peaks) < largest / 8


def test_weights_that_do_not_fit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_llama(tmp_path)

    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full"
        )

    monkeypatch.setattr(loader, "_fill", fill)
    with pytest.raises(OutOfMemoryError, match=r"allocate 2.00 GiB. GPU 0 is full. Free memory or"):
        build_runner(EngineConfig(str(folder), read_spec(folder), num_threads=1))
