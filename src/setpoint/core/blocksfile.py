"""The table of the matrices that are read from a GGUF file itself, in the folder that is made of
the file once. So neither the disk nor the memory holds the weights a second time.

The table says which content the file must have. Where the file is, a link says that stands beside
the table in a folder for this path (``checkpoint.gguf.convert``)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from io import BufferedReader
from pathlib import Path

import msgspec

from setpoint.core.content_digest import content_digest
from setpoint.core.errors import CheckpointError

BLOCKS_FILE = "model.blocks"
"""Name of the table in a converted folder."""
BLOCKS_LINK = "model.blocks.gguf"
"""Name of the link to the GGUF file, or to the first part of a split one."""
LINK_NAME = re.compile(r"model\.blocks(\.\d+)?\.gguf")


def link_to_part(part: int) -> str:
    """Name of the link to a part of a split GGUF file, counted from 0."""
    return BLOCKS_LINK if part == 0 else f"model.blocks.{part + 1}.gguf"


def digest_of_parts(digests: Sequence[str]) -> str:
    """The digest of a GGUF file from those of its parts."""
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


class StoredBlocks(msgspec.Struct, frozen=True):
    """A matrix [N, K] whose blocks can be multiplied as they are."""

    kind: str
    """A key of ``core.model.BLOCK_KINDS``."""
    shape: tuple[int, int]
    offset: int
    """The place of its first byte in the file, or in its part of a split one."""
    heads: int = 0
    """If not 0: the rows belong to this many heads, and the file has those of each head as rotation
    pairs (0, d/2), (1, d/2 + 1), …, as llama.cpp rotates."""
    part: int = 0
    """The part of a split file in which it is, counted from 0."""


class BlocksTable(msgspec.Struct, frozen=True):
    digests: tuple[str, ...]
    """SHA-256 of the GGUF file, or of each of its parts."""
    tensors: dict[str, StoredBlocks]
    """The checkpoint's name of a matrix -> its blocks."""

    @property
    def digest(self) -> str:
        return digest_of_parts(self.digests)

    @property
    def links(self) -> list[str]:
        """Names of the links to the GGUF file's parts."""
        return [link_to_part(part) for part in range(len(self.digests))]

    def open(self, folder: Path, stack: ExitStack) -> list[tuple[Path, BufferedReader]]:
        """(path, file) of each part of the GGUF file that belongs to a folder with this table. The
        stack closes them. Raises CheckpointError if one is no longer there, or has another
        content."""
        found = []
        for part, digest in enumerate(self.digests):
            path = gguf_of(folder, part)
            try:
                file = stack.enter_context(path.open("rb"))
            except OSError as error:
                raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from None
            if content_digest(path, file) != digest:
                raise CheckpointError(
                    f"The content of {path} has changed since the server started. Put the file"
                    " back, or start the server again."
                )
            found.append((path, file))
        return found


def gguf_of(folder: Path, part: int = 0) -> Path:
    """The GGUF file whose blocks a folder's table describes, or a part of it. Raises
    CheckpointError if the folder is for no file in particular."""
    try:
        return Path(os.readlink(folder / link_to_part(part)))
    except OSError:
        raise CheckpointError(
            f"{folder} is a part of a GGUF file's conversion that does not say where the file is."
            " Name the GGUF file itself."
        ) from None


def read_blocks_table(folder: Path) -> BlocksTable | None:
    """The table of a folder; None if it has none. Raises CheckpointError if it is damaged."""
    path = folder / BLOCKS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=BlocksTable)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); remove its folder.") from None


def write_blocks_table(folder: Path, table: BlocksTable) -> None:
    (folder / BLOCKS_FILE).write_bytes(msgspec.json.encode(table))
