"""Blocks in a Valkey or Redis server."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from setpoint.tiers.remote_store import CALL_S
from setpoint.tiers.store import StoreError

PREFIX = "setpoint:"
SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")
SCAN = 1000
"""Names that the server is asked for at a time."""


class ValkeyClient:
    """Implements ``remote_store.Client``. The server evicts by its own rules (maxmemory-policy) and
    forgets what was not used for ``ttl_s``."""

    def __init__(self, url: str, ttl_s: float | None) -> None:
        """Raises StoreError."""
        try:
            self._library = importlib.import_module("valkey")
        except ImportError:
            raise StoreError(
                "the package valkey is not installed: .venv/bin/pip install -e '.[valkey]'."
            ) from None
        self.place = shown_url(url, SCHEMES)
        self._ttl_ms = None if ttl_s is None else max(int(1000 * ttl_s), 1)
        try:
            self._server: Any = self._library.Valkey.from_url(
                url, socket_timeout=CALL_S, socket_connect_timeout=CALL_S / 2
            )
        except Exception:  # its message would show the password
            raise StoreError(f"{self.place} is not a URL of a Valkey or Redis server.") from None

    def check(self) -> None:
        errors = self._library.exceptions
        try:
            self._server.ping()
        except (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError):
            raise StoreError(f"{self.place} refuses the user or the password of the URL.") from None
        except errors.ResponseError as error:
            raise StoreError(f"{self.place}: {error}.") from None

    def num_leading(self, names: Sequence[str]) -> int:
        with self._server.pipeline(transaction=False) as batch:
            for name in names:
                batch.exists(PREFIX + name)
            found = batch.execute()
        return next((index for index, has in enumerate(found) if not has), len(names))

    def get(self, name: str) -> bytes | None:
        found: bytes | None
        if self._ttl_ms is None:
            found = self._server.get(PREFIX + name)
        else:
            found = self._server.getex(PREFIX + name, px=self._ttl_ms)
        return found

    def head(self, name: str, size: int) -> bytes | None:
        found: bytes = self._server.getrange(PREFIX + name, 0, size - 1)
        return found or None

    def put(self, name: str, value: bytes) -> bool:
        try:
            self._server.set(PREFIX + name, value, px=self._ttl_ms)
        except self._library.exceptions.OutOfMemoryError:
            return False
        return True

    def remove(self, name: str) -> None:
        self._server.delete(PREFIX + name)

    def names(self) -> Iterator[tuple[str, int]]:
        for name in self._server.scan_iter(match=f"{PREFIX}*", count=SCAN):
            yield name.decode().removeprefix(PREFIX), 0

    def close(self) -> None:
        self._server.close()


def shown_url(url: str, schemes: Sequence[str]) -> str:
    """A URL without user, password and parameters. Raises StoreError for one of another kind; the
    message does not show it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise StoreError("the setting url is not a URL.") from None
    if parts.scheme not in schemes:
        known = ", ".join(f"{scheme}://" for scheme in schemes)
        raise StoreError(f"the setting url must begin with one of {known}.")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path}"
