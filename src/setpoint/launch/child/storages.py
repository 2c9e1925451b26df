"""Opens the store of --hicache-storage-backend."""

from __future__ import annotations

import importlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from setpoint.config.environment import EnvSettings
from setpoint.config.groups.tiers import StorageConfig
from setpoint.core.errors import ConfigError
from setpoint.tiers.block_format import HEADER_BYTES
from setpoint.tiers.clients.folder_client import FileIO, FolderClient, PosixIO
from setpoint.tiers.clients.mooncake_client import DEFAULTS as MOONCAKE
from setpoint.tiers.clients.mooncake_client import MooncakeClient
from setpoint.tiers.clients.nixl_io import NixlIO
from setpoint.tiers.clients.object_client import ObjectClient
from setpoint.tiers.clients.sglang_client import SGLangClient, sglang_config
from setpoint.tiers.clients.usrbio import LIBRARY, UsrbioIO
from setpoint.tiers.clients.valkey_client import ValkeyClient
from setpoint.tiers.file_store import FileLimits, FileStore
from setpoint.tiers.remote_store import RemoteStore
from setpoint.tiers.store import Store, StoreError

logger = logging.getLogger(__name__)

STORE_METHODS = ("sweep", "num_leading", "get", "put", "clear", "size", "close")
"""The methods of ``tiers.store.Store``."""
HF3FS_CONFIG = "SGLANG_HICACHE_HF3FS_CONFIG_PATH"


class NotSetUpError(StoreError):
    """The storage was asked for, and nothing says where it is. A server starts without it."""


@dataclass(slots=True, frozen=True)
class Storage:
    """An open store. place: where it is, for people; without passwords."""

    store: Store
    place: str


@dataclass(slots=True, frozen=True)
class Opener:
    """What is known of a rank when its storage is opened."""

    env: EnvSettings
    owner: bytes
    """Names the engine, for ``clear``."""
    model: str
    rank: int
    num_ranks: int
    block_bytes: int
    """The size of a block of keys and values."""

    def open(self, backend: str, config: StorageConfig) -> Storage:
        """Raises StoreError if the storage cannot be used."""
        match backend:
            case "file":
                return self._files(config)
            case "dynamic":
                return self._own(config)
            case "valkey" | "redis":
                return self._remote(ValkeyClient(config.url or "", config.ttl_seconds))
            case "obstore":
                return self._remote(ObjectClient(config.url or "", config.options))
            case "hf3fs":
                return self._hf3fs(config)
            case "nixl":
                folder = Path(config.path or "")
                client = FolderClient(folder, NixlIO(config.plugin))
                return self._remote(client, self._max_bytes(config))
            case _:
                names = (*MOONCAKE, "master_server_address")
                given = {name: getattr(config, name) for name in names}
                return self._remote(
                    MooncakeClient({name: value for name, value in given.items() if value})
                )

    def _remote(self, client: Any, max_bytes: int | None = None) -> Storage:
        return Storage(RemoteStore(client, self.owner, max_bytes=max_bytes), client.place)

    def _max_bytes(self, config: StorageConfig) -> int:
        """Raises StoreError if the storage could not hold a single block."""
        found, needed = config.num_bytes("max_size"), self.block_bytes + HEADER_BYTES
        if found < needed:
            raise StoreError(
                f"max_size ({config.max_size}) is smaller than one block, which has {needed:,}"
                f" bytes with {config.block_tokens} tokens."
            )
        return found

    def _files(self, config: StorageConfig) -> Storage:
        limits = FileLimits(
            max_bytes=self._max_bytes(config),
            min_free_bytes=config.num_bytes("min_free_space"),
            eviction_ratio=config.eviction_ratio,
            ttl_s=float("inf") if config.ttl_seconds is None else config.ttl_seconds,
        )
        folder = Path(config.path or self.env.hicache_folder)
        return Storage(FileStore(folder, self.owner, limits), str(folder))

    def _hf3fs(self, config: StorageConfig) -> Storage:
        """Blocks as files of a mounted 3FS: through its own library if that is installed, else
        through the operating system, which works as well and is slower."""
        if config.path:
            folder, max_bytes = Path(config.path), self._max_bytes(config)
        elif self.env.hf3fs_config:
            folder, max_bytes = _sglangs_hf3fs(Path(self.env.hf3fs_config))
        else:
            raise NotSetUpError(
                "hf3fs needs a folder of a mounted 3FS, and none is named. Give path in"
                f" --hicache-storage-backend-extra-config, or set {HF3FS_CONFIG}. Without a 3FS,"
                " --hicache-storage-backend file keeps prefixes in files of this machine."
            )
        io: FileIO
        try:
            io = UsrbioIO(folder.parent)
        except ImportError:
            io = PosixIO()
            logger.warning(
                "3FS's client (%s, which is built with 3FS) is not installed: the cache in %s is"
                " read and written as plain files, which is slower.",
                *(LIBRARY.partition(".")[0], folder),
            )
        return self._remote(FolderClient(folder, io), max_bytes)

    def _own(self, config: StorageConfig) -> Storage:
        """A class of the user's own: of our interface (``tiers.store.Store``) or of SGLang's."""
        name = f"{config.module_path}.{config.class_name}"
        try:
            kind = getattr(importlib.import_module(str(config.module_path)), str(config.class_name))
            if not isinstance(kind, type):
                raise TypeError("it is no class")
            if hasattr(kind, "num_leading"):
                missing = [each for each in STORE_METHODS if not hasattr(kind, each)]
                if missing:
                    raise TypeError(f"it has no {' and no '.join(missing)}")
                return Storage(kind(), name)
            if not all(hasattr(kind, method) for method in ("exists", "get", "set")):
                raise TypeError("it has neither num_leading nor exists, get and set")
            extra = {**msgspec.structs.asdict(config), **config.options}
            made = kind(sglang_config(self.rank, self.num_ranks, self.model, extra), {})
        except (Exception, SystemExit) as error:  # importing a program may end it
            raise StoreError(f"{name} cannot be made: {error!r}.") from None
        size = self.block_bytes + HEADER_BYTES
        return self._remote(
            SGLangClient(made, size, lambda num: torch.empty(num, dtype=torch.uint8))
        )


def _sglangs_hf3fs(path: Path) -> tuple[Path, int]:
    """(folder, most bytes) of SGLang's file about 3FS. Its file_path_prefix begins the names of
    files; here it begins the name of a folder."""
    try:
        found = json.loads(path.read_text())
        return Path(f"{found['file_path_prefix']}.setpoint"), int(found["file_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{HF3FS_CONFIG}: {path} must be a JSON file with file_path_prefix and file_size:"
            f" {error!r}."
        ) from None
