"""Split GGUF files: any part stands for the whole, and parts that do not belong together are
refused."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_cases import MODEL, convert, load, write

from setpoint.checkpoint.gguf.split_files import parts_of
from setpoint.core.blocksfile import gguf_of, read_blocks_table
from setpoint.core.errors import CheckpointError
from setpoint.engine.models.weight_sources import CheckpointFiles
from setpoint_testing import tiny_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def split(folder: Path, **more: Any) -> list[Path]:
    folder.mkdir(exist_ok=True)
    tensors = tiny_gguf.gguf_tensors(MODEL, MODEL.weights())
    return tiny_gguf.write_split(folder, tensors, tiny_gguf.metadata(MODEL), kind=Kind.Q4_0, **more)


def test_any_part_stands_for_the_whole(tmp_path: Path) -> None:
    paths = split(tmp_path / "parts")
    folder = convert(paths[1])
    assert convert(paths[0]) == convert(paths[2]) == folder
    whole = convert(write(tmp_path / "whole.gguf", kind=Kind.Q4_0))
    assert whole != folder
    table, found, expected = read_blocks_table(folder), load_parts(folder), load(whole)
    assert table is not None
    assert [gguf_of(folder, part) for part in range(3)] == paths
    assert {stored.part for stored in table.tensors.values()} == {0, 1, 2}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def load_parts(folder: Path) -> dict[str, np.ndarray]:
    """The weights as an engine loads them, in float32."""
    with ExitStack() as stack:
        source = CheckpointFiles(folder, stack)
        return {name: tensor.float().numpy() for name, tensor in source.read_all().items()}


def test_an_engine_notices_that_a_part_has_changed(tmp_path: Path) -> None:
    paths = split(tmp_path / "parts")
    folder = convert(paths[0])
    load_parts(folder)
    data = bytearray(paths[2].read_bytes())
    data[-3] ^= 1
    paths[2].write_bytes(data)
    with pytest.raises(CheckpointError, match=r"content of .*00003-of-00003\.gguf has changed"):
        load_parts(folder)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    paths = split(tmp_path / "parts")
    paths[missing].unlink()
    with pytest.raises(CheckpointError, match=f"{paths[missing].name} is missing"):
        convert(paths[1])


def test_parts_under_other_names_are_not_guessed(tmp_path: Path) -> None:
    paths = split(tmp_path / "parts")
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"NAME-00001-of-00003\.gguf"):
        convert(renamed)


def test_parts_of_other_files_are_refused(tmp_path: Path) -> None:
    paths, twice = split(tmp_path / "parts"), split(tmp_path / "twice")
    paths[1].write_bytes(twice[2].read_bytes())
    with pytest.raises(CheckpointError, match="does not say that it is part 2 of the 3 parts"):
        convert(paths[0])
    tensors = tiny_gguf.gguf_tensors(MODEL, MODEL.weights())
    less = {name: tensors[name] for name in list(tensors)[:-1]}
    short = tiny_gguf.write_split(tmp_path, less, tiny_gguf.metadata(MODEL), kind=Kind.Q4_0)
    paths = split(tmp_path / "parts")
    changed = len(tensors) % 3 - 1
    paths[changed].write_bytes(short[changed].read_bytes())
    with pytest.raises(CheckpointError, match="tensors together"):
        convert(paths[0])


def test_only_names_of_parts_have_parts() -> None:
    for name in ("m.gguf", "m-00001-of-00001.gguf", "m-00004-of-00003.gguf", "m-1-of-3.gguf"):
        assert parts_of(Path(name)) == [Path(name)]
    assert [path.name for path in parts_of(Path("x/m-00002-of-00002.gguf"))] == [
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    ]
