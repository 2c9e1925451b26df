"""Finds the files of a model folder that hold its weights, and tells whether they have changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

from setpoint.core.blocksfile import LINK_NAME
from setpoint.core.content_digest import content_digest
from setpoint.core.errors import CheckpointError
from setpoint.core.jsonfile import read_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

Identities = dict[Path, tuple[int | str, ...] | None]
"""For each file its device, inode, size and time of the last change in ns, or the digest of its
content, if it is a GGUF file; None if it is gone."""


def weight_files(folder: Path, *, complete: bool = True) -> list[Path]:
    """The safetensors files that hold the model: model.safetensors, else those that the index
    names; empty if the folder has neither.

    complete: False if files may be missing that the index names; the list is then empty. Raises
    CheckpointError if the index is unreadable, or names a file that is missing or outside the
    folder.
    """
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    tensors = read_object(index).get("weight_map")
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and _is_inside(name) for name in tensors.values()
    ):
        raise CheckpointError(
            f"{index} is not a safetensors index: 'weight_map' must name a file of this folder for"
            " each tensor."
        )
    names = sorted(set(tensors.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and not complete:
        return []
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}, which {INDEX_NAME} names. Download the model"
            " again."
        )
    return [folder / name for name in names]


def identities(files: Iterable[Path]) -> Identities:
    """The present identities of the files. The name of a GGUF file is a LINK_NAME. Raises
    CheckpointError if one is being written."""
    return {file: _identity(file) for file in files}


def _identity(file: Path) -> tuple[int | str, ...] | None:
    try:
        if LINK_NAME.fullmatch(file.name):
            with file.open("rb") as opened:
                return (content_digest(file.resolve(), opened),)
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _is_inside(name: str) -> bool:
    """True if ``name`` is a printable relative path that stays inside the folder. The model's
    author wrote the index, and it must not make us read other files of this machine."""
    path = PurePath(name)
    return name.isprintable() and not path.is_absolute() and ".." not in path.parts
