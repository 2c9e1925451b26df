"""The buffers of a connection, equal in size. The side that sends keys and values owns them; on one
machine both sides map the same memory."""

from __future__ import annotations

import mmap
import os
import stat
from fcntl import fcntl
from pathlib import Path

from setpoint.core.handshake import SIZE, new_bytes
from setpoint.handover.frames import HandoverError, SharedSegments

SEGMENT_BYTES = 8 << 20
"""Size of a segment, unless a page row is larger."""
NUM_SEGMENTS = 4
MEMORY_NAME = "setpoint-handover"
MARK_BYTES = mmap.PAGESIZE
"""Shared memory begins with a page that holds its mark."""
_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK | F_SEAL_GROW
_ADD_SEALS, _GET_SEALS = 1033, 1034


def machine_name() -> str:
    """Names this machine since its start, "" if the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def segment_size(row_bytes: int) -> int:
    """Bytes of a segment: whole page rows. Each side computes it and does not ask the other."""
    return max(SEGMENT_BYTES // row_bytes, 1) * row_bytes


class Segments:
    """``num`` views of ``size`` bytes each."""

    def __init__(self, memory: memoryview, offset: int, size: int, num: int) -> None:
        self.size = size
        self.views = [
            memory[offset + index * size : offset + (index + 1) * size] for index in range(num)
        ]

    @classmethod
    def own(cls, size: int, num: int) -> Segments:
        """Memory of this process alone."""
        return cls(memoryview(mmap.mmap(-1, size * num)), 0, size, num)


class OwnedShare:
    """Shared segments of the side that makes them. The memory has no name, so nothing is left of
    it when the processes end. Its size is sealed, so that the peer can rely on it."""

    def __init__(self, size: int, num: int) -> None:
        """Raises OSError if the system has no such memory."""
        self.descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, MARK_BYTES + size * num)
            fcntl(self.descriptor, _ADD_SEALS, _SEALS)
            memory = mmap.mmap(self.descriptor, MARK_BYTES + size * num)
        except OSError:
            os.close(self.descriptor)
            raise
        mark = new_bytes()
        memory[:SIZE] = mark
        self.segments = Segments(memoryview(memory), MARK_BYTES, size, num)
        self.invitation = SharedSegments(machine_name(), os.getpid(), self.descriptor, mark)

    def close(self) -> None:
        """No further process can map the memory. It is freed when nobody uses a view any more."""
        os.close(self.descriptor)


def map_shared(found: SharedSegments, size: int, num: int) -> Segments:
    """Map the peer's segments. Raises HandoverError with the reason if this machine or user
    cannot."""
    if not found.machine or found.machine != machine_name():
        raise HandoverError("the peer is on another machine")
    place = f"/proc/{found.pid}/fd/{found.descriptor}"
    try:
        if not os.readlink(place).startswith(f"/memfd:{MEMORY_NAME}"):
            raise HandoverError("the peer's memory is something else")
        # What the name stands for may have changed since: a pipe would never open otherwise.
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise HandoverError(f"the peer's memory cannot be opened: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise HandoverError("the peer's memory is something else")
        if fcntl(descriptor, _GET_SEALS) & _SEALS != _SEALS:
            raise HandoverError("the peer's memory is not sealed")
        if os.fstat(descriptor).st_size != MARK_BYTES + size * num:
            raise HandoverError("the peer's memory has another size")
        memory = mmap.mmap(descriptor, MARK_BYTES + size * num, prot=mmap.PROT_READ)
    except OSError as error:
        raise HandoverError(f"the peer's memory cannot be mapped: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if memory[:SIZE] != found.mark:
        raise HandoverError("the peer's memory is that of another process")
    return Segments(memoryview(memory), MARK_BYTES, size, num)
