"""Ranks that reach each other through torch.distributed: gloo between the CPUs of several machines,
NCCL between GPUs.

Its exchanges are torch's own. Those of NCCL run on a stream of the device and can be part of a
graph (``kernels.graphs``); those of gloo run on the host, so steps with them run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode

from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.parallel.group import GroupLost, Span

BYTES = torch.uint8
"""What moves: a backend need not know the dtype of what it copies."""


def gloo_processes(
    store: dist.Store, rank: int, size: int, *, host: str, timeout_s: float
) -> dist.ProcessGroup:
    """The ranks, connected by gloo. host: this process's address, as the other ranks reach it.
    Raises RuntimeError if they have not met within ``timeout_s``."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    # Without an address, gloo takes the one of the host name, which may be that of the loopback.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_processes(
    store: dist.Store, rank: int, size: int, *, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """The ranks, connected by NCCL; each has a GPU of its own. They are connected when this
    returns, because the device is known: an exchange of a captured step must not be the first one.
    Raises RuntimeError if they have not met within ``timeout_s``, or if this torch has no NCCL."""
    if not dist.is_nccl_available():
        raise RuntimeError(f"torch {torch.__version__} has no NCCL, through which GPUs exchange")
    dist.init_process_group(
        "nccl",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )
    return dist.group.WORLD


class DistributedGroup:
    """Implements ``parallel.group.Group``."""

    def __init__(self, processes: dist.ProcessGroup, *, sums: bool, is_capturable: bool) -> None:
        """is_capturable: whether exchanges run on a stream of the device."""
        self.rank: int = processes.rank()
        self.size: int = processes.size()
        self.sums = sums
        self._is_capturable = is_capturable
        self.before_logits: Callable[[torch.Tensor], None]
        """Written by the executor of rank 0."""
        self._processes = processes

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        found = self._parts(x, widths)
        sent = _widened(x, max(widths))
        self._exchange(self._processes.allgather, [_bytes(found)], [sent.view(BYTES)])
        return _side_by_side(found, widths)

    def gather_logits(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        gets = self.rank == 0
        found, sent = self._parts(x, widths), _widened(x, max(widths))
        to_first = dist.GatherOptions()
        to_first.rootRank = 0
        received = [_bytes(found)] if gets else []
        self._exchange(self._processes.gather, received, [sent.view(BYTES)], to_first)
        return _side_by_side(found, widths) if gets else x

    def numbers(self, own: int, device: torch.device) -> list[int]:
        said = torch.full((1, 1), own, dtype=torch.int32, device=device)
        (found,) = self.gather(said, [1] * self.size).tolist()
        return list(found)

    def own_ids(self, ids: torch.Tensor, own: Span) -> torch.Tensor:
        self._refuse_capture()
        places = ids - own[0]
        return places.masked_fill_(_is_other(ids, own), 0)

    def gather_rows(self, x: torch.Tensor, ids: torch.Tensor, own: Span) -> torch.Tensor:
        # One rank has each row, and the others add zeros to its bytes: no bit changes.
        return self._sum(x.masked_fill(_is_other(ids, own)[:, None], 0), BYTES)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        assert self.sums
        return self._sum(x, x.dtype)

    def _sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Replaces x by the sum over the ranks of its elements, read as ``dtype``."""
        self._exchange(self._processes.allreduce, [x.view(dtype)])
        return x

    def _parts(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """Memory for what each rank sends; all send the same number of bytes."""
        assert x.shape[1] == widths[self.rank]
        return [x.new_empty(len(x), max(widths)) for _ in widths]

    def _exchange(self, start: Callable[..., Any], *what: object) -> None:
        self._refuse_capture()
        try:
            start(*what).wait()
        except RuntimeError as error:
            raise GroupLost(str(error).partition("\n")[0]) from error

    def _refuse_capture(self) -> None:
        # The mode of this thread: torch's is_in_torch_dispatch_mode() tells that of any.
        if not self._is_capturable and _get_current_dispatch_mode() is not None:
            raise NotCapturable("exchanges through torch.distributed cannot be captured")


def _is_other(ids: torch.Tensor, own: Span) -> torch.Tensor:
    """Whether each id is not in ``own``."""
    return (ids < own[0]) | (ids >= own[1])


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [T, W] with undefined columns added: [T, width]."""
    if x.shape[1] == width:
        return x
    wide = x.new_empty(len(x), width)
    wide[:, : x.shape[1]] = x
    return wide


def _bytes(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.view(BYTES) for part in parts]


def _side_by_side(parts: Sequence[torch.Tensor], widths: Sequence[int]) -> torch.Tensor:
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
