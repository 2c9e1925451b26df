"""Reads the headers of safetensors files, and writes such files as a stream, without the
safetensors library.

The library's writer needs every tensor in memory at once; this one writes a converted model one
tensor at a time. This module knows nothing of models. Format: 8 bytes little-endian header length,
a JSON header, then the tensors' bytes, contiguous and in order.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setpoint.core.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's limit."""

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8}


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """One tensor in a header. ``dtype`` is safetensors' name of it, e.g. "BF16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one file. Raises CheckpointError if the file is not a complete and valid
    safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER_BYTES + 1
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({size} bytes). Download it again."
            )
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        infos = [
            TensorInfo(name, tuple(map(int, entry["shape"])), str(entry["dtype"]))
            for name, entry in entries.items()
        ]
    except (
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        IndexError,
        OverflowError,
        RecursionError,
    ):
        raise CheckpointError(
            f"{path} has a damaged safetensors header. Download it again."
        ) from None
    if any(extent < 0 for info in infos for extent in info.shape):
        raise CheckpointError(f"{path} has a damaged safetensors header. Download it again.")
    unknown = {info.dtype for info in infos} - ITEM_BYTES.keys()
    if unknown:
        raise CheckpointError(f"{path} has tensors of the unsupported type {min(unknown)}.")
    if max(ends, default=0) > size - 8 - length:
        raise CheckpointError(
            f"{path} is truncated: its header describes {max(ends) + 8 + length} bytes, but the"
            f" file has {size}. Download it again."
        )
    return infos


def read_tensor(path: Path, name: str) -> bytes:
    """The bytes of a small tensor of a file whose header ``read_header`` accepts."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + int(begin))
        return file.read(int(end) - int(begin))


def write(path: Path, infos: list[TensorInfo], chunks: Iterable[bytes]) -> None:
    """Write a file with the tensors ``infos``. chunks: the concatenated bytes of these tensors, in
    order, divided anyhow. Only one chunk is in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in infos:
        start, end = end, end + info.num_bytes
        header[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)))
        file.write(raw)
        for chunk in chunks:
            file.write(chunk)
        assert file.tell() == 8 + len(raw) + end
        file.flush()
        os.fsync(file.fileno())  # the rename that follows declares the folder complete
