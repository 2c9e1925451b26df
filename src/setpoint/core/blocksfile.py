"""The table of the matrices that are read from a GGUF file itself, in the folder that is made of
the file once. So neither the disk nor the memory holds the weights a second time."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from setpoint.core.errors import CheckpointError

BLOCKS_FILE = "model.blocks"
"""Name of the table in a converted folder."""


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
    path: str
    """The GGUF file."""
    size: int
    """Its bytes."""
    mtime_ns: int
    """When it was written."""
    tensors: dict[str, StoredBlocks]
    """The checkpoint's name of a matrix -> its blocks."""

    def check(self) -> None:
        """Raise CheckpointError if the file is no longer there, or another than the table's."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise CheckpointError(f"Cannot read {self.path}: {error.strerror}.") from None
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise CheckpointError(
                f"{self.path} has changed since the server started. Start the server again."
            )


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
    """Write the table, or replace it as a whole."""
    draft = folder / f"{BLOCKS_FILE}.{os.getpid()}"
    draft.write_bytes(msgspec.json.encode(table))
    draft.rename(folder / BLOCKS_FILE)
