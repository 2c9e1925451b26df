"""Reads a whole index of blocks, and begins a change of it. A damaged page may end the process that
reads it (SIGBUS, SIGSEGV), so this is a process of its own (``sandbox.child``)."""

from __future__ import annotations

import os

import lmdb
import msgspec

from setpoint.sandbox.process_limits import ProcessLimits
from setpoint.sandbox.worker import serve

LIMITS = ProcessLimits(cpu_s=60.0, memory_bytes=4 << 30)
"""The limits of the process. A quarter of its memory is the address space of the index."""
_OF_THE_MOMENT = (
    lmdb.DiskError, lmdb.LockError, lmdb.MapFullError, lmdb.MemoryError, lmdb.ReadersFullError,
    lmdb.ReadonlyError, lmdb.TlsFullError,
)  # fmt: skip


def is_damage(error: BaseException | None) -> bool:
    """Whether an error says that an index is not what was written. Every error of LMDB does that
    is not about the moment, since what is done here raises none of them on a sound index; and its
    base class stands for an error of the system."""
    return (
        isinstance(error, lmdb.Error)
        and type(error) is not lmdb.Error
        and not isinstance(error, _OF_THE_MOMENT)
    )


class Read(msgspec.Struct, frozen=True, tag=True):
    """Read all of the index."""

    folder: str
    key_bytes: int
    entry_bytes: int


class BeginChange(msgspec.Struct, frozen=True, tag=True):
    """Begin a change, and take it back. Waits for whoever changes the index now."""


Job = Read | BeginChange
_decoder = msgspec.msgpack.Decoder(Job)


class _Checker:
    def __init__(self) -> None:
        self._index: lmdb.Environment | None = None
        self._about = Read("", 0, 0)

    def answer(self, job: bytes) -> bytes:
        """What is wrong with the index; empty if nothing is."""
        try:
            match _decoder.decode(job):
                case Read() as about:
                    self._about = about
                    return self._read().encode()
                case BeginChange():
                    self._change()
        except lmdb.Error as error:
            return str(error).encode() if is_damage(error) else b""
        return b""

    def _read(self) -> str:
        about = self._about
        index = self._index = lmdb.open(
            about.folder, max_dbs=2, max_readers=512, create=False, sync=False, metasync=False
        )
        with index.begin() as transaction:
            blocks = index.open_db(b"blocks", transaction, create=False)
            sums = index.open_db(b"sums", transaction, create=False)
            for database in (None, sums):
                for _ in transaction.cursor(db=database):
                    pass
            for key, entry in transaction.cursor(db=blocks):
                if len(key) != about.key_bytes or len(entry) != about.entry_bytes:
                    return "it holds something else"
        return ""

    def _change(self) -> None:
        if self._index is None:  # the file could not be opened at this moment
            return
        with self._index.begin(write=True) as transaction:
            blocks = self._index.open_db(b"blocks", transaction)
            for _ in range(8):  # takes pages from the list of those that are free
                transaction.put(
                    os.urandom(self._about.key_bytes), bytes(self._about.entry_bytes), db=blocks
                )
            transaction.abort()


if __name__ == "__main__":
    serve(_Checker().answer, LIMITS)
