"""A GGUF file is converted once per content, whatever ends a conversion and whoever else is at it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_cases import MODEL, convert, load, write
from safetensors import safe_open

from setpoint.checkpoint.gguf import conversion_cache
from setpoint.checkpoint.gguf import convert as conversion
from setpoint.checkpoint.gguf.convert import converted_folder
from setpoint.core.errors import CheckpointError
from setpoint_testing import tiny_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "setpoint" / "models"


def test_conversion_happens_once_per_content(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "m.gguf")
    lines: list[str] = []
    first = converted_folder(path, log=lines.append)
    assert converted_folder(path, log=lines.append) == first
    os.utime(path, ns=(1, 1))  # unpacked anew, as by an installation
    assert converted_folder(path, log=lines.append) == first
    copy = tmp_path / "elsewhere" / path.name
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert converted_folder(copy, log=lines.append) == first
    assert load(first).keys() == MODEL.weights().keys()
    assert len(lines) == 2  # "Converting …" and "Converted …", once
    assert [entry.name for entry in cache.iterdir() if entry.is_dir()] == [first.name]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # a bit of a weight
    path.write_bytes(content)
    os.utime(path, ns=(2, 2))
    assert converted_folder(path, log=lines.append) != first


def test_a_file_is_read_once_to_know_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    path = write(tmp_path / "m.gguf")
    first = convert(path)
    monkeypatch.setattr(hashlib, "file_digest", _interrupt)
    assert convert(path) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for note in cache.glob("*.digest"):
        note.write_text("[half")
    assert convert(path) == first


def test_a_new_format_takes_the_place_of_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    path = write(tmp_path / "m.gguf")
    other = write(tmp_path / "n.gguf", keys={"general.name": "another"})
    with monkeypatch.context() as patch:
        patch.setattr(conversion_cache, "FORMAT", conversion_cache.FORMAT - 1)
        old, kept = convert(path), convert(other)
    copies = [
        cache / f"m-{number:016x}-v2" for number in range(3)
    ]  # of the same file, at other times of modification
    stranger = cache / "m-other-0123456789abcdef-v2"
    for folder in (*copies, stranger):
        folder.mkdir()
    lines: list[str] = []
    new = converted_folder(path, log=lines.append)
    assert [folder.is_dir() for folder in (old, *copies, kept, stranger, new)] == [False] * 4 + [
        True
    ] * 3
    removing = (
        f"Removing {old}, which an earlier version of Setpoint made from a file of the same name."
    )
    assert removing in lines


FULL_DISK = """
import resource, sys
from pathlib import Path
from setpoint.checkpoint.gguf.convert import converted_folder
from setpoint.core.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    converted_folder(Path(sys.argv[1]), log=lambda line: None)
except CheckpointError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("room", [500, 5_000, 50_000])
def test_a_disk_that_fills_up_is_one_clear_line_and_leaves_nothing_half_written(
    tmp_path: Path, cache: Path, room: int
) -> None:
    """A file that may not grow further stands in for the disk: the config, the tokenizer, the
    weights are what does not fit."""
    path = write(tmp_path / "m.gguf", model=tiny_gguf.TinyLlama(num_layers=4))
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path), str(room)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert re.fullmatch(
        r"Cannot write the converted model under .*: File too large\. Set XDG_CACHE_HOME to .*\n",
        done.stderr,
    ), done.stderr
    assert not any(entry.is_dir() for entry in cache.iterdir())
    assert load(convert(path))


def test_what_will_be_written_is_said_before(tmp_path: Path, cache: Path) -> None:
    """The sizes that are named are those of the files, without config and tokenizer."""
    lines: list[str] = []
    model = tiny_gguf.TinyLlama(num_layers=4, hidden_size=256, intermediate_size=512)
    path = write(tmp_path / "m.gguf", model=model, kind=Kind.Q4_0)
    folder = converted_folder(path, log=lines.append)
    said = re.fullmatch(
        rf"Converting m.gguf once, to {folder.parent}: ([\d.]+) MB of weights in bfloat16; ([\d.]+) MB of"
        r" blocks stay in the file …",
        lines[0],
    )
    assert said is not None, lines
    weights, blocks = map(float, said.groups())
    assert weights == pytest.approx((folder / "model.safetensors").stat().st_size / 1e6, abs=0.1)
    assert blocks == pytest.approx(path.stat().st_size / 1e6, abs=0.1)
    assert sum(each.lstat().st_size for each in folder.parent.iterdir()) < 0.1e6, "no second copy"


def test_a_disk_without_room_is_known_before_anything_is_written(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf")
    lines: list[str] = []
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError) as caught:
        converted_folder(path, log=lines.append)
    assert re.fullmatch(
        r"Converting .*m\.gguf writes [\d.]+ MB below .*, where 0\.0 MB are free\. Make room, or set"
        r" XDG_CACHE_HOME to a folder with enough space\.",
        str(caught.value),
    )
    assert lines == []
    assert {entry.suffix for entry in cache.iterdir()} == {".digest"}


def test_a_half_written_folder_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    path = write(tmp_path / "m.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_write_json", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(path)
    assert {entry.suffix for entry in cache.iterdir()} == {".digest"}
    stale = convert(path)
    # A process that is killed leaves its partial folder; the next one starts over.
    partial = stale.with_suffix(stale.suffix + ".partial")
    stale.rename(partial)
    (partial / "model.safetensors").write_bytes(b"half")
    folder = convert(path)
    assert load(folder).keys() == MODEL.weights().keys()
    assert not partial.exists()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_two_processes_convert_once(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "m.gguf", model=tiny_gguf.TinyLlama(num_layers=20))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_convert_in_process, args=(path, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert results[0][0] == results[1][0]
    assert sorted(lines for _, lines in results) == [0, 2]
    with safe_open(Path(results[0][0]) / "model.safetensors", "np") as file:
        assert len(file.keys()) == 20 * 9 + 2


def _convert_in_process(path: Path, queue: Any) -> None:
    lines: list[str] = []
    queue.put((str(converted_folder(path, log=lines.append)), len(lines)))


def test_an_unwritable_cache_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="Set XDG_CACHE_HOME"):
        convert(path)
