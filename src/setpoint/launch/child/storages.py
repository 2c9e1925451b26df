"""Opens the store of --hicache-storage-backend."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path

from setpoint.config.environment import EnvSettings
from setpoint.config.groups.tiers import StorageConfig
from setpoint.tiers.block_format import HEADER_BYTES
from setpoint.tiers.clients.object_client import ObjectClient
from setpoint.tiers.clients.valkey_client import ValkeyClient
from setpoint.tiers.file_store import FileLimits, FileStore
from setpoint.tiers.remote_store import Client, RemoteStore
from setpoint.tiers.store import Store, StoreError

_METHODS = [name for name, each in vars(Client).items() if isfunction(each) and name[0] != "_"]


@dataclass(slots=True, frozen=True)
class OpenStore:
    """An open store. place: where it is, for people; without passwords."""

    store: Store
    place: str


@dataclass(slots=True, frozen=True)
class Opener:
    """What is known of a rank when its storage is opened."""

    env: EnvSettings
    owner: bytes
    """Names the engine, for ``clear``."""
    block_bytes: int
    """The size of a block of keys and values."""

    def open(self, backend: str, config: StorageConfig) -> OpenStore:
        """Raises StoreError if the storage cannot be used."""
        if backend == "file":
            return self._files(config)
        client = _client(backend, config)
        return OpenStore(RemoteStore(client, self.owner), client.place)

    def _files(self, config: StorageConfig) -> OpenStore:
        max_bytes, needed = config.num_bytes("max_size"), self.block_bytes + HEADER_BYTES
        if max_bytes < needed:
            raise StoreError(
                f"max_size ({config.max_size}) is smaller than one block, which has {needed:,}"
                f" bytes with {config.block_tokens} tokens."
            )
        limits = FileLimits(
            max_bytes=max_bytes,
            min_free_bytes=config.num_bytes("min_free_space"),
            eviction_ratio=config.eviction_ratio,
            ttl_s=float("inf") if config.ttl_seconds is None else config.ttl_seconds,
        )
        folder = Path(config.path or self.env.hicache_folder)
        return OpenStore(FileStore(folder, self.owner, limits), str(folder))


def _client(backend: str, config: StorageConfig) -> Client:
    match backend:
        case "dynamic":
            return _own_client(config)
        case "obstore":
            return ObjectClient(config.url or "", config.options)
        case _:
            return ValkeyClient(config.url or "", config.ttl_seconds)


def _own_client(config: StorageConfig) -> Client:
    """An object of the operator's own class, which is made with the setting ``options`` as
    keywords. Raises StoreError."""
    name = f"{config.module_path}.{config.class_name}"
    try:
        kind = getattr(importlib.import_module(str(config.module_path)), str(config.class_name))
        missing = [each for each in _METHODS if not hasattr(kind, each)]
        if missing:
            raise TypeError(f"it has no {' and no '.join(missing)}")
        client: Client = kind(**config.options)
        if not isinstance(getattr(client, "place", None), str):
            raise TypeError("it has no text in place")
        return client
    except StoreError:
        raise
    except (Exception, SystemExit) as error:  # importing a program may end it
        raise StoreError(
            f"{name} cannot be made: {error!r}. See docs/hierarchical-cache.md, 'Write your own"
            " storage'."
        ) from None
