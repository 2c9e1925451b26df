"""Host memory: huge pages for what is written once and read in every step, and pages that are
claimed before they are written.

A step reads nearly all of the weights, in order. With pages of 4 KiB a processor spends a good part
of that time on looking up addresses (docs/notebook.md). So the memory of weights and of captured
steps asks for huge pages, which Linux gives only to whole, aligned ranges. The KV pool's memory
does not: it is first written while requests wait, and where a hypervisor has to find the memory, a
first write costs more the larger the page is. Knows nothing of what is kept in the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

HUGE_PAGE = 1 << 21
"""Bytes of a huge page on x86-64, and on aarch64 with its usual pages."""
PIECE = 1 << 26
"""Least bytes of a mapping, which may hold several tensors, one after another."""
ALIGNMENT = 64
MADV_POPULATE_WRITE = 23
"""The value of linux/mman.h; Python's mmap does not have it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Linux's setting for huge pages: always, madvise or never; the one in brackets is in force."""


@dataclass(slots=True)
class Mapping:
    """Whole huge pages, which hold tensors one after another."""

    memory: weakref.ref[mmap.mmap]
    """Freed with the last tensor in it."""
    begin: int
    """Where the huge pages begin in it."""
    free: int
    """Where nothing has been put yet. Written by ``in_huge_pages``."""
    end: int

    @property
    def address(self) -> int:
        """The address of ``begin``."""
        return torch.frombuffer(self.memory(), dtype=torch.uint8).data_ptr() + self.begin


Noted = list[tuple[mmap.mmap, Mapping]]

_newest: Mapping | None = None
_noted: Noted | None = None
"""Where ``noted_mappings`` notes every new mapping, which then stays."""


def in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in memory that asks for huge pages and is claimed as it is written.
    Raises RuntimeError if there is not enough."""
    global _newest
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = None if _newest is None else _newest.memory()
    if memory is None or _newest.end - _newest.free < num_bytes:
        memory, begin, end = _map(max(PIECE, num_bytes))
        _newest = Mapping(weakref.ref(memory), begin, begin, end)
        if _noted is not None:
            _noted.append((memory, _newest))
    begin = _newest.free
    _newest.free += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return (
        torch.frombuffer(memory, dtype=torch.uint8)[begin : begin + num_bytes]
        .view(dtype)
        .view(shape)
    )


@contextlib.contextmanager
def noted_mappings() -> Iterator[Noted]:
    """The mappings of the tensors that are made ``in_huge_pages`` within the block, and of no
    others."""
    global _newest, _noted
    _newest, _noted = None, []
    try:
        yield _noted
    finally:
        _newest = _noted = None


def why_small_pages() -> str:
    """Why this system gives no huge pages; empty if it does."""
    try:
        switch = SWITCH.read_text().strip()
    except OSError as error:
        return f"this system has no transparent huge pages: {error}"
    return (
        f"transparent huge pages are switched off: {SWITCH} says {switch}"
        if "[never]" in switch
        else ""
    )


def _map(num_bytes: int) -> tuple[mmap.mmap, int, int]:
    """(new mapping, begin and end of the whole huge pages in it, which hold ``num_bytes``)."""
    size = math.ceil(num_bytes / HUGE_PAGE) * HUGE_PAGE
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"cannot get {num_bytes} bytes of memory: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without huge pages, small ones are only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    return memory, begin, begin + size


def give_back_heap() -> None:
    """Give the free pages of the C library's heap back to the system; only glibc can."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def populate(memory: torch.Tensor) -> None:
    """Claim the pages of this host memory now, so that nobody waits for them at the first write;
    the content stays. Raises OSError if that is impossible: no memory is left, Linux is older than
    5.14, or a sandbox forbids it."""
    begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    advise(begin, memory.data_ptr() + memory.nbytes - begin, MADV_POPULATE_WRITE)


def let_go(memory: torch.Tensor) -> None:
    """Give the pages of this host memory back, except those that it shares with other memory. The
    content is lost; what is written next claims pages again."""
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        advise(begin, end - begin, mmap.MADV_DONTNEED)


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Linux's ``madvise`` for whole pages from an address on. Raises OSError."""
    if _libc.madvise(address, num_bytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
