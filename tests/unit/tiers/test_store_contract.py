"""What every store of blocks promises, over every storage that is installed here: what comes back is
what was put there, or nothing, and who fails or hangs is reported in time."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import setpoint
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.tiers import StorageConfig
from setpoint.launch.child.storages import Opener
from setpoint.tiers.block_format import HEADER_BYTES, framed
from setpoint.tiers.clients.valkey_client import ValkeyClient
from setpoint.tiers.mover import MAX_ERRORS, Tier
from setpoint.tiers.remote_store import RemoteStore, within
from setpoint.tiers.store import StoreError
from setpoint_testing.valkey_server import PASSWORD, missing, valkey_server

SIZE = 60
Make = Callable[[bytes], RemoteStore]
has = importlib.util.find_spec


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)


def opener(owner: bytes = b"o" * 16) -> Opener:
    return Opener(EnvSettings(), owner, SIZE)


def test_a_storage_that_cannot_hold_a_block_is_refused(tmp_path: Path) -> None:
    """Red before: it started, and refused every block in silence."""
    with pytest.raises(StoreError, match="is smaller than one block"):
        opener().open("file", StorageConfig(path=str(tmp_path), max_size="10"))


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if missing():
        pytest.skip(missing())
    with valkey_server(tmp_path_factory.mktemp("valkey")) as url:
        yield url


def own_client() -> types.ModuleType:
    """The class that the page shows, in a module."""
    page = (Path(setpoint.__file__).parents[2] / "docs/hierarchical-cache.md").read_text()
    section = page.partition("## Write your own storage")[2]
    module = types.ModuleType("my_storage")
    exec(section.partition("```python\n")[2].partition("```")[0], vars(module))
    return module


def clients(tmp_path: Path) -> dict[str, StorageConfig]:
    return {
        "obstore": StorageConfig(url=f"file://{tmp_path}/bucket"),
        "dynamic": StorageConfig(
            module_path="my_storage",
            class_name="SqliteStorage",
            options={"file": str(tmp_path / "blocks.sqlite")},
        ),
    }


@pytest.fixture(params=["valkey", "obstore", "dynamic"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes stores over the same values."""
    name = request.param
    monkeypatch.setitem(sys.modules, "my_storage", own_client())
    if name == "valkey":
        config = StorageConfig(url=request.getfixturevalue("valkey_url"))
        ValkeyClient(str(config.url), None)._server.flushall()
    else:
        config = clients(tmp_path)[name]
    if name == "obstore" and has("obstore") is None:
        pytest.skip("needs the package obstore")
    made: list[RemoteStore] = []

    def build(owner: bytes) -> RemoteStore:
        store = opener(owner).open(name, config).store
        assert isinstance(store, RemoteStore)
        made.append(store)
        store.sweep()
        return store

    yield build
    for store in made:
        store.close()


def test_what_was_put_there_comes_back_also_in_another_store(make: Make) -> None:
    store, other = make(b"o" * 16), make(b"p" * 16)
    assert store.put(key(1), block(1)) == HEADER_BYTES + SIZE
    assert store.put(key(1), block(1)) == 0, "it is there"
    other.put(key(2), block(2))
    assert store.num_leading([key(1), key(2), key(3)]) == 2
    assert store.num_leading([]) == 0
    assert store.get(key(3)) is None
    assert (store.get(key(2)) == block(2)).all()  # type: ignore[union-attr]
    assert (other.get(key(1)) == block(1)).all()  # type: ignore[union-attr]
    assert other.size() == (1, HEADER_BYTES + SIZE)


def test_what_is_changed_cut_or_foreign_is_a_miss(make: Make) -> None:
    store = make(b"o" * 16)
    whole = framed(key(1), b"o" * 16, block(1))
    places = {*range(0, len(whole), 7), len(whole) - 1}
    changed = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in sorted(places)]
    foreign = framed(key(2), b"o" * 16, block(2))
    damaged = [*changed, whole[:-1], whole[:40], whole + b"x", foreign, os.urandom(len(whole))]
    for number, data in enumerate(damaged):
        store._client.put(key(1).hex(), data)
        assert store.get(key(1)) is None, number
    assert store.counts.damaged == len(damaged)
    store._client.put(key(1).hex(), whole)
    assert (store.get(key(1)) == block(1)).all()  # type: ignore[union-attr]


def test_only_an_owners_blocks_are_cleared(make: Make) -> None:
    mine, theirs = make(b"o" * 16), make(b"p" * 16)
    for number in range(5):
        mine.put(key(number), block(number))
    theirs.put(key(9), block(9))
    assert mine.clear() == 5
    assert mine.num_leading([key(0)]) == 0
    assert mine.size() == (0, 0)
    assert theirs.num_leading([key(9)]) == 1


def test_threads_of_two_stores_see_whole_blocks(make: Make) -> None:
    stores = [make(b"o" * 16), make(b"p" * 16)]
    wrong: list[int] = []

    def work(store: RemoteStore, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in map(int, rng.integers(0, 20, 25)):
            store.put(key(number), block(number))
            found = store.get(key(number))
            if found is None or not (found == block(number)).all():
                wrong.append(number)

    threads = [
        threading.Thread(target=work, args=(stores[at % 2], at), daemon=True) for at in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not sum(store.counts.damaged for store in stores)


def test_who_fails_or_hangs_three_times_is_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(b"o" * 16)
    tier = Tier("storage", store)
    free = threading.Event()

    def fails(*_: object) -> Any:
        raise RuntimeError("the cable\nis out")

    def hangs(*_: object) -> Any:
        free.wait()

    store._limit_s = 0.05
    try:
        for act in (fails, hangs):
            monkeypatch.setattr(store._client, "get", act)
            with pytest.raises(StoreError) as caught:
                store.get(key(1))
            assert "\n" not in str(caught.value)
        for _ in range(MAX_ERRORS):
            assert tier.try_(lambda each: each.get(key(1))) is None
        assert f"did not answer within {store._limit_s} s" in tier.off
    finally:
        free.set()


# ---------------------------------------------------------------------- one storage at a time


def test_a_valkey_server_forgets_and_may_be_full(valkey_url: str) -> None:
    client = ValkeyClient(valkey_url, ttl_s=30)
    client._server.flushall()
    store = RemoteStore(client, b"o" * 16)
    store.put(key(1), block(1))
    name = f"setpoint:{key(1).hex()}"
    client._server.pexpire(name, 5000)
    store.get(key(1))
    assert 5000 < client._server.pttl(name) <= 30_000, "each use lets it live on"
    client._server.config_set("maxmemory", 1)
    try:
        assert store.put(key(2), block(2)) == 0
    finally:
        client._server.config_set("maxmemory", "64mb")
    assert store.counts.refused == 1


def test_passwords_are_nowhere(valkey_url: str, caplog: pytest.LogCaptureFixture) -> None:
    wrong = valkey_url.replace(PASSWORD, "s3cret")
    with pytest.raises(StoreError, match="refuses the user or the password") as caught:
        opener().open("valkey", StorageConfig(url=wrong))
    assert opener().open("valkey", StorageConfig(url=valkey_url)).place.startswith("redis://127")
    dead = "redis://u:s3cret@127.0.0.1:1/0"
    store = opener().open("valkey", StorageConfig(url=dead)).store  # it may come later
    with pytest.raises(StoreError) as not_there:
        store.get(key(1))
    for text in (str(caught.value), str(not_there.value), caplog.text):
        assert "s3cret" not in text
    assert "cannot be reached now" in caplog.text


@pytest.mark.parametrize(
    "url", ["redis://u:s3cret@[::1", "http://u:s3cret@h", "redis://s3cret@h:x"]
)
def test_what_is_no_url_of_a_server_is_refused_without_being_shown(url: str) -> None:
    pytest.importorskip("valkey")
    with pytest.raises(StoreError) as caught:
        opener().open("redis", StorageConfig(url=url))
    assert "s3cret" not in str(caught.value)


def test_an_object_store_of_a_cloud_is_opened_without_showing_its_keys() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(
        StoreError, match=r"s3://bucket/prefix cannot be used: .*'s3_typo' is not"
    ) as caught:
        opener().open(
            "obstore",
            StorageConfig(
                url="s3://bucket/prefix", options={"secret_access_key": "s3cret", "s3_typo": "x"}
            ),
        )
    assert "s3cret" not in str(caught.value)
    with pytest.raises(StoreError, match="must begin with one of s3://"):
        opener().open("obstore", StorageConfig(url="ftp://bucket"))


def test_clients_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("valkey", "obstore"):
        monkeypatch.setitem(sys.modules, name, None)
    for backend, config, words in (
        ("valkey", StorageConfig(url="redis://h"), "pip install -e '\\.\\[valkey\\]'"),
        ("obstore", StorageConfig(url="s3://b"), "pip install -e '\\.\\[obstore\\]'"),
    ):
        with pytest.raises(StoreError, match=words):
            opener().open(backend, config)


class NoStorage:
    """A class that has nothing of a storage."""


def test_a_class_that_is_no_storage_is_refused() -> None:
    for name, words in (("NoStorage", "it has no check and no num_leading"), ("Nothing", "cannot")):
        with pytest.raises(StoreError, match=words) as caught:
            opener().open("dynamic", StorageConfig(module_path=__name__, class_name=name))
        assert "Write your own storage" in str(caught.value)


def test_a_call_returns_raises_or_is_given_up() -> None:
    assert within(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(5, lambda: {}[1])
    free = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, free.wait)
    free.set()
