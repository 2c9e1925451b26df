"""The index of a file store: LMDB in a folder, name -> entry, and the sum of all sizes. It may be
lost at any time: it is made again, empty, and who uses it fills it from the files.

LMDB trusts the file that it maps: a page that is cut off or has changed may end the process that
reads it. So an index that has changed since somebody closed it is first read by a process of its
own (``check_index``), and the size of its file is looked at before each transaction. What is left
is a file that somebody cuts within a transaction, or whose pages somebody changes while it is open.

LMDB also waits for its lock without an end, and a process that was stopped in the middle of a
change keeps that. So a change has a thread of its own. If the thread does not get the lock, the
index is left to whoever has it, and made again.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import lmdb
import msgspec

from setpoint.core.own_files import is_own_file
from setpoint.sandbox.child import ChildLostError, LimitedChild, TooMuchError
from setpoint.tiers.block_keys import KEY_BYTES
from setpoint.tiers.check_index import LIMITS, BeginChange, Job, Read, is_damage
from setpoint.tiers.own_files import claim_parts
from setpoint.tiers.store import StoreError

logger = logging.getLogger(__name__)

ENTRY = struct.Struct("<Qdd16s")
"""Size of the file, when it was written and last used (seconds since 1970), owner."""
_SUM = b"bytes"
INDEX_BYTES = 1 << 30
"""Size of the index's address space; about five million blocks."""
LOCK_S = 10.0
"""How long the lock of an index may be waited for. Changes take milliseconds; only that of a folder
with millions of blocks that an index lacks takes seconds."""
LOCKED = f"another process has kept its lock for {LOCK_S:g} s"
ANOTHER = "another process has made it again"
_BAD = re.compile(r"index\.bad\.[0-9a-f-]+")


class DamagedIndexError(Exception):
    """The index is damaged, cut or gone."""


class LockedIndexError(StoreError):
    """A change was not made, because another process keeps the lock. The next use makes the index
    again."""


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
        """The inode and the least size of the file that is open."""
        self._is_left = False
        """Whether a thread still waits for the lock of the open file, and closes it afterwards."""
        for path in folder.glob("index.bad.*"):  # of a process that was killed
            if _BAD.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        self._open()

    def close(self) -> None:
        if self._is_left:
            return
        self._env.close()
        with suppress(OSError):
            self._seal.write_text(self._state())

    @contextmanager
    def reading(self, *, waits: bool = True) -> Iterator[Entries]:
        """The entries as they are now. waits: whether to make an index again that is damaged,
        rather than raise StoreError. Raises StoreError for what LMDB raises."""
        env, error = self._enter(waits=waits), None
        try:
            with env.begin() as transaction:
                yield Entries(transaction, self._blocks, self._sums)
        except lmdb.Error as caught:
            error = caught
            raise StoreError(f"The index of the cache cannot be read: {caught}.") from None
        finally:
            self._leave(error)

    def change(self, act: Callable[[Entries], None]) -> None:
        """Have ``act`` change the entries, in a thread of its own; all that it does or nothing.
        Raises LockedIndexError, MapFullError, and StoreError for whatever else LMDB raises."""
        env = self._enter(waits=True)
        blocks, sums = self._blocks, self._sums
        change = _Change(env, lambda made: act(Entries(made, blocks, sums)), self._close_left)
        if not change.is_done():
            self._leave_locked()
            raise LockedIndexError(f"The index of the cache cannot be changed: {LOCKED}.")
        error = change.error
        self._leave(error)
        if isinstance(error, lmdb.Error) and not isinstance(error, lmdb.MapFullError):
            raise StoreError(f"The index of the cache cannot be changed: {error}.") from None
        if error is not None:
            raise error

    def _enter(self, *, waits: bool) -> lmdb.Environment:
        """The environment for one transaction, which ``_leave`` ends; made again first if it is
        damaged. waits: False raises StoreError instead. Raises StoreError, also if the folder is
        gone."""
        try:
            return self._entered(waits=waits)
        except OSError as error:
            raise StoreError(f"The folder of the cache is gone: {error}.") from None

    def _entered(self, *, waits: bool) -> lmdb.Environment:
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
            if not self._is_left:
                self._env.close()
            if why != ANOTHER:
                self._set_aside(why)
            self.is_new, self._is_left = True, False
            self._open()
            with self._changed:
                self._broken = ""
                self._num_users += 1
                return self._env
        finally:
            with self._changed:
                self._is_being_made = False
                self._changed.notify_all()

    def _leave(self, error: BaseException | None) -> None:
        """The transaction has ended. error: what LMDB has raised in it, if anything."""
        with self._changed:
            self._num_users -= 1
            if is_damage(error):
                self._broken = str(error)
            self._changed.notify_all()

    def _leave_locked(self) -> None:
        """A change is given up; its thread closes the environment when it has got the lock."""
        with self._changed:
            self._num_users -= 1
            self._broken, self._is_left = LOCKED, True
            self._changed.notify_all()

    def _close_left(self, env: lmdb.Environment) -> None:
        """Called by the thread of a change that was given up."""
        with self._changed:
            while self._env is env and self._num_users:  # nobody begins to use it any more
                self._changed.wait()
        env.close()

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
        claim_parts(self._folder)
        self.is_new = self.is_new or not self._file.exists()
        try:
            self._check()
            self._env = self._opened()
        except (DamagedIndexError, lmdb.Error) as error:
            if not isinstance(error, DamagedIndexError) and not is_damage(error):
                raise StoreError(f"The index {self._path} cannot be opened: {error}.") from None
            self._set_aside(str(error))
            claim_parts(self._folder)
            self._env = self._opened()

    def _check(self) -> None:
        """Raise DamagedIndexError if reading the index would fail, or end the process."""
        for path in (self._file, self._path / "lock.mdb"):
            if os.path.lexists(path) and not is_own_file(path.lstat()):
                raise DamagedIndexError(f"{path.name} is no file of this user alone")
        if not self._file.exists() or self._is_sealed():
            return
        with closing(LimitedChild("setpoint.tiers.check_index", LIMITS)) as child:
            self._ask(child, Read(str(self._path), KEY_BYTES, ENTRY.size), LIMITS.wall_s)
            self._ask(child, BeginChange(), LOCK_S)

    def _ask(self, child: LimitedChild, job: Job, wall_s: float) -> None:
        """Have the index looked at. Raises DamagedIndexError if something is wrong with it, and
        StoreError if that could not be found out."""
        try:
            wrong = child.ask(msgspec.msgpack.encode(job), wall_s=wall_s)
        except TooMuchError as error:
            raise DamagedIndexError(f"the process that reads it {error}") from None
        except ChildLostError as error:
            if isinstance(job, BeginChange):
                raise DamagedIndexError(LOCKED) from None
            raise StoreError(
                f"The index {self._path} cannot be checked: the process that reads it {error}."
            ) from None
        if wrong:
            raise DamagedIndexError(wrong.decode())

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

        def open_databases(transaction: lmdb.Transaction) -> None:
            self._blocks = env.open_db(b"blocks", transaction)
            self._sums = env.open_db(b"sums", transaction)

        opening, is_left = _Change(env, open_databases, lmdb.Environment.close), False
        try:
            about = self._file.lstat()
            if about.st_size < (env.info()["last_pgno"] + 1) * env.stat()["psize"]:
                raise DamagedIndexError("it is cut")
            env.reader_check()
            is_left = not opening.is_done()
            if is_left:
                raise DamagedIndexError(LOCKED)
            if opening.error is not None:
                raise opening.error
        except BaseException:
            if not is_left:
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
    """The index within one transaction."""

    def __init__(self, transaction: lmdb.Transaction, blocks: object, sums: object) -> None:
        """blocks, sums: the databases of the entries and of the sum."""
        self._transaction, self._blocks, self._sums = transaction, blocks, sums

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        found: Iterator[tuple[bytes, bytes]] = self._transaction.cursor(self._blocks).iternext()
        return found

    def get(self, key: bytes) -> bytes | None:
        entry: bytes | None = self._transaction.get(key, db=self._blocks)
        return entry

    @property
    def num(self) -> int:
        entries: int = self._transaction.stat(self._blocks)["entries"]
        return entries

    @property
    def num_bytes(self) -> int:
        found = self._transaction.get(_SUM, db=self._sums)
        return 0 if found is None else int.from_bytes(found, "little")

    def add(self, key: bytes, entry: bytes) -> None:
        if self._transaction.put(key, entry, overwrite=False, db=self._blocks):
            self._sum(ENTRY.unpack(entry)[0])

    def remove(self, key: bytes) -> None:
        entry = self._transaction.pop(key, db=self._blocks)
        if entry is not None:
            self._sum(-ENTRY.unpack(entry)[0])

    def use(self, used: dict[bytes, float]) -> None:
        for key, at in used.items():
            entry = self.get(key)
            if entry is not None:
                size, written, _, owner = ENTRY.unpack(entry)
                self._transaction.put(key, ENTRY.pack(size, written, at, owner), db=self._blocks)

    def _sum(self, change: int) -> None:
        total = max(self.num_bytes + change, 0)
        self._transaction.put(_SUM, total.to_bytes(8, "little"), db=self._sums)


class _Change(threading.Thread):
    """Makes a change, if it gets the lock."""

    def __init__(
        self,
        env: lmdb.Environment,
        act: Callable[[lmdb.Transaction], None],
        close: Callable[[lmdb.Environment], None],
    ) -> None:
        """close: ends the environment of a change that was given up, in its thread."""
        super().__init__(name="cache-index", daemon=True)
        self._env, self._act, self._close = env, act, close
        self._lock = threading.Lock()
        """Guards whether the change begins or is given up."""
        self._has_begun = threading.Event()
        self._is_given_up = False
        self.error: BaseException | None = None
        """What ended the change; nothing was changed then."""

    def is_done(self) -> bool:
        """Whether the change has ended; False if it could not begin and was given up."""
        self.start()
        if not self._has_begun.wait(LOCK_S):
            with self._lock:
                if not self._has_begun.is_set():
                    self._is_given_up = True
                    return False
        self.join()
        return True

    def run(self) -> None:
        transaction = None
        try:
            transaction = self._env.begin(write=True)
        except lmdb.Error as error:
            self.error = error
        with self._lock:
            if not self._is_given_up:
                self._has_begun.set()
        if self._is_given_up:
            if transaction is not None:
                transaction.abort()
            self._close(self._env)
        elif transaction is not None:
            self._make(transaction)

    def _make(self, transaction: lmdb.Transaction) -> None:
        try:
            self._act(transaction)
            transaction.commit()
        except BaseException as error:  # raised where it was asked for
            self.error = error
            transaction.abort()
