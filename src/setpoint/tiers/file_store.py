"""A store of blocks in files of one folder, which any number of servers may use at a time.

    FOLDER/blocks/ab/abcd….kv     a block: a header, then its bytes
    FOLDER/index/                 LMDB: name -> size, times, owner; and the sum of all sizes
    FOLDER/new/                   files that are being written

A block appears by a rename, so nobody reads a half of it, and every byte of it is covered by a
checksum, so what a crash, a disk or a stranger has changed is a miss. Nothing is synced: after a
power failure blocks may be missing or damaged, which costs time. The index (``block_index``) only
saves reading the folder; a lost one is made again from the files. Whatever else is in the folder
stays there: files are removed by the names that are written here.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from setpoint.core.own_files import is_own_file, open_own
from setpoint.tiers.block_format import HEADER_BYTES, OWNER_BYTES, header_of, read_header
from setpoint.tiers.block_index import ENTRY, BlockIndex, Entries, LockedIndexError
from setpoint.tiers.block_keys import KEY_BYTES
from setpoint.tiers.own_files import claim_folder, claim_parts, remove
from setpoint.tiers.store import Bytes, StoreCounts, StoreError

logger = logging.getLogger(__name__)

STALE_S = 600.0
"""Age from which a file that is being written belongs to a process that has ended."""
FULL_S = 10.0
"""How long nothing is written after the folder had no room."""
EXPIRY_S = 60.0
"""How often, at most, blocks are looked for that have become too old."""
_NEW_NAME = re.compile(r"[0-9]+-[0-9a-f]+-[0-9]+")
_SHARD = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.kv")
"""The names that are written here. Nothing else is ever removed."""


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
        self._has_swept = False
        self._next_expiry = float("-inf")
        self._last_size = 0, 0
        try:
            self._claim_folder()
            self._index = BlockIndex(folder)
        except OSError as error:
            raise StoreError(
                f"The folder {folder} cannot be used for the cache: {error.strerror or error}."
            ) from None

    def num_leading(self, keys: Sequence[bytes]) -> int:
        with self._reading() as entries:
            for index, key in enumerate(keys):
                entry = entries.get(key)
                if entry is None or self._is_expired(key, entry):
                    return index
        return len(keys)

    def get(self, key: bytes) -> Bytes | None:
        with self._reading() as entries:
            entry = entries.get(key)
        if entry is None or self._is_expired(key, entry):
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
            self._forget(key)
            self._remove_damaged(path)
            return None
        with self._lock:
            self._used[key] = self._now()
        return data

    def put(self, key: bytes, data: Bytes) -> int:
        with self._reading() as entries:
            entry = entries.get(key)
        if entry is not None and not self._is_expired(key, entry):
            return 0
        self._expire()
        size = HEADER_BYTES + len(data)
        if time.monotonic() < self._full_until or not self._make_room(size):
            self.counts.refused += 1
            return 0
        path = self._path(key)
        new = self._new / self._new_name()
        try:
            self._in_folders(path, lambda: _write(new, key, self._owner, data))
            self._in_folders(path, lambda: new.replace(path))
        except OSError as error:
            remove(new)
            self.counts.refused += 1
            self._note_full(f"a block cannot be written: {error.strerror or error}")
            return 0
        now = self._now()

        def change(entries: Entries) -> None:
            entries.remove(key)  # one that was too old
            entries.add(key, ENTRY.pack(size, now, now, self._owner))

        self._change(change)
        return size

    def clear(self) -> int:
        try:
            return self._clear()
        except LockedIndexError as error:
            logger.warning("%s It is made again, and then cleared.", error)
        with self._reading():  # makes it again, and the next use fills it from the files
            pass
        return self._clear()

    def _clear(self) -> int:
        with self._reading() as entries:
            keys = [key for key, entry in entries if ENTRY.unpack(entry)[3] == self._owner]
        self._drop(keys)
        return len(keys)

    def size(self) -> tuple[int, int]:
        with suppress(StoreError), self._index.reading(waits=False) as entries:
            self._last_size = entries.num, entries.num_bytes
        return self._last_size

    def close(self) -> None:
        with suppress(StoreError):
            self._note_used()
        self._index.close()

    # ------------------------------------------------------------------ the folder

    def _claim_folder(self) -> None:
        folder = self._folder
        claim_folder(folder, parents=True)
        if not self._blocks.exists():
            for path in (self._new, self._folder / "index"):
                if os.path.lexists(path):
                    raise StoreError(
                        f"{path} is there, and {self._blocks} is not, so {folder} is the folder of"
                        " something else than a cache. Name another folder."
                    )
        claim_parts(folder)
        for path in self._blocks.iterdir():
            if _SHARD.fullmatch(path.name):
                claim_folder(path)
        about = os.statvfs(folder)
        disk = about.f_blocks * about.f_frsize
        if disk and self._limits.min_free_bytes >= disk:
            raise StoreError(
                f"{self._limits.min_free_bytes} bytes are to stay free (min_free_space), and the"
                f" whole file system of {folder} has {disk}."
            )
        probe = self._new / self._new_name()
        probe.write_bytes(b"")
        probe.unlink()

    def _in_folders(self, path: Path, act: Callable[[], object]) -> None:
        """Do what needs the folder of a block, and that of new files. If one is missing, because
        it is the first block in it, or somebody has emptied the cache, they are made first."""
        try:
            act()
        except FileNotFoundError:
            claim_parts(self._folder)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            act()

    def _new_name(self) -> str:
        with self._lock:
            self._number += 1
            return f"{os.getpid()}-{id(self):x}-{self._number}"

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._blocks / name[:2] / f"{name}.kv"

    def sweep(self) -> None:
        """Make folder and index agree; call it once after opening. Removes what ended processes
        were writing and what is too old, and adds blocks that the index lacks, because a process
        ended after the rename, or because the index is new."""
        is_new, self._index.is_new, self._has_swept = self._index.is_new, False, True
        try:
            claim_parts(self._folder)
            self._remove_left()
        except OSError as error:
            self._index.is_new = is_new
            raise StoreError(f"The folder of the cache is gone: {error}.") from None
        self._fill(is_new=is_new)
        self._expire()

    def _remove_left(self) -> None:
        """Remove what ended processes were writing."""
        for path in self._new.iterdir():
            with suppress(OSError):
                age = time.time() - path.lstat().st_mtime
                if age > STALE_S and _NEW_NAME.fullmatch(path.name):
                    path.unlink()

    def _fill(self, *, is_new: bool) -> None:
        """Add blocks that the index lacks. is_new: whether it is a new one."""
        found: dict[bytes, tuple[Path, float, int]] = {}
        for path in self._blocks.glob("??/*.kv"):
            if _BLOCK.fullmatch(path.name):
                with suppress(OSError):
                    about = path.lstat()
                    if is_own_file(about):
                        found[bytes.fromhex(path.stem)] = path, about.st_mtime, about.st_size
                    else:
                        self._remove_damaged(path)
        with self._index.reading() as entries:
            lacking = [key for key in found if entries.get(key) is None]
        if is_new and found:
            logger.info("The index of %s is made again from %d blocks.", self._folder, len(found))
        owners = {key: _owner_of(found[key][0]) for key in lacking}

        def add(entries: Entries) -> None:
            for key, owner in owners.items():
                _, at, size = found[key]
                entries.add(key, ENTRY.pack(size, at, at, owner))

        if owners:
            self._change(add)

    def _remove_damaged(self, path: Path) -> None:
        self.counts.damaged += 1
        logger.warning("The cached block %s is damaged and was removed.", path)
        remove(path)

    def _note_full(self, why: str) -> None:
        self._full_until = time.monotonic() + FULL_S
        logger.warning("Cache in %s: %s. Nothing is written for %g s.", self._folder, why, FULL_S)

    # ------------------------------------------------------------------ limits

    def _is_expired(self, key: bytes, entry: bytes) -> bool:
        """A time in the future, after a clock was put back, is no age."""
        with self._lock:
            used = max(ENTRY.unpack(entry)[2], self._used.get(key, 0.0))
        too_old: bool = self._now() - used > self._limits.ttl_s
        return too_old

    def _expire(self) -> None:
        """Remove the blocks that are too old, unless that was done a short while ago."""
        limit_s, now = self._limits.ttl_s, self._now()
        if limit_s == float("inf") or now < self._next_expiry:
            return
        self._next_expiry = now + max(EXPIRY_S, limit_s / 10)
        self._note_used()
        with self._reading() as entries:
            old = [key for key, entry in entries if self._is_expired(key, entry)]
        self._drop(old)
        self.counts.evicted += len(old)

    def _make_room(self, size: int) -> bool:
        """Evict if a block of this size needs it. Returns whether there is room for it; if that
        cannot be, nothing is evicted."""
        limits = self._limits
        if size > limits.max_bytes:
            return False
        with self._reading() as entries:
            num_bytes = entries.num_bytes
        try:
            about = os.statvfs(self._folder)
        except OSError as error:
            raise StoreError(f"The folder of the cache is gone: {error}.") from None
        short = limits.min_free_bytes + size - about.f_bavail * about.f_frsize
        over = max(num_bytes + size - limits.max_bytes, short)
        if over <= 0:
            return True
        given = 0
        if over <= num_bytes:
            given = self._evict(over + int(limits.eviction_ratio * limits.max_bytes))
        if given < over and short > 0:
            self._note_full("too little space is free in the file system")
        return given >= over

    def _evict(self, goal: int) -> int:
        """Remove the blocks that were not used for the longest time. Returns their bytes."""
        self._note_used()
        with self._reading() as entries:
            ages = sorted((ENTRY.unpack(entry)[2], key, entry) for key, entry in entries)
        keys, given = [], 0
        for _, key, entry in ages:
            if given >= goal:
                break
            keys.append(key)
            given += ENTRY.unpack(entry)[0]
        self._drop(keys)
        self.counts.evicted += len(keys)
        return given

    def _drop(self, keys: list[bytes]) -> None:
        def drop(entries: Entries) -> None:
            for key in keys:
                entries.remove(key)

        if keys:
            self._change(drop)
        for key in keys:
            remove(self._path(key))

    # ------------------------------------------------------------------ the index

    def _reading(self) -> AbstractContextManager[Entries]:
        if self._index.is_new and self._has_swept:
            self.sweep()  # it was made again
        return self._index.reading()

    def _change(self, change: Callable[[Entries], None]) -> None:
        try:
            self._index.change(change)
        except lmdb.MapFullError:
            self._note_full("the index is full")

    def _forget(self, key: bytes) -> None:
        self._change(lambda entries: entries.remove(key))

    def _note_used(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
        if used:
            self._change(lambda entries: entries.use(used))


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
    descriptor = open_own(path)
    if descriptor is None:
        return None
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
    with suppress(OSError):
        descriptor = open_own(path)
        if descriptor is not None:
            with open(descriptor, "rb") as file:
                header = read_header(file.read(HEADER_BYTES))
            if header is not None:
                return header.owner
    return bytes(OWNER_BYTES)
