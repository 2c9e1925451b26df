"""Blocks in files: what comes back is what was put there, or nothing."""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from setpoint.core.identity import engine_digest
from setpoint.core.prefix_digest import grown
from setpoint.core.request import pack_ids
from setpoint.tiers.block_format import HEADER_BYTES
from setpoint.tiers.block_keys import block_keys
from setpoint.tiers.file_store import FileLimits, FileStore
from setpoint.tiers.memory_store import MemoryStore
from setpoint.tiers.store import StoreError

OWNER = b"o" * 16
LIMITS = FileLimits(max_bytes=1 << 30, min_free_bytes=0)


def opened(folder: Path, owner: bytes = OWNER, **limits: float) -> FileStore:
    values = {"max_bytes": 1 << 30, "min_free_bytes": 0} | limits
    store = FileStore(folder, owner, FileLimits(**values))  # type: ignore[arg-type]
    store.sweep()
    return store


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int, size: int = 60) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("blocks/??/*.kv"))


def test_what_was_put_there_comes_back_also_in_another_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.put(key(1), block(1)) == HEADER_BYTES + 60
    assert store.put(key(1), block(1)) == 0, "it is there"
    store.put(key(2), block(2))
    assert store.num_leading([key(1), key(2), key(3), key(1)]) == 2
    assert store.get(key(3)) is None
    store.close()
    again = opened(tmp_path)
    assert (again.get(key(1)) == block(1)).all()  # type: ignore[union-attr]
    assert again.size() == (2, 2 * (HEADER_BYTES + 60))


def test_every_byte_that_is_changed_and_every_cut_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(key(1), block(1))
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    changed = [
        whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))
    ]
    cut = [whole[:at] for at in range(len(whole))]
    for number, data in enumerate([*changed, *cut, whole + b"x", b"", os.urandom(len(whole))]):
        path.write_bytes(data)
        assert store.get(key(1)) is None, number
        assert not path.exists()
        assert store.num_leading([key(1)]) == 0
        store.put(key(1), block(1))
    assert store.counts.damaged == 2 * len(whole) + 3
    assert (store.get(key(1)) == block(1)).all()  # type: ignore[union-attr]


def test_a_block_under_another_name_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in (1, 2):
        store.put(key(number), block(number))
    first, second = files(tmp_path)
    second.write_bytes(first.read_bytes())
    assert store.get(key(2)) is None
    assert store.counts.damaged == 1


def test_a_file_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(key(1), block(1))
    files(tmp_path)[0].unlink()
    assert store.get(key(1)) is None
    assert store.size() == (0, 0)
    assert store.put(key(1), block(1))


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    size = HEADER_BYTES + 60
    store = opened(tmp_path, max_bytes=5 * size, eviction_ratio=0.2)
    for number in range(5):
        store.put(key(number), block(number))
    store.get(key(0))
    store.put(key(9), block(9))
    assert store.num_leading([key(0)]) == 1
    assert store.num_leading([key(9)]) == 1
    assert store.num_leading([key(1)]) == 0
    assert store.size()[1] <= 5 * size
    assert len(files(tmp_path)) == store.size()[0]
    assert store.counts.evicted == 2
    assert store.put(key(8), block(8, 6 * size)) == 0
    assert store.counts.refused == 1


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """A file system of 1 GiB with so many bytes free."""
    about = SimpleNamespace(f_frsize=1, f_bavail=num_bytes, f_blocks=1 << 30)
    monkeypatch.setattr(os, "statvfs", lambda path: about)


def test_no_space_is_a_refusal_for_which_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: all blocks of all servers were removed, and still nothing was written."""
    store = opened(tmp_path, min_free_bytes=1 << 20)
    store.put(key(1), block(1))
    with_free(monkeypatch, 100)
    assert store.put(key(2), block(2)) == 0
    assert store.counts.refused == 1
    assert store.get(key(1)) is not None
    store._full_until = 0.0
    with_free(monkeypatch, 1 << 20)
    assert store.put(key(2), block(2)), "as much as is needed is given up"
    assert store.get(key(1)) is None


def test_more_free_space_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="min_free_space"):
        opened(tmp_path, min_free_bytes=1 << 60)


def test_a_block_that_was_too_old_is_written_again_and_old_ones_leave_the_disk(
    tmp_path: Path,
) -> None:
    """Red before: the index had its name for ever, so it was neither read nor written."""
    now = [1000.0]
    store = FileStore(tmp_path, OWNER, FileLimits(1 << 30, 0, ttl_s=60), now=lambda: now[0])
    for number in (1, 2):
        store.put(key(number), block(number))
    now[0] += 50
    store.get(key(2))
    now[0] += 50
    assert store.num_leading([key(1)]) == 0
    assert store.num_leading([key(2)]) == 1, "it was used"
    assert store.put(key(1), block(1))
    assert (store.get(key(1)) == block(1)).all()  # type: ignore[union-attr]
    now[0] += 500
    store.put(key(3), block(3))
    assert [path.stem for path in files(tmp_path)] == [key(3).hex()]
    assert store.size()[0] == 1
    assert store.counts.evicted == 3


def test_a_folder_that_is_gone_is_an_error_of_the_store(tmp_path: Path) -> None:
    """Red before: each save logged a traceback."""
    folder = tmp_path / "cache"
    store = opened(folder)
    store.put(key(1), block(1))
    assert store.size()[0] == 1
    shutil.rmtree(folder)
    for act in (
        lambda: store.put(key(2), block(2)),
        lambda: store.get(key(1)),
        lambda: store.num_leading([key(1)]),
    ):
        with pytest.raises(StoreError, match="gone"):
            act()
    assert store.size()[0] == 1


def test_an_old_block_is_gone_and_a_clock_that_jumps_does_no_harm(tmp_path: Path) -> None:
    now = [1000.0]
    limits = FileLimits(1 << 30, 0, ttl_s=60)
    store = FileStore(tmp_path, OWNER, limits, now=lambda: now[0])
    store.put(key(1), block(1))
    now[0] = 10.0
    assert store.get(key(1)) is not None
    now[0] = 1e12
    assert store.get(key(1)) is None
    assert store.num_leading([key(1)]) == 0


@pytest.mark.parametrize("damage", [b"", b"x" * 5000, b"\0" * 8192])
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: bytes) -> None:
    store = opened(tmp_path)
    store.put(key(1), block(1))
    store.close()
    (tmp_path / "index" / "data.mdb").write_bytes(damage)
    again = opened(tmp_path)
    assert (again.get(key(1)) == block(1)).all()  # type: ignore[union-attr]
    assert again.size()[0] == 1


def test_a_lost_index_is_made_again_and_what_was_half_written_is_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(key(1), block(1))
    store.close()
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    old = tmp_path / "new" / "1-2-3"
    old.write_bytes(b"half")
    os.utime(old, (1, 1))
    again = opened(tmp_path)
    assert again.get(key(1)) is not None
    assert not old.exists()


def test_only_an_owners_blocks_are_cleared(tmp_path: Path) -> None:
    mine = opened(tmp_path)
    mine.put(key(1), block(1))
    mine.close()
    theirs = opened(tmp_path, b"t" * 16)
    theirs.put(key(2), block(2))
    assert theirs.clear() == 1
    assert theirs.num_leading([key(1)]) == 1
    assert len(files(tmp_path)) == 1


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StoreError, match="chmod go-w"):
        opened(tmp_path)
    if os.geteuid() == 0:
        tmp_path.chmod(0o700)
        os.chown(tmp_path, 12345, -1)
        with pytest.raises(StoreError, match="belongs to another user"):
            opened(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        opened(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be used"):
        opened(Path("/proc/setpoint"))


def test_threads_see_whole_blocks(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=40 * (HEADER_BYTES + 60), eviction_ratio=0.3)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            number = rng.randrange(60)
            if rng.random() < 0.5:
                store.put(key(number), block(number))
            else:
                found = store.get(key(number))
                if found is not None and not (found == block(number)).all():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.size()[1] <= 40 * (HEADER_BYTES + 60)


def test_memory_keeps_what_was_used_last() -> None:
    store = MemoryStore(200)
    for number in range(3):
        store.put(key(number), block(number))
    assert store.get(key(0)) is not None
    store.put(key(3), block(3))
    assert [store.num_leading([key(number)]) for number in range(4)] == [1, 0, 1, 1]
    assert store.put(key(9), block(9, 300)) == 0
    assert store.size() == (3, 180)
    assert store.clear() == 3


def test_names_depend_on_everything_before() -> None:
    ids = np.arange(24, dtype=np.int32)
    one = engine_digest({"weights": "a", "dtype": "bfloat16"})

    def names_of(identity: bytes, namespace: str, ids: np.ndarray) -> list[bytes]:
        return block_keys(identity, grown(b"", pack_ids(ids), namespace, block=8))

    names = names_of(one, "", ids)
    assert len(set(names)) == 3
    other = ids.copy()
    other[9] = 77
    changed = names_of(one, "", other)
    assert changed[0] == names[0]
    assert not {*changed[1:]} & {*names}
    for identity, namespace in ((one, "s"), (engine_digest({"weights": "b"}), "")):
        assert not {*names_of(identity, namespace, ids)} & {*names}
    assert engine_digest({"a": "b", "c": "d"}) == engine_digest({"c": "d", "a": "b"})
