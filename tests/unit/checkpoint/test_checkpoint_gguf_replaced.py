"""A GGUF file that is replaced, touched, moved or copied: its content decides."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_cases import MODEL, convert, load, write

from setpoint.checkpoint.gguf import convert as conversion
from setpoint.checkpoint.gguf.convert import converted_folder
from setpoint.core import content_digest
from setpoint.core.blocksfile import gguf_of, read_blocks_table
from setpoint.core.errors import CheckpointError
from setpoint.core.weightfiles import identities


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "setpoint" / "models"


def written(path: Path, seed: int = 0) -> Path:
    norm = np.full(MODEL.hidden_size, 1 + seed, np.float32)
    return write(path, tensors={"output_norm.weight": norm}, kind=Kind.Q4_0)


def opened(folder: Path) -> None:
    """Open the file of a folder as an engine does."""
    table = read_blocks_table(folder)
    assert table is not None
    with ExitStack() as stack:
        table.open(folder, stack)


@pytest.mark.parametrize("how", ["renamed over", "written in place"])
def test_another_file_of_the_same_size_and_time_is_another_model(tmp_path: Path, how: str) -> None:
    path, other = written(tmp_path / "m.gguf"), written(tmp_path / "other", seed=1)
    assert path.stat().st_size == other.stat().st_size
    os.utime(path, (1.7e9, 1.7e9))
    before = convert(path)
    values = load(before)
    if how == "renamed over":
        os.utime(other, (1.7e9, 1.7e9))
        other.replace(path)
    else:
        path.write_bytes(other.read_bytes())
        os.utime(path, (1.7e9, 1.7e9))
    with pytest.raises(CheckpointError, match=r"content of .*m\.gguf has changed"):
        opened(before)
    after = convert(path)
    assert after.parent != before.parent
    opened(after)
    name = "model.norm.weight"
    assert (load(after)[name] != values[name]).any()


def test_a_file_that_was_only_touched_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "m.gguf")
    folder = convert(path)
    link = folder / "model.blocks.gguf"
    before = identities([link])
    os.utime(path)
    opened(folder)
    assert identities([link]) == before
    copy = shutil.copy(path, tmp_path / "copy")
    os.replace(copy, path)
    opened(folder)
    # The new state has been noted: the file is not read again.
    monkeypatch.setattr(content_digest.hashlib, "file_digest", None)
    opened(folder)
    assert identities([link]) == before
    path.unlink()
    assert identities([link]) == {link: None}
    with pytest.raises(CheckpointError, match=r"Cannot read .*m\.gguf: No such file"):
        opened(folder)


def test_the_identity_of_weights_contains_the_gguf_file(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf")
    link = convert(path) / "model.blocks.gguf"
    before = identities([link])
    written(path, seed=1)
    assert identities([link]) != before


def test_two_servers_of_two_copies_share_a_conversion_and_not_a_path(
    tmp_path: Path, cache: Path
) -> None:
    path = written(tmp_path / "m.gguf")
    copy = Path(shutil.copy(path, tmp_path / "under another name.gguf"))
    lines: list[str] = []
    first, second = (converted_folder(each, log=lines.append) for each in (path, copy))
    assert len(lines) == 2, "converted once"
    assert first.parent == second.parent
    assert (gguf_of(first), gguf_of(second)) == (path, copy)
    copy.unlink()
    opened(first)
    assert [load(folder).keys() for folder in (first,)]
    path.rename(tmp_path / "moved.gguf")
    moved = converted_folder(tmp_path / "moved.gguf", log=lines.append)
    assert len(lines) == 2, "a file that moves is not converted again"
    opened(moved)


def test_notes_of_files_that_are_gone_are_removed(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "m.gguf")
    convert(path)
    path.unlink()
    (cache / "0123.digest").write_text("[half")
    convert(written(tmp_path / "n.gguf", seed=1))
    assert len(list(cache.glob("*.digest"))) == 2
    assert not list(cache.glob("*.lock"))


@pytest.mark.parametrize(
    "name",
    ["model.blocks", "model.safetensors", "config.json", "tokenizer.json", "conversion.json"],
)
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_conversion_is_made_anew(tmp_path: Path, name: str, damage: str) -> None:
    path = written(tmp_path / "m.gguf")
    folder = convert(path)
    whole = {each.name: each.read_bytes() for each in folder.parent.iterdir() if each.is_file()}
    victim = folder.parent / name
    if damage == "cut":
        os.truncate(victim, victim.stat().st_size // 2)
    else:
        victim.unlink()
    lines: list[str] = []
    assert converted_folder(path, log=lines.append) == folder
    assert f"is damaged ({name} " in lines[0]
    found = {each.name: each.read_bytes() for each in folder.parent.iterdir() if each.is_file()}
    assert found == whole
    opened(folder)


def test_a_file_that_is_cut_short_during_its_conversion_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    path = written(tmp_path / "m.gguf")
    write_json = conversion._write_json

    def cut(*what: object) -> None:
        os.truncate(path, path.stat().st_size // 2)
        write_json(*what)

    monkeypatch.setattr(conversion, "_write_json", cut)
    with pytest.raises(CheckpointError, match=r"m\.gguf has been cut short while it was read"):
        convert(path)
    assert not [each for each in cache.iterdir() if each.is_dir()]


def test_a_file_that_changes_during_its_conversion_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    path = written(tmp_path / "m.gguf")
    write_json = conversion._write_json

    def change(*what: object) -> None:
        with path.open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"\x01")
        write_json(*what)

    monkeypatch.setattr(conversion, "_write_json", change)
    with pytest.raises(CheckpointError, match="has changed while it was converted"):
        convert(path)
    assert not [each for each in cache.iterdir() if each.is_dir()]
