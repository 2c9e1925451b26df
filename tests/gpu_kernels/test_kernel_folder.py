"""What Triton has compiled is found in a folder that was moved, which Triton itself does not do."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton.runtime.cache import FileCacheManager

from setpoint.engine.kernels.triton.kernel_folder import MovableFolder

KEY = "5e" * 32


def test_a_folder_may_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled, moved = tmp_path / "filled", tmp_path / "moved"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(filled))
    folder = MovableFolder(KEY)
    paths = {name: folder.put(name, name, binary=False) for name in ("k.json", "k.ptx")}
    folder.put_group("k.json", paths)
    assert MovableFolder(KEY).get_group("k.json") == paths
    filled.rename(moved)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    found = MovableFolder(KEY).get_group("k.json")
    assert found is not None
    assert {name: Path(path).read_text() for name, path in found.items()} == {
        name: name for name in paths
    }
    assert str(moved) in found["k.ptx"]
    assert FileCacheManager(KEY).get_group("k.json") is None, "Triton learned it: remove ours"


def test_what_is_not_whole_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    folder = MovableFolder(KEY)
    assert folder.get_group("k.json") is None
    note = Path(folder.put_group("k.json", {"k.ptx": folder.put("", "k.ptx", binary=False)}))
    assert folder.get_group("k.json") is not None
    text = note.read_text()
    note.write_text(text[:-5])
    assert folder.get_group("k.json") is None
    note.write_text(text)
    Path(folder.get_file("k.ptx")).unlink()
    assert folder.get_group("k.json") is None
