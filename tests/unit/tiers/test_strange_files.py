"""What others, or a mishap, have put into a cache's folder: links, pipes, folders, files of strangers,
a folder that is no cache, an index that is damaged."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from setpoint.tiers import file_store
from setpoint.tiers.file_store import FileLimits, FileStore
from setpoint.tiers.mover import Tier
from setpoint.tiers.store import StoreError

LIMITS = FileLimits(1 << 30, 0)


def opened(folder: Path) -> FileStore:
    store = FileStore(folder, b"o" * 16, LIMITS)
    store.sweep()
    return store


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def block(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 255, 500, dtype=np.uint8)


def filled(folder: Path, count: int = 200) -> FileStore:
    store = opened(folder)
    for number in range(count):
        store.put(key(number), block(number))
    return store


def check(store: FileStore, count: int = 200) -> None:
    for number in range(count):
        assert (store.get(key(number)) == block(number)).all(), number  # type: ignore[union-attr]


def mails(folder: Path) -> Path:
    """A folder with mail in it, which has a folder of the same name as a cache."""
    (folder / "new").mkdir(parents=True)
    for name in ("1700000000.M1P2.host", "important.txt"):
        path = folder / "new" / name
        path.write_text("a letter")
        os.utime(path, (1, 1))
    return folder


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """Red before: everything in ``new`` that was older than ten minutes was removed."""
    folder = mails(tmp_path / "mail")
    with pytest.raises(StoreError, match="something else than a cache"):
        opened(folder)
    assert len(list((folder / "new").iterdir())) == 2


def test_only_files_of_a_cache_are_removed(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    mails(tmp_path / "mail")
    for path in (tmp_path / "mail" / "new").iterdir():
        path.rename(tmp_path / "new" / path.name)
    strange = tmp_path / "blocks" / "ab" / "abcd.kv"
    strange.parent.mkdir(mode=0o700, exist_ok=True)
    strange.symlink_to(tmp_path)
    store.sweep()
    assert len(list((tmp_path / "new").iterdir())) == 2
    assert strange.is_symlink()
    assert store.size()[0] == 1


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "cache").close()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    with pytest.raises(StoreError, match="symbolic link"):
        opened(tmp_path / "link")


@pytest.mark.parametrize("name", ["blocks", "blocks/ab", "index", "new"])
def test_each_folder_of_a_cache_belongs_to_its_user(tmp_path: Path, name: str) -> None:
    """Red before: only the one around them was looked at."""
    cache = tmp_path / "cache"
    opened(cache).close()
    folder = cache / name
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o777)
    with pytest.raises(StoreError, match="chmod go-w"):
        opened(cache)
    folder.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        with pytest.raises(StoreError, match="belongs to another user"):
            opened(cache)
        os.chown(folder, 0, -1)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        opened(cache)


def pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def link_to_the_block(path: Path) -> None:
    """With the right bytes."""
    path.with_suffix(".gone").rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def file_of_all(path: Path) -> None:
    path.with_suffix(".gone").rename(path)
    path.chmod(0o666)


@pytest.mark.parametrize(
    "put_there", [pipe, folder_with_a_file, link_to_itself, link_to_the_block, file_of_all]
)
@pytest.mark.parametrize("when", ["a read", "a sweep"])
def test_what_stands_in_a_blocks_place_is_a_miss(
    tmp_path: Path, put_there: Callable[[Path], None], when: str
) -> None:
    """Red before: a pipe held the thread for ever, the others were errors and stayed."""
    store = filled(tmp_path, 2)
    path = store._path(key(1))
    path.rename(path.with_suffix(".gone"))
    put_there(path)
    found: list[object] = []

    def act() -> None:
        if when == "a sweep":
            store._forget(key(1))
            store.sweep()
        found.append(store.get(key(1)))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(20)
    assert found == [None]
    assert store.counts.damaged == 1
    assert not os.path.lexists(path)
    assert store.put(key(1), block(1))
    check(store, 2)


def damage_headers(path: Path, seed: int) -> None:
    """Change the beginnings of an index's pages."""
    rng, data = random.Random(seed), bytearray(path.read_bytes())
    for page in range(2, len(data) // 4096):
        if rng.random() < 0.5:
            for _ in range(4):
                data[4096 * page + rng.randrange(64)] = rng.randrange(256)
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(6))
def test_an_index_with_damaged_pages_is_made_again(tmp_path: Path, seed: int) -> None:
    """Red before: such a page ended the process, or was an error at each use, for ever."""
    filled(tmp_path).close()
    damage_headers(tmp_path / "index" / "data.mdb", seed)
    store = opened(tmp_path)
    check(store)
    assert store.size()[0] == 200
    assert store.clear() == 200


@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 20000])
def test_an_index_that_is_cut_while_it_is_used_is_made_again(tmp_path: Path, size: int) -> None:
    """Red before: the next lookup ended the process (SIGBUS)."""
    store = filled(tmp_path)
    os.truncate(tmp_path / "index" / "data.mdb", size)
    assert store.num_leading([key(number) for number in range(200)]) in (0, 200)
    check(store)
    assert store.put(key(300), block(300))
    assert store.size()[0] == 201
    assert not list(tmp_path.glob("index.bad.*"))


def test_an_index_that_is_removed_while_it_is_used_is_made_again(tmp_path: Path) -> None:
    store = filled(tmp_path, 10)
    shutil.rmtree(tmp_path / "index")
    store.get(key(0))  # may be a miss
    check(store, 10)
    assert store.size()[0] == 10


def test_a_folder_that_is_emptied_while_it_is_used_is_made_again_whole(tmp_path: Path) -> None:
    """Red before: only the index came back, the first lookup was a traceback, and the next store of
    the folder was refused, because it had an index and no blocks."""
    store = filled(tmp_path, 3)
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    tier = Tier("storage", store)
    assert tier.try_(lambda each: each.num_leading([key(0)])) == 0
    assert store.put(key(0), block(0))
    check(store, 1)
    shutil.rmtree(tmp_path / "new")
    shutil.rmtree(tmp_path / "blocks")
    assert store.get(key(0)) is None
    assert store.put(key(1), block(1)), "blocks/ and new/ alone are made again, too"
    store.close()
    again = opened(tmp_path)
    assert again.num_leading([key(1)]) == 1


def test_folders_that_vanish_during_a_sweep_are_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red before: a traceback in the log."""
    store = filled(tmp_path, 3)
    shutil.rmtree(tmp_path / "index")
    tier = Tier("storage", store)
    assert tier.try_(lambda each: each.num_leading([key(0)])) == 0, "it is made again"
    shutil.rmtree(tmp_path / "new")
    with monkeypatch.context() as patched:
        patched.setattr(file_store, "claim_parts", lambda folder: None, raising=False)
        assert tier.try_(lambda each: each.num_leading([key(0)])) is None
    assert "Traceback" not in caplog.text
    assert "is gone" in caplog.text
    assert tier.try_(lambda each: each.num_leading([key(0)])) == 1, "the next use fills the index"


def test_a_store_that_is_in_use_keeps_its_index(tmp_path: Path) -> None:
    """Red before: opening it a second time in one process was taken for damage."""
    store = filled(tmp_path, 3)
    with pytest.raises(StoreError, match="already open"):
        opened(tmp_path)
    check(store, 3)
    assert not list(tmp_path.glob("index.bad.*"))
    store.close()
    again = opened(tmp_path)
    check(again, 3)


def test_what_is_left_of_a_damaged_index_is_removed(tmp_path: Path) -> None:
    (tmp_path / "index.bad.1a-2b").mkdir(parents=True)
    (tmp_path / "index.bad.1a-2b" / "data.mdb").write_text("")
    (tmp_path / "index.bad.mine").mkdir()
    opened(tmp_path)
    assert [path.name for path in tmp_path.glob("index.bad.*")] == ["index.bad.mine"]


def test_an_index_that_was_closed_is_not_read_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, 3).close()
    monkeypatch.setattr("subprocess.run", None)
    check(opened(tmp_path), 3)
