"""The output file while it is written: whole records are appended under a lock, and read back after
a crash.

Contract: at whatever moment a run ends, reopening the file finds every record whose ``append``
returned (after a power cut: every record whose ``sync`` returned), cuts at most one unfinished
record, and never changes a file that is not the output of this batch.
docs/decisions/0012-batch-journal.md gives the reasons. The journal reads only the head of a record.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from setpoint.batch.entry import BatchError, Marks, Survey
from setpoint.batch.output_record import RecordHead, decode_head, first_bytes, parse_record_id
from setpoint.batch.tally import Tally


class Journal:
    """A context manager; leaving it syncs and closes the file."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and lock it. Raises BatchError if that is impossible or another
        run holds the lock."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise BatchError(f"{path} cannot be written: {error.strerror}.") from None
        try:
            _lock(self._fd, path)
        except BatchError:
            os.close(self._fd)
            raise
        self._size = 0
        """Bytes of whole records; anything after them is an append that failed half-way."""
        self._num_synced = -1
        """Bytes known to be on the disk; -1: not even those of an earlier run are known to be."""
        self._failed_sync: BatchError | None = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def recover(self, survey: Survey, tally: Tally, *, in_order: bool) -> Marks:
        """Mark and count the answered requests, and cut an unfinished record at the end.

        in_order: the records must be those of the first requests of the input, in its order. Raises
        BatchError for a file that holds anything but records of this batch, or two for one request.
        """
        done = Marks(survey.last_number)
        for position, line in enumerate(self._whole_lines(), 1):
            number, head = self._record(position, line, survey)
            if number in done:
                raise BatchError(
                    f"{self._path} holds two answers to line {number} of the input; the second is"
                    f" on line {position}."
                )
            if in_order and number < done.last:
                raise BatchError(
                    f"{self._path} was started without --keep-order: its line {position} is out of"
                    " order. Leave --keep-order out."
                )
            done.add(number)
            tally.count(head.error)
            self._size += len(line)
        self._cut_tail(survey)
        tally.num_before = tally.num_done
        _sync_folder(self._path)
        return done

    def append(self, data: bytes) -> None:
        """Append one encoded record. Raises BatchError; the file then ends with the record before
        it."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise self._write_error(error) from None
        self._size += len(data)

    def sync(self) -> None:
        """Return when everything appended would survive a power cut. May run on another thread than
        ``append``. Raises BatchError.

        The system reports a failure only once, and perhaps to a call that was cancelled meanwhile;
        so every later call raises it again.
        """
        if self._failed_sync is not None:
            raise self._failed_sync
        size = self._size
        if self._num_synced == size:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._failed_sync = self._write_error(error)
            raise self._failed_sync from None
        if not os.fstat(self._fd).st_nlink:
            raise BatchError(
                f"{self._path} was deleted while it was being written; its answers are lost."
            )
        self._num_synced = size

    def _write_error(self, error: OSError) -> BatchError:
        return BatchError(
            f"{self._path} cannot be written: {error.strerror}. The answers in it are complete."
        )

    def _whole_lines(self) -> Iterator[bytes]:
        try:
            with open(os.dup(self._fd), "rb", buffering=1 << 20) as file:
                file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    yield line
        except OSError as error:
            raise BatchError(f"{self._path} cannot be read: {error.strerror}.") from None

    def _record(self, position: int, line: bytes, survey: Survey) -> tuple[int, RecordHead]:
        """The number of the input line that a record answers, and its head. Raises BatchError for a
        line that is not a record of this batch."""
        head = decode_head(line)
        parsed = None if head is None else parse_record_id(head.id)
        if head is None or parsed is None:
            raise BatchError(
                f"{self._path} is not an output of setpoint batch, or it is damaged: line"
                f" {position} (byte {self._size}) is not a record. Name another file with -o, or"
                " repair this one."
            )
        digest, number = parsed
        if digest != survey.digest or not 1 <= number <= survey.last_number:
            raise BatchError(
                f"{self._path} belongs to another input: its line {position} answers batch"
                f" {digest}, not {survey.digest}."
            )
        return number, head

    def _cut_tail(self, survey: Survey) -> None:
        """Remove an unfinished record: one that begins as our records do, or zero bytes, which a
        power cut leaves."""
        num_tail = os.fstat(self._fd).st_size - self._size
        if not num_tail:
            return
        beginning = first_bytes(survey.digest)
        head = os.pread(self._fd, len(beginning), self._size)
        if not beginning.startswith(head) and not self._is_zero(num_tail):
            raise BatchError(
                f"{self._path} is not an output of setpoint batch for this input: its end, from"
                f" byte {self._size}, is not a record. Name another file with -o."
            )
        os.ftruncate(self._fd, self._size)

    def _is_zero(self, num_tail: int) -> bool:
        block = 1 << 20
        return all(
            not os.pread(self._fd, block, self._size + start).strip(b"\0")
            for start in range(0, num_tail, block)
        )


def _lock(fd: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise BatchError(f"{path} is not a regular file; a batch reads its output back.")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchError(f"{path} is being written by another run of setpoint batch.") from None
    except OSError as error:
        raise BatchError(f"{path} cannot be locked: {error.strerror}.") from None


def _sync_folder(path: Path) -> None:
    """Sync the folder: a new file's name is safe only when its folder is."""
    fd = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
