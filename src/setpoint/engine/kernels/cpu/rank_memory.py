"""Ranks on one machine that share memory: the kernels of ranks.cpp."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch

from setpoint.engine.kernels.cpu.calls import GatherCall, GatherRowsCall, OwnIdsCall
from setpoint.engine.kernels.cpu.library import Kernels, load


class SharedMemoryGroup:
    """Implements ``parallel.group.Group``. Its kernels can be captured."""

    sums = False

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        """memory: zeros at first, mapped by all ranks. Exchanges that need more than half of it are
        made in several parts."""
        self.rank = rank
        self.size = size
        self.before_logits: Callable[[torch.Tensor], None]
        """Written by the executor of rank 0."""
        self.kernels: Kernels = load()
        self._memory = np.frombuffer(memory, np.uint8)
        self.ranks: int = self.kernels.ranks_create(
            self._memory.ctypes.data, len(self._memory), rank, size
        )
        """Address of the kernels' view of it."""
        self._begins: dict[tuple[int, ...], ctypes.Array[ctypes.c_int64]] = {}
        """Widths -> the first column of each rank, and their number. Recorded steps point to
        them."""
        self._gather = GatherCall(ranks=self.ranks)
        self._gather_address = ctypes.addressof(self._gather)
        self._gather_rows = GatherRowsCall(ranks=self.ranks)
        self._gather_rows_address = ctypes.addressof(self._gather_rows)
        self._own_ids = OwnIdsCall()
        self._own_ids_address = ctypes.addressof(self._own_ids)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return self._gathered(x, tuple(widths), first_only=False)

    def gather_logits(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return self._gathered(x, tuple(widths), first_only=True)

    def numbers(self, own: int, device: torch.device) -> list[int]:
        said = torch.full((1, 1), own, dtype=torch.int32, device=device)
        (found,) = self.gather(said, [1] * self.size).tolist()
        return list(found)

    def own_ids(self, ids: torch.Tensor, own: tuple[int, int]) -> torch.Tensor:
        assert ids.dtype == torch.int32
        assert ids.is_contiguous()
        out = torch.empty_like(ids)
        call = self._own_ids
        call.ids, call.out, call.rows = ids.data_ptr(), out.data_ptr(), len(ids)
        call.first, call.count = own[0], own[1] - own[0]
        self.kernels.own_ids(self._own_ids_address)
        return out

    def gather_rows(self, x: torch.Tensor, ids: torch.Tensor, own: tuple[int, int]) -> torch.Tensor:
        assert x.is_contiguous()
        assert ids.dtype == torch.int32
        out = torch.empty_like(x)
        call = self._gather_rows
        call.ids, call.x, call.out = ids.data_ptr(), x.data_ptr(), out.data_ptr()
        call.rows, call.row_bytes = len(x), x.shape[1] * x.element_size()
        call.first, call.count = own[0], own[1] - own[0]
        call.threads = torch.get_num_threads()
        self.kernels.gather_rows(self._gather_rows_address)
        return out

    def add(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("ranks that share memory do not add")

    def _gathered(
        self, x: torch.Tensor, widths: tuple[int, ...], *, first_only: bool
    ) -> torch.Tensor:
        assert x.is_contiguous()
        assert x.shape[1] == widths[self.rank]
        begins = self._begins.get(widths)
        if begins is None:
            ends = np.concatenate(([0], np.cumsum(widths))).tolist()
            begins = self._begins[widths] = (ctypes.c_int64 * len(ends))(*ends)
        gets = self.rank == 0 or not first_only
        out = torch.empty((len(x), sum(widths)), dtype=x.dtype) if gets else x
        call = self._gather
        call.x, call.out, call.rows = x.data_ptr(), out.data_ptr(), len(x)
        call.begins = ctypes.addressof(begins)
        call.element_bytes, call.first_only = x.element_size(), first_only
        call.threads = torch.get_num_threads()
        self.kernels.gather(self._gather_address)
        return out
