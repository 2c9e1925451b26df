"""Who an engine is: the digests of its weights, of its sources, and of all facts on which the bits
of its keys and values depend. Prompts have theirs in ``core.prefix_digest``.

Weights have two digests of different cost. Ranks compare samples when they start, which takes
milliseconds and finds a mistake of an operator. Cache tiers keep what they have for weeks and share
it among machines, so they need every byte, which takes a second or two per GB once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec

from setpoint.core.blocksfile import read_blocks_table
from setpoint.core.content_digest import content_digest
from setpoint.core.version import PACKAGE
from setpoint.core.weightfiles import weight_files

FORMAT = "setpoint blocks 2"
"""Must change with the layout of a stored block's bytes or with the names of blocks."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""How many pieces of each file of weights are sampled, besides its size and its table of
tensors."""
SOURCES = ("*.py", "*.cpp", "*.h")
SHORT = 12
"""Hexadecimal digits of a digest that people read."""


def short_digest(data: bytes) -> str:
    """A digest for people to compare."""
    return hashlib.sha256(data).hexdigest()[:SHORT]


def engine_digest(facts: Mapping[str, str]) -> bytes:
    """The digest of an engine, 32 bytes. facts: name -> value, for all that decides which bits it
    computes and in which layout."""
    return hashlib.sha256(msgspec.json.encode([FORMAT, sorted(facts.items())])).digest()


@cache
def sources_digest(*parts: str) -> str:
    """A digest of this package's sources, because two commits may have the same version; or of the
    sources in these folders of it."""
    whole = hashlib.sha256()
    folders = [PACKAGE / part for part in parts] or [PACKAGE]
    for path in sorted(path for at in folders for kind in SOURCES for path in at.rglob(kind)):
        whole.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:SHORT]


def weights_sample(folder: Path) -> str:
    """A digest of the names, shapes and sizes of all tensors and of samples of their content. It
    takes milliseconds, and it differs between checkpoints that were trained apart. Raises
    CheckpointError if files are missing."""
    whole = hashlib.sha256()
    for path in weight_files(folder):
        with path.open("rb") as file:
            size = path.stat().st_size
            table = int.from_bytes(file.read(8), "little")  # how a safetensors file begins
            whole.update(file.read(min(table, size)))
            _sample(file, file.tell(), size, whole)
    if (blocks := read_blocks_table(folder)) is not None:
        whole.update(msgspec.json.encode(blocks))
    return whole.hexdigest()[:SHORT]


def weights_digest(folder: Path) -> str:
    """A digest of every byte of the weights. Raises CheckpointError or OSError."""
    whole = hashlib.sha256()
    if (blocks := read_blocks_table(folder)) is not None:
        whole.update(blocks.digest.encode())  # of the GGUF file, as it was when it was loaded
    for path in weight_files(folder):
        with path.open("rb") as file:
            whole.update(f"{path.name} {content_digest(path, file)}".encode())
    return whole.hexdigest()


def _sample(file: BinaryIO, begin: int, size: int, whole: hashlib._Hash) -> None:
    whole.update(size.to_bytes(8, "little"))
    for number in range(SAMPLES):
        file.seek(begin + max(size - begin - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
        whole.update(file.read(SAMPLE_BYTES))
