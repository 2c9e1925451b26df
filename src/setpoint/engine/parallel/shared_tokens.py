"""Engines on one machine that exchange the tokens of their steps through shared memory: the kernels
of ranks.cpp."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

from setpoint.engine.kernels.cpu.calls import GatherTokensCall, OwnTokensCall
from setpoint.engine.kernels.cpu.rank_memory import SharedMemoryGroup
from setpoint.engine.parallel.group import GroupLost


class SharedMemoryDataRanks:
    """Implements ``parallel.data_ranks.DataRanks``. Its kernels can be captured."""

    def __init__(
        self, memory: mmap.mmap, rank: int, size: int, wake: Callable[[], None] = lambda: None
    ) -> None:
        """memory: as for SharedMemoryGroup. wake: has the other ranks look at ``is_awaited``."""
        self.size = size
        self.experts = SharedMemoryGroup(memory, rank, size)
        self._wake = wake
        self._kernels, self._ranks = self.experts.kernels, self.experts.ranks
        self._total = ctypes.c_int64()
        """G."""
        self._gather = GatherTokensCall(ranks=self._ranks)
        self._gather_address = ctypes.addressof(self._gather)
        self._own = OwnTokensCall(ranks=self._ranks)
        self._own_address = ctypes.addressof(self._own)

    def begin(self, num_tokens: int) -> None:
        self._kernels.ranks_announce(self._ranks, num_tokens)
        self._wake()
        gone = self._kernels.ranks_meet(self._ranks, ctypes.addressof(self._total))
        if gone >= 0:
            raise GroupLost(f"engine {gone} has ended")

    @property
    def is_awaited(self) -> bool:
        return bool(self._kernels.ranks_is_awaited(self._ranks))

    def leave(self) -> None:
        """Say that this rank begins no more steps."""
        self._kernels.ranks_leave(self._ranks)
        self._wake()

    def num_gathered(self, num_tokens: int) -> int:
        return num_tokens * self.size if self._kernels.is_recorded else self._total.value

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        out = torch.empty((self.num_gathered(len(x)), x.shape[1]), dtype=x.dtype)
        call = self._gather
        call.x, call.out, call.rows = x.data_ptr(), out.data_ptr(), len(out)
        call.row_bytes = x.shape[1] * x.element_size()
        call.threads = torch.get_num_threads()
        self._kernels.gather_tokens(self._gather_address)
        return out

    def own(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        assert x.is_contiguous()
        out = torch.empty((num_tokens, x.shape[1]), dtype=x.dtype)
        call = self._own
        call.x, call.out, call.rows = x.data_ptr(), out.data_ptr(), len(out)
        call.row_bytes = x.shape[1] * x.element_size()
        call.threads = torch.get_num_threads()
        self._kernels.own_tokens(self._own_address)
        return out
