"""Opens a GGUF file together with the other parts, if it is split (llama.cpp's gguf-split).

The first part has the metadata; each has some of the tensors, and says which of how many it is. The
parts are found by their names. Works on parsed headers.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.core.errors import CheckpointError

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
MAX_PARTS = 1024


def parts_of(path: Path) -> list[Path]:
    """The paths of all parts, the first one first, if the name is that of a part; else the path
    itself."""
    named = PART.fullmatch(path.name)
    count = int(named["count"]) if named else 1
    if named is None or not 1 < count <= MAX_PARTS or not 1 <= int(named["number"]) <= count:
        return [path]
    return [
        path.with_name(f"{named['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


def open_gguf(path: Path) -> GGUFFile:
    """The file with the tensors of all of its parts. Raises CheckpointError if one is missing or
    does not belong to the others."""
    paths = parts_of(path)
    with ExitStack() as stack:
        first = stack.enter_context(GGUFFile(_present(paths[0], path)))
        count = first.get("split.count", int) or 1
        if count > 1 and count != len(paths):
            raise CheckpointError(
                f"{first.path} is one of {count} parts of a split model, which are found by their"
                f" names: NAME-00001-of-{count:05d}.gguf and so on. Give them the names that they"
                " were published with."
            )
        if count > 1:
            for number, other in enumerate(paths[1:], 1):
                part = stack.enter_context(GGUFFile(_present(other, path)))
                _add(first, part, number, count)
            _check_whole(first)
        stack.pop_all()
        return first


def _present(part: Path, named: Path) -> Path:
    if part != named and not part.exists():
        raise CheckpointError(
            f"{named} is a part of a split model, and {part.name} is missing in its folder."
            " Download all parts."
        )
    return part


def _add(first: GGUFFile, part: GGUFFile, number: int, count: int) -> None:
    if first.metadata.get("split.no", 0) != 0 or (
        part.metadata.get("split.no"),
        part.metadata.get("split.count"),
    ) != (number, count):
        raise CheckpointError(
            f"{part.path} does not say that it is part {number + 1} of the {count} parts of"
            f" {first.path.name}."
        )
    for name, tensor in part.tensors.items():
        if name in first.tensors:
            raise CheckpointError(f"{part.path}: tensor {name!r} is in another part, too.")
        first.tensors[name] = replace(tensor, part=number)
    first.parts.append(part)


def _check_whole(first: GGUFFile) -> None:
    count = first.get("split.tensors.count", int)
    if count not in (None, len(first.tensors)):
        raise CheckpointError(
            f"{first.path}: the parts have {len(first.tensors)} tensors together, and the first"
            f" one says {count}. One of the parts is from another file."
        )
