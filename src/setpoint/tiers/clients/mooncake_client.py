"""Blocks in a Mooncake store: memory of many machines, which a master assigns."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from setpoint.tiers.store import StoreError

PREFIX = "setpoint-"
DEFAULTS: Mapping[str, str | int] = {
    "local_hostname": "localhost",
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": 4 << 30,
    "local_buffer_size": 1 << 28,
    "protocol": "tcp",
    "device_name": "",
}
"""SGLang's names and defaults; ``local_buffer_size`` is the memory for transfers under way."""


class MooncakeClient:
    """Implements ``remote_store.Client``. Mooncake evicts by its own rules."""

    def __init__(self, settings: Mapping[str, str | int]) -> None:
        """settings: those of DEFAULTS, and ``master_server_address``. Raises StoreError."""
        try:
            library = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise StoreError(
                f"Mooncake's library cannot be used ({error}): pip install"
                " mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine on a GPU machine),"
                " and Debian's packages libibverbs1, librdmacm1 and libnuma1."
            ) from None
        chosen = {**DEFAULTS, **settings}
        self.place = f"mooncake://{chosen['master_server_address']}"
        self._store: Any = library.MooncakeDistributedStore()
        code = self._store.setup(
            str(chosen["local_hostname"]),
            str(chosen["metadata_server"]),
            int(chosen["global_segment_size"]),
            int(chosen["local_buffer_size"]),
            str(chosen["protocol"]),
            str(chosen["device_name"]),
            str(chosen["master_server_address"]),
        )
        if code:
            raise StoreError(f"{self.place} cannot be used: Mooncake's setup failed ({code}).")

    def check(self) -> None:
        """Making the client has asked."""

    def num_leading(self, names: Sequence[str]) -> int:
        found = self._store.batch_is_exist([PREFIX + name for name in names])
        if any(each < 0 for each in found):
            raise OSError(f"Mooncake cannot say what there is ({min(found)})")
        return next((index for index, has in enumerate(found) if not has), len(names))

    def get(self, name: str) -> bytes | None:
        found: bytes = self._store.get(PREFIX + name)
        return found or None  # empty: it is not there

    def head(self, name: str, size: int) -> bytes | None:
        found = self.get(name)
        return None if found is None else found[:size]

    def put(self, name: str, value: bytes) -> bool:
        return int(self._store.put(PREFIX + name, value)) == 0

    def remove(self, name: str) -> None:
        self._store.remove(PREFIX + name, True)

    def names(self) -> None:
        """Mooncake's store does not list its values."""

    def close(self) -> None:
        self._store.close()
