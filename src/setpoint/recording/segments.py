"""The files of a recording that is being written: FILE, FILE.1, FILE.2, …. Each begins with the
header, and the oldest one is deleted when all together are too large. Works on bytes."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from setpoint.core.errors import RecordingError
from setpoint.recording.frames import frame

logger = logging.getLogger(__name__)

SEGMENTS = 16
"""Number of files of a recording that has reached its largest size."""


def segment_path(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


def segments_there(path: Path) -> list[int]:
    """Numbers of the segments of this recording that exist, in order."""
    first, others = path.name + ".", (other.name for other in path.parent.glob("*"))
    ends = [name.removeprefix(first) for name in others if name.startswith(first)]
    later = sorted(int(end) for end in ends if end.isdecimal())
    return [0, *later] if path.exists() else later


def check_new(path: Path) -> None:
    """Raise RecordingError if a recording cannot be started at this path."""
    if segments_there(path):
        raise RecordingError(
            f"There already is a recording {path}. Move it away, or choose another name."
        )
    if not path.parent.is_dir():
        raise RecordingError(f"Cannot write the recording {path}: there is no such folder.")


def _create(path: Path) -> int:
    """Create a file that only its owner may read. Returns its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


class Segments:
    """Writes the segments; after construction from one thread only. The constructor raises
    RecordingError; later failures raise OSError."""

    def __init__(self, path: Path, *, header: Callable[[int], bytes], max_bytes: int) -> None:
        """header: returns the first payload of the segment with the given number."""
        self._path = path
        self._header = header
        self._max_bytes = max_bytes
        self._segment_bytes = max_bytes // SEGMENTS
        self._kept: deque[tuple[int, int]] = deque()
        """(number, size in bytes) of each segment that exists, except the last one."""
        self._number = 0
        self._size = 0
        self.num_bytes = 0
        """Size of all segments that exist, in bytes."""
        check_new(path)
        try:
            self._file = _create(path)
        except OSError as error:
            raise RecordingError(f"Cannot write the recording {path}: {error.strerror}.") from None
        self._begin()

    def write(self, payload: bytes) -> None:
        """Write the payload as one frame."""
        data = frame(payload)
        if self._size + len(data) > self._segment_bytes and self._size > self._begun_at:
            self._rotate(len(data))
        self._append(data)

    def close(self) -> None:
        os.close(self._file)

    def _rotate(self, num_bytes: int) -> None:
        self._kept.append((self._number, self._size))
        num_bytes += self._begun_at  # the next header is as long as this one
        while self._kept and self.num_bytes + num_bytes > self._max_bytes:
            number, size = self._kept.popleft()
            if number == 0:
                logger.warning(
                    "The recording has reached --record-max-bytes and its oldest part is deleted:"
                    " it can still be printed, but no longer be replayed."
                )
            segment_path(self._path, number).unlink(missing_ok=True)
            self.num_bytes -= size
        self._number, self._size = self._number + 1, 0
        os.close(self._file)
        self._file = _create(segment_path(self._path, self._number))
        self._begin()

    def _begin(self) -> None:
        self._append(frame(self._header(self._number)))
        self._begun_at = self._size

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size += len(data)
        self.num_bytes += len(data)
