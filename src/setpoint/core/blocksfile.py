"""The table of the matrices that are read from a GGUF file itself, in the folder that is made of
the file once. So neither the disk nor the memory holds the weights a second time.

The table says which content the file must have. Where the file is, a link says that stands beside
the table in a folder for this path (``checkpoint.gguf_convert``)."""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path

import msgspec

from setpoint.core.content_digest import content_digest
from setpoint.core.errors import CheckpointError

BLOCKS_FILE = "model.blocks"
"""Name of the table in a converted folder."""
BLOCKS_LINK = "model.blocks.gguf"
"""Name of the link to the GGUF file."""


class StoredBlocks(msgspec.Struct, frozen=True):
    """A matrix [N, K] whose blocks can be multiplied as they are."""

    kind: str
    """A key of ``core.model.BLOCK_KINDS``."""
    shape: tuple[int, int]
    offset: int
    """The place of its first byte in the file."""
    heads: int = 0
    """If not 0: the rows belong to this many heads, and the file has those of each head as rotation
    pairs (0, d/2), (1, d/2 + 1), …, as llama.cpp rotates."""


class BlocksTable(msgspec.Struct, frozen=True):
    digest: str
    """SHA-256 of the GGUF file."""
    tensors: dict[str, StoredBlocks]
    """The checkpoint's name of a matrix -> its blocks."""

    def open(self, folder: Path) -> tuple[Path, BufferedReader]:
        """(path, file) of the GGUF file that belongs to a folder with this table. Raises
        CheckpointError if it is no longer there, or has another content."""
        path = gguf_of(folder)
        try:
            file = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from None
        try:
            if content_digest(path, file) != self.digest:
                raise CheckpointError(
                    f"The content of {path} has changed since the server started. Put the file"
                    " back, or start the server again."
                )
        except BaseException:
            file.close()
            raise
        return path, file


def gguf_of(folder: Path) -> Path:
    """The GGUF file whose blocks a folder's table describes. Raises CheckpointError if the folder
    is for no file in particular."""
    try:
        return Path(os.readlink(folder / BLOCKS_LINK))
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
