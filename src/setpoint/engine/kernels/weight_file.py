"""Keeps a model's weights, in the form in which they are multiplied, in a file that is mapped into
memory, so that they can leave the memory and come back without being read and packed again
(decision 0081).

The file has no name, so nobody can cut or change it, and it is gone with the process. Its pages are
in the system's page cache: while the weights are away, the system may take them for other things,
and reads them from the disk again when they come back. The addresses of the weights stay the same.
Knows nothing of models: it keeps what ``host_memory`` has mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from torch import nn

from setpoint.core.errors import OutOfMemoryError
from setpoint.engine.kernels.host_memory import HUGE_PAGE, Noted, advise, in_huge_pages

WRITE_BYTES = 1 << 26
"""Bytes to write at a time."""
MADV_POPULATE_READ = 22
"""The value of linux/mman.h; Python's mmap does not have it."""
MAP_FIXED = 0x10
"""The value of asm-generic/mman-common.h."""
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)


class WeightFile:
    """The weights of one model. They cannot be written, and can be read at any time."""

    def __init__(self, folder: Path, model: nn.Module, noted: Noted) -> None:
        """folder: has the file on its disk. noted: the mappings that were made while the model was
        loaded; they must still be noted. Raises OutOfMemoryError if the disk has no room."""
        # What has been packed lies in these mappings already, and kernels know its addresses, like
        # those of biases, which stay. What is left are matrices that are used as they are.
        for name, parameter in model.named_parameters():
            is_matrix = name.endswith("weight") and parameter.dim() > 1
            if is_matrix and not _is_in(noted, parameter.data_ptr()):
                memory = in_huge_pages(tuple(parameter.shape), parameter.dtype)
                parameter.data = memory.copy_(parameter.data)
        self._memory = [memory for memory, _ in noted]
        self._ranges = [(each.address, _whole(each.free - each.begin)) for _, each in noted]
        size = sum(num_bytes for _, num_bytes in self._ranges)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._put(folder, size)
        except OSError as error:
            raise OutOfMemoryError(
                f"A copy of the weights ({size >> 20} MiB) cannot be written to {folder}:"
                f" {error.strerror}. Free room on that disk, or set XDG_CACHE_HOME to a folder on"
                " another one."
            ) from None

    def _put(self, folder: Path, size: int) -> None:
        """Write the weights to the file, and map it in their place."""
        with tempfile.TemporaryFile(dir=folder) as file:  # the mappings keep it
            descriptor = file.fileno()
            os.posix_fallocate(descriptor, 0, max(size, 1))
            begin = 0
            for address, num_bytes in self._ranges:
                content = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
                done = 0
                while done < num_bytes:
                    piece = content[done : done + WRITE_BYTES]
                    done += os.pwrite(descriptor, piece, begin + done)
                how = mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, descriptor, begin
                if _libc.mmap(address, num_bytes, *how) == FAILED:
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number))
                begin += num_bytes

    def let_go(self) -> None:
        """Give the memory of the weights back. What is in the page cache stays there as long as
        nothing else needs the room."""
        for address, num_bytes in self._ranges:
            advise(address, num_bytes, mmap.MADV_DONTNEED)

    def take(self) -> None:
        """Have the weights in memory again, from the page cache or from the disk."""
        for address, num_bytes in self._ranges:
            with suppress(OSError):  # older than Linux 5.14: the first step takes them
                advise(address, num_bytes, MADV_POPULATE_READ)


def _whole(num_bytes: int) -> int:
    """The bytes of the huge pages that hold so many bytes."""
    return -(-num_bytes // HUGE_PAGE) * HUGE_PAGE


def _is_in(noted: Noted, address: int) -> bool:
    return any(each.address <= address < each.address + each.free - each.begin for _, each in noted)
