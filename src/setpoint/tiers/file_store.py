"""A store of blocks in files of one folder, which any number of servers may use at a time.

    FOLDER/blocks/ab/abcd….kv     a block: a header, then its bytes
    FOLDER/index/                 LMDB: name -> size, times, owner; and the sum of all sizes
    FOLDER/new/                   files that are being written

A block appears by a rename, so nobody reads a half of it, and every byte of it is covered by a
checksum, so what a crash, a disk or a stranger has changed is a miss. Nothing is synced: after a
power failure blocks may be missing or damaged, which costs time. The index only saves reading the
folder; a lost one is made again from the files.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from setpoint.tiers.block_format import HEADER_BYTES, OWNER_BYTES, header_of, read_header
from setpoint.tiers.block_keys import KEY_BYTES
from setpoint.tiers.store import Bytes, StoreCounts, StoreError

logger = logging.getLogger(__name__)

_ENTRY = struct.Struct("<Qdd16s")
"""Size of the file, when it was written and last used (seconds since 1970), owner."""
_SUM = b"bytes"
INDEX_BYTES = 1 << 30
"""Size of the index's address space; about five million blocks."""
STALE_S = 600.0
"""Age from which a file that is being written belongs to a process that has ended."""
FULL_S = 10.0
"""How long nothing is written after the folder had no room."""


@dataclass(slots=True, frozen=True)
class FileLimits:
    max_bytes: int
    """Most bytes of all blocks in the folder, whoever wrote them."""
    min_free_bytes: int
    """Bytes that must stay free in the file system."""
    eviction_ratio: float = 0.1
    """Share of ``max_bytes`` that is made free at a time, of the blocks that were not used for the
    longest time."""
    ttl_s: float = float("inf")
    """Blocks that were not used for so long are gone."""


class FileStore:
    """See the module."""

    def __init__(
        self,
        folder: Path,
        owner: bytes,
        limits: FileLimits,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """owner: 16 bytes that name the engine, for ``clear``. Raises StoreError if the folder
        cannot be used."""
        self.counts = StoreCounts()
        self._folder, self._owner, self._limits, self._now = (
            folder,
            owner[:OWNER_BYTES],
            limits,
            now,
        )
        self._blocks, self._new = folder / "blocks", folder / "new"
        self._full_until = 0.0
        self._used: dict[bytes, float] = {}
        """Names -> times of use that the index does not know yet."""
        self._lock = threading.Lock()
        """Guards ``_used`` and ``_number``."""
        self._number = 0
        try:
            self._claim_folder()
            self._index, is_new = self._open_index()
        except OSError as error:
            raise StoreError(
                f"The folder {folder} cannot be used for the cache: {error.strerror or error}."
            ) from None
        self._is_new = is_new

    def num_leading(self, keys: Sequence[bytes]) -> int:
        with self._reading() as entries:
            for index, key in enumerate(keys):
                entry = entries.get(key)
                if entry is None or self._is_expired(entry):
                    return index
        return len(keys)

    def get(self, key: bytes) -> Bytes | None:
        with self._reading() as entries:
            entry = entries.get(key)
        if entry is None or self._is_expired(entry):
            return None
        path = self._path(key)
        try:
            data = _read(path, key)
        except FileNotFoundError:
            self._forget(key)
            return None
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from None
        if data is None:
            self.counts.damaged += 1
            logger.warning("The cached block %s is damaged and was removed.", path)
            self._forget(key)
            _remove(path)
            return None
        with self._lock:
            self._used[key] = self._now()
        return data

    def put(self, key: bytes, data: Bytes) -> int:
        with self._reading() as entries:
            if entries.get(key) is not None:
                return 0
        size = HEADER_BYTES + len(data)
        if time.monotonic() < self._full_until or not self._make_room(size):
            self.counts.refused += 1
            return 0
        path = self._path(key)
        new = self._new / self._new_name()
        try:
            _write(new, key, self._owner, data)
            try:
                new.replace(path)
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                new.replace(path)
        except OSError as error:
            _remove(new)
            self.counts.refused += 1
            self._note_full(f"a block cannot be written: {error.strerror or error}")
            return 0
        now = self._now()
        self._change(lambda entries: entries.add(key, _ENTRY.pack(size, now, now, self._owner)))
        return size

    def clear(self) -> int:
        with self._reading() as entries:
            keys = [key for key, entry in entries if _ENTRY.unpack(entry)[3] == self._owner]
        self._drop(keys)
        return len(keys)

    def size(self) -> tuple[int, int]:
        with self._reading() as entries:
            return entries.num, entries.num_bytes

    def close(self) -> None:
        with suppress(lmdb.Error):
            self._note_used()
        self._index.close()

    # ------------------------------------------------------------------ the folder

    def _claim_folder(self) -> None:
        folder = self._folder
        for each in (folder, self._blocks, self._new):
            each.mkdir(mode=0o700, parents=each is folder, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.geteuid():
            raise StoreError(
                f"The folder {folder} belongs to another user (number {about.st_uid}). A cache must"
                " be written by nobody else; name another folder."
            )
        if about.st_mode & 0o022:
            raise StoreError(
                f"Other users may write to the folder {folder}. A cache must be written by nobody"
                f" else: chmod go-w {folder}"
            )
        probe = self._new / self._new_name()
        probe.write_bytes(b"")
        probe.unlink()

    def _new_name(self) -> str:
        with self._lock:
            self._number += 1
            return f"{os.getpid()}-{id(self):x}-{self._number}"

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._blocks / name[:2] / f"{name}.kv"

    def sweep(self) -> None:
        """Make folder and index agree; call it once after opening. Removes what ended processes
        were writing, and adds blocks that the index lacks, because a process ended after the
        rename, or because the index is new."""
        for path in self._new.iterdir():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()
        found: dict[bytes, tuple[Path, float, int]] = {}
        for path in self._blocks.glob("??/*.kv"):
            with suppress(OSError, ValueError):
                about = path.stat()
                found[bytes.fromhex(path.stem)] = path, about.st_mtime, about.st_size
        with self._reading() as entries:
            lacking = [key for key in found if entries.get(key) is None]
        if self._is_new and found:
            logger.info("The index of %s is made again from %d blocks.", self._folder, len(found))
        owners = {key: _owner_of(found[key][0]) for key in lacking if len(key) == KEY_BYTES}

        def add(entries: _Entries) -> None:
            for key, owner in owners.items():
                _, at, size = found[key]
                entries.add(key, _ENTRY.pack(size, at, at, owner))

        if owners:
            self._change(add)

    def _note_full(self, why: str) -> None:
        self._full_until = time.monotonic() + FULL_S
        logger.warning("Cache in %s: %s. Nothing is written for %g s.", self._folder, why, FULL_S)

    # ------------------------------------------------------------------ limits

    def _is_expired(self, entry: bytes) -> bool:
        """A time in the future, after a clock was put back, is no age."""
        return self._now() - _ENTRY.unpack(entry)[2] > self._limits.ttl_s

    def _make_room(self, size: int) -> bool:
        """Evict if a block of this size needs it. Returns whether there is room for it."""
        limits = self._limits
        if size > limits.max_bytes:
            return False
        with self._reading() as entries:
            num_bytes = entries.num_bytes
        about = os.statvfs(self._folder)
        short = limits.min_free_bytes + size - about.f_bavail * about.f_frsize
        over = max(num_bytes + size - limits.max_bytes, short)
        if over <= 0:
            return True
        goal = over + int(limits.eviction_ratio * limits.max_bytes)
        given = self._evict(goal)
        if given < over and short > 0:
            self._note_full("too little space is free in the file system")
        return given >= over

    def _evict(self, goal: int) -> int:
        """Remove the blocks that were not used for the longest time. Returns their bytes."""
        self._note_used()
        with self._reading() as entries:
            ages = sorted((_ENTRY.unpack(entry)[2], key, entry) for key, entry in entries)
        keys, given = [], 0
        for _, key, entry in ages:
            if given >= goal:
                break
            keys.append(key)
            given += _ENTRY.unpack(entry)[0]
        self._drop(keys)
        self.counts.evicted += len(keys)
        return given

    def _drop(self, keys: list[bytes]) -> None:
        def drop(entries: _Entries) -> None:
            for key in keys:
                entries.remove(key)

        self._change(drop)
        for key in keys:
            _remove(self._path(key))

    # ------------------------------------------------------------------ the index

    def _open_index(self) -> tuple[lmdb.Environment, bool]:
        folder = self._folder / "index"
        is_new = not (folder / "data.mdb").exists()
        try:
            return self._opened(folder), is_new
        except (lmdb.Error, StoreError):
            bad = self._folder / f"index.bad.{self._new_name()}"
            logger.warning("The index %s is damaged; it is made again.", folder)
            folder.replace(bad)  # whoever has it open goes on with it
            shutil.rmtree(bad, ignore_errors=True)
            return self._opened(folder), True

    def _opened(self, folder: Path) -> lmdb.Environment:
        folder.mkdir(mode=0o700, exist_ok=True)
        index = lmdb.open(
            str(folder),
            map_size=INDEX_BYTES,
            max_dbs=2,
            max_readers=512,
            sync=False,
            metasync=False,
            lock=True,
        )
        try:
            num_pages = index.info()["last_pgno"] + 1
            if (folder / "data.mdb").stat().st_size < num_pages * index.stat()["psize"]:
                raise StoreError("The index is cut.")  # reading behind its end ends the process
            index.reader_check()
            self._entries_db = index.open_db(b"blocks")
            self._sums_db = index.open_db(b"sums")
            with index.begin(db=self._entries_db) as transaction:
                for key, entry in transaction.cursor():
                    if len(key) != KEY_BYTES or len(entry) != _ENTRY.size:
                        raise StoreError("The index holds something else.")
        except BaseException:
            index.close()
            raise
        return index

    def _reading(self) -> _Entries:
        return _Entries(self, write=False)

    def _change(self, change: Callable[[_Entries], None]) -> None:
        try:
            with _Entries(self, write=True) as entries:
                change(entries)
        except lmdb.MapFullError:
            self._note_full("the index is full")

    def _forget(self, key: bytes) -> None:
        self._change(lambda entries: entries.remove(key))

    def _note_used(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
        if used:
            self._change(lambda entries: entries.use(used))


class _Entries:
    """The index within one transaction."""

    def __init__(self, store: FileStore, *, write: bool) -> None:
        self._store, self._write = store, write

    def __enter__(self) -> _Entries:
        try:
            self._transaction = self._store._index.begin(
                write=self._write, db=self._store._entries_db
            )
        except lmdb.Error as error:
            raise StoreError(f"The index of the cache cannot be read: {error}.") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._transaction.commit()
            else:
                self._transaction.abort()
        except lmdb.Error as error:
            raise StoreError(f"The index of the cache cannot be changed: {error}.") from None
        if kind is not None and issubclass(kind, lmdb.Error) and kind is not lmdb.MapFullError:
            raise StoreError(f"The index of the cache is damaged: {rest[0]}.") from None

    def __iter__(self) -> lmdb.Cursor:
        return self._transaction.cursor().iternext()

    def get(self, key: bytes) -> bytes | None:
        entry: bytes | None = self._transaction.get(key)
        return entry

    @property
    def num(self) -> int:
        entries: int = self._transaction.stat(self._store._entries_db)["entries"]
        return entries

    @property
    def num_bytes(self) -> int:
        found = self._transaction.get(_SUM, db=self._store._sums_db)
        return 0 if found is None else int.from_bytes(found, "little")

    def add(self, key: bytes, entry: bytes) -> None:
        if self._transaction.put(key, entry, overwrite=False):
            self._sum(_ENTRY.unpack(entry)[0])

    def remove(self, key: bytes) -> None:
        entry = self._transaction.pop(key)
        if entry is not None:
            self._sum(-_ENTRY.unpack(entry)[0])

    def use(self, used: dict[bytes, float]) -> None:
        for key, at in used.items():
            entry = self.get(key)
            if entry is not None:
                size, written, _, owner = _ENTRY.unpack(entry)
                self._transaction.put(key, _ENTRY.pack(size, written, at, owner))

    def _sum(self, change: int) -> None:
        total = max(self.num_bytes + change, 0)
        self._transaction.put(_SUM, total.to_bytes(8, "little"), db=self._store._sums_db)


def _write(path: Path, key: bytes, owner: bytes, data: Bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(data)
        written = os.writev(descriptor, [header_of(key, owner, data), view])
        written -= HEADER_BYTES
        while written < len(data):
            written += os.write(descriptor, view[written:])
    finally:
        os.close(descriptor)


def _read(path: Path, key: bytes) -> Bytes | None:
    """The bytes of a block; None if the file is anything but that block."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        header = read_header(os.read(descriptor, HEADER_BYTES), key)
        if header is None:
            return None
        if os.fstat(descriptor).st_size != HEADER_BYTES + header.num_bytes:
            return None
        data = np.empty(header.num_bytes, np.uint8)
        view, at = memoryview(data), 0
        while at < header.num_bytes:
            more = os.readv(descriptor, [view[at:]])
            if not more:
                return None
            at += more
    finally:
        os.close(descriptor)
    return data if header.fits(data) else None


def _owner_of(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        header = read_header(file.read(HEADER_BYTES))
        if header is not None:
            return header.owner
    return bytes(OWNER_BYTES)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
