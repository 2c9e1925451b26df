"""The settings of a cache's storage, as users and clients give them: what cannot be is refused in
words, and nothing is waited for."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from setpoint.config.environment import EnvSettings
from setpoint.config.groups.tiers import (
    StorageConfig,
    TierOptions,
    check_storage,
    storage_config,
)
from setpoint.core.errors import ConfigError, RequestError
from setpoint.core.operations import AttachStorage
from setpoint.launch.child.cache_tiers import CacheTiers
from setpoint.launch.child.storages import Opener
from setpoint.tiers.store import StoreError


def options(text: str, backend: str = "file") -> TierOptions:
    return TierOptions(
        enable_hierarchical_cache=True,
        hicache_storage_backend=backend,
        hicache_storage_backend_extra_config=text,
    )


def opener() -> Opener:
    return Opener(EnvSettings(hicache_folder="/nowhere"), b"o" * 16, 100)


def test_a_file_of_settings_is_a_plain_file_of_limited_size(tmp_path: Path) -> None:
    """Red before: a pipe stopped the engine for ever, and a device filled its memory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * ((1 << 20) + 1))
    (tmp_path / "noise").write_bytes(b"\xff")
    for name in ("pipe", "large", "noise", "absent", "zero\0"):
        with pytest.raises(ConfigError, match="cannot be read"):
            storage_config(options(f"@{tmp_path / name}"))
    for name in ("/dev/zero", "/tmp"):
        with pytest.raises(ConfigError, match="plain file"):
            storage_config(options(f"@{name}"))
    (tmp_path / "right").write_text('{"path": "/x"}')
    (tmp_path / "link").symlink_to(tmp_path / "right")
    assert storage_config(options(f"@{tmp_path / 'link'}")).path == "/x"


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_text_that_can_be_no_path_is_refused(text: str) -> None:
    """Red before: an internal error."""
    for given in ({"path": text}, {"url": text, "options": {}}, {"options": {"region": text}}):
        with pytest.raises(ConfigError, match="zero character"):
            check_storage(options(json.dumps(given)))


def attach(settings: str, **start: Any) -> str:
    """Why a client's storage is refused; empty if it is taken."""
    tiers: Any = CacheTiers.__new__(CacheTiers)
    tiers.mover = tiers.movers = SimpleNamespace(tiers=[], attach=lambda tier: None)
    tiers._setup = SimpleNamespace(storage=StorageConfig(**start))
    tiers.open_storage = lambda backend, config: None
    try:
        tiers.change_storage(AttachStorage("file", settings))
    except RequestError as error:
        return str(error)
    return ""


def test_a_client_makes_the_server_read_no_file(tmp_path: Path) -> None:
    """Red before: the answers told which files there are."""
    answers = {attach(f"@{path}") for path in ("/nonexistent", "/etc/hostname", tmp_path, "")}
    assert len(answers) == 1
    assert "only at the start" in answers.pop()


def test_what_holds_as_long_as_the_server_runs_is_not_changed_in_silence() -> None:
    assert attach("") == attach('{"path": "/x"}') == attach('{"block_tokens": 64}') == ""
    assert "block_tokens is 64 as long" in attach('{"block_tokens": 32}')
    assert "prefetch_threshold is 8 as long" in attach(
        '{"prefetch_threshold": 256}', prefetch_threshold=8
    )


def test_the_log_says_how_long_a_change_holds(caplog: pytest.LogCaptureFixture) -> None:
    assert attach('{"path": "/x"}') == ""
    assert "until this server ends, or a client changes that again" in caplog.text


@pytest.mark.parametrize("order", [None, AttachStorage("file", '{"path": "/x"}')])
def test_a_storage_that_cannot_be_opened_ends_only_the_first_start(
    order: AttachStorage | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Red before: an engine that was started again failed for good with the storage of the command
    line, and the server ended with it."""

    def refuse(backend: str, config: StorageConfig) -> None:
        raise StoreError("The folder is strange.")

    tiers: Any = CacheTiers.__new__(CacheTiers)
    tiers.backend, tiers.open_storage = "file", refuse
    tiers._setup = SimpleNamespace(storage=StorageConfig(), is_restart=True)
    (tier,) = tiers._storage_at_start(order)
    assert tier.off == "The folder is strange."
    assert "The folder is strange" in caplog.text
    tiers._setup.is_restart = False
    with nullcontext() if order else pytest.raises(ConfigError, match="The folder is strange"):
        tiers._storage_at_start(order)


@pytest.mark.parametrize(
    ("module", "name"), [("os", "getcwd"), ("builtins", "int"), ("sys", "exit"), ("nope", "x")]
)
def test_what_is_no_store_is_refused(module: str, name: str) -> None:
    config = StorageConfig(module_path=module, class_name=name)
    with pytest.raises(StoreError, match="cannot be made"):
        opener().open("dynamic", config)


def test_a_class_that_ends_its_process_or_lacks_methods_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red before: the first ended the engine."""

    class Ends:
        check = num_leading = get = head = put = remove = names = close = None

        def __init__(self, *arguments: object) -> None:
            sys.exit(3)

    class Half:
        def num_leading(self) -> None: ...

    module: Any = ModuleType("some_stores")
    module.Ends, module.Half = Ends, Half
    monkeypatch.setitem(sys.modules, "some_stores", module)
    for name, words in (("Ends", "SystemExit"), ("Half", "it has no check and no get")):
        with pytest.raises(StoreError, match=words):
            opener().open("dynamic", StorageConfig(module_path="some_stores", class_name=name))
