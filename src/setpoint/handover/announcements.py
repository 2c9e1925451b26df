"""How a decode server knows the prefill servers of its own user on its own machine: each leaves a
file that only this user can read, with its address and a key, and locks it as long as it lives.
Nothing that a client sends can add one (docs/decisions/0084-who-is-trusted.md)."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from setpoint.core.content_digest import cache_folder
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.file_lock import locked
from setpoint.core.handshake import SIZE
from setpoint.core.own_files import open_own
from setpoint.handover.segments import machine_name

logger = logging.getLogger(__name__)

WILDCARDS = ("", "0.0.0.0", "::")
LOOPBACKS = ("127.0.0.1", "::1")
MAX_FILE = 4096
FLAG = "--disaggregation-prefill-servers"
NAME = re.compile(r"[0-9a-f]{32}")
"""The names of the files (``_path``)."""


class Announcement(msgspec.Struct, frozen=True):
    host: str
    """Where a decode server of this machine reaches the bootstrap server."""
    port: int
    key: Annotated[bytes, Meta(min_length=SIZE, max_length=SIZE)]


def folder() -> Path:
    return cache_folder().parent / "prefill-servers"


@contextmanager
def announced(host: str, port: int, key: bytes) -> Iterator[None]:
    """A context in which decode servers of this user find the bootstrap server that listens at this
    address. If the file cannot be written, they do not, and the log says so. The files of servers
    that were killed are removed."""
    path = _path(host, port)
    reached = LOOPBACKS[0] if host in WILDCARDS else host
    data = msgspec.json.encode(Announcement(reached, port, key))
    try:
        descriptor = _create(path, data)
    except OSError as error:
        logger.warning(
            "Decode servers of this machine do not know this server unless they name it with %s,"
            " because %s cannot be written: %s.",
            *(FLAG, path, error.strerror),
        )
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _create(path: Path, data: bytes) -> int:
    """Write and lock a server's file. Returns its descriptor, which holds the lock. Raises
    OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Without this lock another server might take a file that is not locked yet for one left behind.
    with locked(path.parent / "lock"):
        _remove_left_behind(path.parent)
        path.unlink(missing_ok=True)  # of a server that was killed: this one has got its port
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, data)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def _remove_left_behind(folder: Path) -> None:
    """Remove the files of servers that were killed: nobody holds their locks."""
    for path in folder.iterdir():
        with suppress(OSError):
            descriptor = open_own(path) if NAME.fullmatch(path.name) else None
            if descriptor is None:
                continue
            try:
                if not _is_locked(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)


def find(host: str, port: int) -> Announcement | None:
    """The prefill server of this user whose bootstrap server listens at this address of this
    machine; None if there is none."""
    names = LOOPBACKS if host == "localhost" else (host,)
    for name in names:
        for listens_at in (name, *(WILDCARDS if _is_own(name) else ())):
            found = _read(_path(listens_at, port))
            if found is not None:
                return found
    return None


def key_of(host: str, port: int) -> bytes | None:
    found = find(host, port)
    return None if found is None else found.key


class AnnouncedServers:
    """Implements ``frontend.pairing.KnownServers`` for a decode server that was told of none."""

    def known(self, host: str, port: int) -> tuple[str, int]:
        """Raises RequestError."""
        found = find(host, port)
        if found is None:
            raise RequestError(
                f"bootstrap_host {excerpt(host)} with port {port} is no prefill server that this"
                f" server knows: name it with {FLAG} http://HOST:PORT. Without that option this"
                " server knows those of its own user on its own machine."
            )
        return found.host, found.port


def _path(host: str, port: int) -> Path:
    """The file's name also names this machine and its network, in which the address has a meaning:
    containers may share the folder."""
    place = machine_name()
    with suppress(OSError):
        place += os.readlink("/proc/self/ns/net")
    return folder() / hashlib.sha256(f"{place} {port} {host}".encode()).hexdigest()[:32]


def _read(path: Path) -> Announcement | None:
    """What a file says, if its server lives."""
    try:
        descriptor = open_own(path)
    except (OSError, ValueError):
        return None
    if descriptor is None:
        return None
    try:
        if os.fstat(descriptor).st_mode & 0o077 or not _is_locked(descriptor):
            return None
        found = msgspec.json.decode(os.read(descriptor, MAX_FILE), type=Announcement)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    finally:
        os.close(descriptor)
    return found


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_own(host: str) -> bool:
    """Whether this is an address of this machine. Names are not looked up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.inet_ntop(family, address), 0))
    except OSError:
        return False
    return True
