"""A device on CPU tensors whose copies through pinned blocks happen as late as they may: when
somebody waits for a mark after them, or at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from setpoint.engine.kernels import pinned_ring
from setpoint.engine.runner import page_copies, page_rows


class LateDevice:
    """What was enqueued and not done yet. A copy whose source is written before it is done, or
    whose target is read before, gives wrong bytes."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.num_done = 0
        self.num_waits = 0
        self.num_turns = 0
        self.copied: list[int] = []
        """Bytes of each copy."""
        self.pinned: list[int] = []
        """Bytes of each block."""

    def later(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def mark(self) -> int:
        return self.num_done + len(self.queue)

    def wait(self, mark: int) -> None:
        self.num_waits += 1
        while self.num_done < mark:
            self.queue.pop(0)()
            self.num_done += 1

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copied.append(source.nbytes)
        self.later(lambda: to.copy_(source))

    def pin(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.pinned.append(tensor.nbytes)
        return tensor

    @contextlib.contextmanager
    def beside(self, *_: object) -> Iterator[None]:
        self.num_turns += 1
        yield


def pretend_late(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> LateDevice:
    """Take the CPU for a device whose copies are late."""
    device = LateDevice()
    for module in (pinned_ring, page_copies):
        monkeypatch.setattr(module, "wait", device.wait)
        monkeypatch.setattr(module, "copy_later", device.copy)
    monkeypatch.setattr(pinned_ring, "marker", lambda _: device.mark)
    monkeypatch.setattr(pinned_ring, "pinned", device.pin)
    monkeypatch.setattr(pinned_ring, "reading_is_free", lambda _: False)
    monkeypatch.setattr(page_rows, "reading_is_free", lambda _: False)
    monkeypatch.setattr(page_copies, "side_stream", lambda _: None)
    monkeypatch.setattr(page_copies, "beside_steps", device.beside)
    ring = pinned_ring.PinnedRing.__init__
    monkeypatch.setattr(
        pinned_ring.PinnedRing, "__init__", lambda self, on, *_: ring(self, on, block_bytes)
    )
    index_copy = torch.Tensor.index_copy_

    def copies(self: torch.Tensor, *args: Any) -> torch.Tensor:
        device.later(lambda: index_copy(self, *args))
        return self

    monkeypatch.setattr(torch.Tensor, "index_copy_", copies)
    return device
