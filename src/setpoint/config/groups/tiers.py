"""The group of options "Cache tiers" (docs/hierarchical-cache.md)."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import msgspec

from setpoint.config.groups.declare import Option
from setpoint.config.groups.human import parse_human_int
from setpoint.config.groups.values import json_object
from setpoint.core.conversion import convert
from setpoint.core.errors import ConfigError
from setpoint.core.excerpt import excerpt
from setpoint.core.plain_file import SETTINGS_MIB, read_plain
from setpoint.core.wording import validation_message

GROUP = "Cache tiers"
EXTRA = "--hicache-storage-backend-extra-config"
BACKENDS = ("file", "valkey", "redis", "obstore", "dynamic")
COMMON = frozenset(
    {"prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "block_tokens"}
)
"""Settings of every backend, which hold as long as the server runs."""
SETTINGS: Mapping[str, frozenset[str]] = {
    "file": frozenset({"path", "max_size", "min_free_space", "eviction_ratio", "ttl_seconds"}),
    "valkey": frozenset({"url", "ttl_seconds"}),
    "redis": frozenset({"url", "ttl_seconds"}),
    "obstore": frozenset({"url", "options"}),
    "dynamic": frozenset({"module_path", "class_name", "options"}),
}
"""Backend -> the settings that it has besides those."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "valkey": ("url",),
    "redis": ("url",),
    "obstore": ("url",),
    "dynamic": ("module_path", "class_name"),
}
EXCLUSIVE = (
    "The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and"
    " cannot be used at the same time. Please use only one of them."
)


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about places in which the prefix cache is kept besides the KV pool."""

    enable_hierarchical_cache: Annotated[
        bool,
        Option(
            GROUP,
            "Keep prefixes in further places than the KV pool: in host memory if the pool is in a"
            " GPU's, and in what --hicache-storage-backend names.",
        ),
    ] = False
    hicache_ratio: Annotated[
        float | None,
        Option(
            GROUP,
            "Size of the host tier, as a multiple of the KV pool; 2 if not given.",
            low=0,
        ),
    ] = None
    hicache_size: Annotated[
        int,
        Option(GROUP, "Size of the host tier in GB for each rank, instead of the ratio.", low=0),
    ] = 0
    hicache_write_policy: Annotated[
        str,
        Option(
            GROUP,
            "When prefixes are saved: when their request ends (write_through), when that happens a"
            " second time (write_through_selective), or before they are evicted (write_back).",
            choices=("write_through", "write_through_selective", "write_back"),
        ),
    ] = "write_through"
    hicache_io_backend: Annotated[
        str,
        Option(
            GROUP,
            "How pages are copied between a GPU and host memory.",
            choices=("kernel", "direct"),
            no_effect="pages are copied by their own threads, in one way",
        ),
    ] = "kernel"
    hicache_mem_layout: Annotated[
        str,
        Option(
            GROUP,
            "The order of numbers in host memory.",
            choices=("page_first", "layer_first", "page_first_direct"),
            no_effect="a block has one layout in every tier, so that tiers can copy it",
        ),
    ] = "page_first"
    hicache_storage_backend: Annotated[
        str | None,
        Option(
            GROUP,
            "Keep prefixes beyond this server's life: in files of a folder (file), a Valkey or"
            " Redis server, an object store (obstore), or a class of your own (dynamic).",
            choices=BACKENDS,
        ),
    ] = None
    hicache_storage_prefetch_policy: Annotated[
        str,
        Option(
            GROUP,
            "How long a request waits for its prefix: not longer than until it could run"
            " (best_effort), until all is loaded (wait_complete), or for a time that grows with the"
            " number of tokens (timeout).",
            choices=("best_effort", "wait_complete", "timeout"),
        ),
    ] = "timeout"
    hicache_storage_backend_extra_config: Annotated[
        str | None,
        Option(
            GROUP,
            "JSON object, or @FILE with one, with settings of the storage"
            " (docs/hierarchical-cache.md).",
            metavar="JSON",
            secret=True,
        ),
    ] = None


class StorageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """--hicache-storage-backend-extra-config. Sizes are bytes, or human integers such as "20Gi"."""

    prefetch_threshold: Annotated[int, msgspec.Meta(ge=1)] = 256
    prefetch_timeout_base: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    prefetch_timeout_per_ki_token: Annotated[float, msgspec.Meta(ge=0)] = 0.25
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    path: str | None = None
    """The folder of the backend file."""
    max_size: str | int = "16Gi"
    min_free_space: str | int = "2Gi"
    eviction_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    url: str | None = None
    """Address of a server or a bucket. It may contain a password, so it is never shown."""
    options: dict[str, str] = {}
    """What obstore calls the configuration of a cloud (region, endpoint, keys); for the dynamic
    backend, the keywords with which its class is made."""
    module_path: str | None = None
    """This and class_name name the class of the dynamic backend."""
    class_name: str | None = None

    def num_bytes(self, name: str) -> int:
        """A size in bytes. Raises ConfigError."""
        value = getattr(self, name)
        try:
            found = value if isinstance(value, int) else parse_human_int(value)
        except ValueError as error:
            raise ConfigError(f"{EXTRA}: {name}: {error}") from None
        if found < 0:
            raise ConfigError(f"{EXTRA}: {name} must not be negative.")
        return found


def given_settings(options: TierOptions) -> frozenset[str]:
    """The names of the settings that are given. Raises ConfigError."""
    return frozenset(_given(options))


def _given(options: TierOptions) -> dict[str, Any]:
    text = options.hicache_storage_backend_extra_config
    if text is None:
        return {}
    if text.startswith("@"):
        text = _file_text(text[1:])
    try:
        return json_object(EXTRA, text, example='{"max_size": "20Gi"}')
    except ConfigError as error:
        given = options.hicache_storage_backend_extra_config or ""
        name = given if given.endswith(".json") else "FILE"
        hint = "" if given.lstrip().startswith(("{", "@")) else f" For a file, write @{name}."
        raise ConfigError(f"{error}{hint}") from None


def storage_config(options: TierOptions) -> StorageConfig:
    """The settings of the storage. Raises ConfigError for what is not understood."""
    found = _given(options)
    for name in found:
        if name not in StorageConfig.__struct_fields__:
            raise ConfigError(_not_a_setting(name, options.hicache_storage_backend))
    try:
        config = convert(found, StorageConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{EXTRA}: {validation_message(error)}") from None
    if config.path == "":
        raise ConfigError(f"{EXTRA}: path is empty: name a folder, or leave it out.")
    config.num_bytes("max_size")
    config.num_bytes("min_free_space")
    for name in StorageConfig.__struct_fields__:
        value = getattr(config, name)
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, str) and not _is_plain(each):
                raise ConfigError(
                    f"{EXTRA}: {name} has a zero character or half a surrogate pair in it."
                )
    return config


def _file_text(path: str) -> str:
    """The text of @FILE. Raises ConfigError."""
    try:
        return read_plain(path, SETTINGS_MIB).decode()
    except OSError as error:
        raise ConfigError(f"{EXTRA}: {path!r} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{EXTRA}: {path!r} cannot be read: it is not UTF-8 text.") from None


def _is_plain(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _not_a_setting(name: str, backend: str | None) -> str:
    known = COMMON | SETTINGS.get(backend or "", frozenset())
    near = get_close_matches(name, sorted(known), n=1)
    others = f"; the nearest is {near[0]}" if near else f". It has {', '.join(sorted(known))}"
    return f"{EXTRA}: {excerpt(name)} is not a setting of {backend or 'a storage'}{others}."


def check_tiers(options: TierOptions, *, has_cache: bool) -> None:
    """Raise ConfigError for options that contradict each other."""
    if options.enable_hierarchical_cache and not has_cache:
        raise ConfigError(EXCLUSIVE)
    backend = options.hicache_storage_backend
    if backend is not None and not options.enable_hierarchical_cache:
        raise ConfigError(
            "--hicache-storage-backend needs --enable-hierarchical-cache; give both or neither."
        )
    check_storage(options)


def check_storage(options: TierOptions) -> None:
    """Raise ConfigError for a storage that cannot be."""
    backend, config = options.hicache_storage_backend, storage_config(options)
    if backend is None:
        return
    if backend not in BACKENDS:
        raise ConfigError(f"The storage must be one of {', '.join(BACKENDS)}; got {backend!r}.")
    known, default = COMMON | SETTINGS[backend], StorageConfig()
    for name in StorageConfig.__struct_fields__:
        if name not in known and getattr(config, name) != getattr(default, name):
            raise ConfigError(_not_a_setting(name, backend))
    missing = [name for name in NEEDED.get(backend, ()) if not getattr(config, name)]
    if missing:
        raise ConfigError(
            f"--hicache-storage-backend {backend} needs {EXTRA} with {' and '.join(missing)}."
        )
