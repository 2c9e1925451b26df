"""The index of a file store: LMDB in a folder, name -> entry, and the sum of all sizes. It may be
lost at any time: it is made again, empty, and who uses it fills it from the files.

LMDB trusts the file that it maps: a page that is cut off or has changed may end the process that
reads it. So an index that has changed since somebody closed it is first read by a process of its
own (``check_index``), and the size of its file is looked at before each transaction. What is left
is a file that somebody cuts within a transaction, or whose pages somebody changes while it is open.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import lmdb

from setpoint.tiers import check_index
from setpoint.tiers.block_keys import KEY_BYTES
from setpoint.tiers.own_files import claim_folder, is_own_file
from setpoint.tiers.store import StoreError

logger = logging.getLogger(__name__)

ENTRY = struct.Struct("<Qdd16s")
"""Size of the file, when it was written and last used (seconds since 1970), owner."""
_SUM = b"bytes"
INDEX_BYTES = 1 << 30
"""Size of the index's address space; about five million blocks."""
CHECK_S = 60.0
"""How long reading a whole index may take."""
DAMAGE = (
    lmdb.BadTxnError, lmdb.CorruptedError, lmdb.IncompatibleError, lmdb.InvalidError,
    lmdb.PageNotFoundError, lmdb.PanicError, lmdb.VersionMismatchError,
)  # fmt: skip
"""Errors that say that the index is not what was written. Others are a matter of the moment."""
ANOTHER = "another process has made it again"
_BAD = re.compile(r"index\.bad\.[0-9a-f-]+")


class DamagedIndexError(Exception):
    """The index is damaged, cut or gone."""


class BlockIndex:
    """See the module. Threads may use it at the same time."""

    def __init__(self, folder: Path) -> None:
        """folder: of the store. Raises StoreError or OSError if there can be no index."""
        self._folder, self._path = folder, folder / "index"
        self._file = self._path / "data.mdb"
        self._seal = self._path / "closed"
        """What the file was like when it was closed."""
        self.is_new = False
        """Whether it is to be filled from the files; its user sets it back."""
        self._changed = threading.Condition()
        """Guards the next three."""
        self._num_users = 0
        self._broken = ""
        """Why it has to be made again; empty if it is well."""
        self._is_being_made = False
        self._inode = self._least_bytes = 0
        """Of the file that is open."""
        for path in folder.glob("index.bad.*"):  # of a process that was killed
            if _BAD.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        self._open()

    def close(self) -> None:
        self._env.close()
        with suppress(OSError):
            self._seal.write_text(self._state())

    def enter(self, *, waits: bool) -> lmdb.Environment:
        """The environment for one transaction, which ``leave`` ends; made again first if it is
        damaged. waits: False raises StoreError instead. Raises StoreError, or OSError if the folder
        is gone."""
        with self._changed:
            while True:
                if not self._broken and not self._is_being_made:
                    self._broken = self._wrong_now()
                if not self._broken and not self._is_being_made:
                    self._num_users += 1
                    return self._env
                if not waits:
                    raise StoreError("The index of the cache is being made again.")
                if self._num_users == 0 and not self._is_being_made:
                    break
                self._changed.wait()
            self._is_being_made, why = True, self._broken
        try:
            self._env.close()
            if why != ANOTHER:
                self._set_aside(why)
            self.is_new = True
            self._open()
            with self._changed:
                self._broken = ""
                self._num_users += 1
                return self._env
        finally:
            with self._changed:
                self._is_being_made = False
                self._changed.notify_all()

    def leave(self, error: BaseException | None) -> None:
        """The transaction has ended. error: what LMDB has raised in it, if anything."""
        with self._changed:
            self._num_users -= 1
            if isinstance(error, DAMAGE):
                self._broken = str(error)
            self._changed.notify_all()

    def _wrong_now(self) -> str:
        """Why the file cannot be used any more; empty if it can."""
        self._folder.lstat()  # raises if even that is gone
        try:
            about = self._file.lstat()
        except FileNotFoundError:
            return "it is gone"
        if about.st_ino != self._inode:
            return ANOTHER
        if about.st_size < self._least_bytes:
            return "it was cut"
        self._least_bytes = about.st_size  # it never shrinks
        return ""

    # ------------------------------------------------------------------ opening

    def _open(self) -> None:
        claim_folder(self._path)
        self.is_new = self.is_new or not self._file.exists()
        try:
            self._check()
            self._env = self._opened()
        except (DamagedIndexError, *DAMAGE) as error:
            self._set_aside(str(error))
            claim_folder(self._path)
            self._env = self._opened()
        except lmdb.Error as error:
            raise StoreError(f"The index {self._path} cannot be opened: {error}.") from None

    def _check(self) -> None:
        """Raise DamagedIndexError if reading the index would fail, or end the process."""
        for path in (self._file, self._path / "lock.mdb"):
            if os.path.lexists(path) and not is_own_file(path.lstat()):
                raise DamagedIndexError(f"{path.name} is no file of this user alone")
        if not self._file.exists() or self._is_sealed():
            return
        command = [sys.executable, check_index.__file__, str(self._path), str(KEY_BYTES)]
        try:
            done = subprocess.run(
                [*command, str(ENTRY.size)], capture_output=True, text=True, timeout=CHECK_S
            )
        except subprocess.TimeoutExpired:
            raise StoreError(
                f"The index {self._path} cannot be read in {CHECK_S:g} s. Another process may have"
                " been stopped while it was changing it."
            ) from None
        if done.returncode == check_index.DAMAGED:
            raise DamagedIndexError(done.stdout.strip())
        if done.returncode < 0:
            raise DamagedIndexError(f"reading it ends a process (signal {-done.returncode})")
        if done.returncode:
            logger.warning("The index %s was not checked: %s", self._path, done.stderr[-500:])

    def _opened(self) -> lmdb.Environment:
        env = lmdb.open(
            str(self._path),
            map_size=INDEX_BYTES,
            max_dbs=2,
            max_readers=512,
            sync=False,
            metasync=False,
            lock=True,
        )
        try:
            about = self._file.lstat()
            if about.st_size < (env.info()["last_pgno"] + 1) * env.stat()["psize"]:
                raise DamagedIndexError("it is cut")
            env.reader_check()
            self.blocks = env.open_db(b"blocks")
            self.sums = env.open_db(b"sums")
        except BaseException:
            env.close()
            raise
        self._inode, self._least_bytes = about.st_ino, about.st_size
        with suppress(OSError):
            self._seal.unlink()
        return env

    def _set_aside(self, why: str) -> None:
        """Make way for a new index. Whoever has this one open finds that there is another."""
        self.is_new = True
        bad = self._folder / f"index.bad.{os.getpid():x}-{time.time_ns():x}"
        logger.warning("The index %s is made again: %s.", self._path, why)
        with suppress(FileNotFoundError):
            self._path.replace(bad)
            shutil.rmtree(bad, ignore_errors=True)

    # ------------------------------------------------------------------ the seal

    def _is_sealed(self) -> bool:
        """Whether nobody has changed the index since it was closed. What a killed process leaves is
        sound; what a power failure leaves is not, and the seal is of another start of the machine
        then."""
        with suppress(OSError, UnicodeDecodeError):
            return is_own_file(self._seal.lstat()) and self._seal.read_text() == self._state()
        return False

    def _state(self) -> str:
        about = self._file.lstat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {about.st_ino} {about.st_size} {about.st_mtime_ns}"


class Entries:
    """The index within one transaction. Raises StoreError for what LMDB raises, but for
    MapFullError."""

    def __init__(self, index: BlockIndex, *, write: bool, waits: bool = True) -> None:
        """waits: whether to make an index again that is damaged, rather than raise StoreError."""
        self._index, self._write, self._waits = index, write, waits

    def __enter__(self) -> Entries:
        try:
            env = self._index.enter(waits=self._waits)
        except OSError as error:
            raise StoreError(f"The folder of the cache is gone: {error}.") from None
        try:
            self._transaction = env.begin(write=self._write, db=self._index.blocks)
        except BaseException as error:
            self._index.leave(error)
            if isinstance(error, lmdb.Error):
                raise StoreError(f"The index of the cache cannot be read: {error}.") from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        try:
            if error is None:
                self._transaction.commit()
            else:
                self._transaction.abort()
        except lmdb.Error as ending:
            self._index.leave(ending)
            raise StoreError(f"The index of the cache cannot be changed: {ending}.") from None
        self._index.leave(error)
        if isinstance(error, lmdb.Error) and not isinstance(error, lmdb.MapFullError):
            raise StoreError(f"The index of the cache is damaged: {error}.") from None

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        found: Iterator[tuple[bytes, bytes]] = self._transaction.cursor().iternext()
        return found

    def get(self, key: bytes) -> bytes | None:
        entry: bytes | None = self._transaction.get(key)
        return entry

    @property
    def num(self) -> int:
        entries: int = self._transaction.stat(self._index.blocks)["entries"]
        return entries

    @property
    def num_bytes(self) -> int:
        found = self._transaction.get(_SUM, db=self._index.sums)
        return 0 if found is None else int.from_bytes(found, "little")

    def add(self, key: bytes, entry: bytes) -> None:
        if self._transaction.put(key, entry, overwrite=False):
            self._sum(ENTRY.unpack(entry)[0])

    def remove(self, key: bytes) -> None:
        entry = self._transaction.pop(key)
        if entry is not None:
            self._sum(-ENTRY.unpack(entry)[0])

    def use(self, used: dict[bytes, float]) -> None:
        for key, at in used.items():
            entry = self.get(key)
            if entry is not None:
                size, written, _, owner = ENTRY.unpack(entry)
                self._transaction.put(key, ENTRY.pack(size, written, at, owner))

    def _sum(self, change: int) -> None:
        total = max(self.num_bytes + change, 0)
        self._transaction.put(_SUM, total.to_bytes(8, "little"), db=self._index.sums)
