"""Blocks in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from setpoint.tiers.clients.valkey_client import shown_url
from setpoint.tiers.remote_store import CALL_S
from setpoint.tiers.store import StoreError

SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file", "memory")


class ObjectClient:
    """Implements ``remote_store.Client``. Nothing is removed but damaged blocks and by ``clear``: a
    bucket has rules for the age of objects."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        """url: a bucket, and a prefix of the names. options: what obstore calls the configuration;
        it also reads the variables of the environment that the clouds' tools read. Raises
        StoreError."""
        try:
            self._library: Any = importlib.import_module("obstore")
            stores = importlib.import_module("obstore.store")
        except ImportError:
            raise StoreError(
                "the package obstore is not installed: .venv/bin/pip install -e '.[obstore]'."
            ) from None
        self.place = shown_url(url, SCHEMES)
        more: dict[str, Any] = {}
        if url.startswith("file:"):
            more["mkdir"] = True
        elif not url.startswith("memory:"):
            more = {
                "config": dict(options),
                "client_options": {
                    "timeout": timedelta(seconds=CALL_S),
                    "connect_timeout": timedelta(seconds=CALL_S / 2),
                    "allow_http": True,
                },
                "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=CALL_S)},
            }
        try:
            self._store: Any = stores.from_url(url, **more)
        except Exception as error:
            why = str(error).splitlines()[0].rstrip(".")
            raise StoreError(f"{self.place} cannot be used: {why}.") from None

    def check(self) -> None:
        errors = self._library.exceptions
        try:
            next(iter(self._library.list(self._store, chunk_size=1)), None)
        except (
            errors.PermissionDeniedError,
            errors.UnauthenticatedError,
            errors.NotFoundError,
            FileNotFoundError,
            PermissionError,
        ) as error:
            why = str(error).splitlines()[0].rstrip(".")
            raise StoreError(f"{self.place} cannot be used: {why}.") from None

    def num_leading(self, names: Sequence[str]) -> int:
        """The search halves the names: a request takes tens of milliseconds, and who has a block
        nearly always has those before it. If not, a load ends at the first one that is missing."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if self._has(names[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _has(self, name: str) -> bool:
        try:
            self._library.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def get(self, name: str) -> memoryview | None:
        try:
            return memoryview(self._library.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def head(self, name: str, size: int) -> bytes | None:
        try:
            return bytes(self._library.get_range(self._store, name, start=0, length=size))
        except FileNotFoundError:
            return None

    def put(self, name: str, value: bytes) -> bool:
        self._library.put(self._store, name, value, use_multipart=False)
        return True

    def remove(self, name: str) -> None:
        try:
            self._library.delete(self._store, name)
        except FileNotFoundError:
            return

    def names(self) -> Iterator[tuple[str, int]]:
        for chunk in self._library.list(self._store):
            for each in chunk:
                yield each["path"], each["size"]

    def close(self) -> None:
        """There is nothing to do."""
