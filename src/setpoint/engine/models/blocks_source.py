"""Matrices in the blocks of a GGUF file, read from the file itself: what is packed or converted is
read at that moment and then forgotten."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch

from setpoint.core.blocksfile import StoredBlocks, read_blocks_table
from setpoint.core.errors import CheckpointError
from setpoint.core.model import BLOCK_KINDS
from setpoint.engine.models.stored_tensors import Slices, StoredTensor
from setpoint.engine.quant.dequantised import dequantised
from setpoint.engine.quant.linear_method import GgufWeight


@dataclass(slots=True, frozen=True)
class GGUFBlocks:
    """Implements StoredTensor: a matrix [N, K].

    values: the dtype of the values, [N, K], as which it is read; None: it is read as its blocks,
    uint8 [N, bytes of a row]."""

    file: Path
    handle: BufferedReader
    name: str
    stored: StoredBlocks
    values: torch.dtype | None

    @property
    def shape(self) -> tuple[int, ...]:
        rows, k = self.stored.shape
        return rows, k if self.values else BLOCK_KINDS[self.stored.kind].row_bytes(k)

    def read(self, slices: Slices = ()) -> torch.Tensor:
        rows, *columns = slices or (slice(None),)
        if self.stored.heads:
            found = _in_halves(self._rows(0, self.shape[0]), self.stored.heads)[rows]
        else:
            begin, end, _ = rows.indices(self.shape[0])
            found = self._rows(begin, end)
        if self.values is None:
            return found
        return dequantised(GgufWeight(self.stored.kind, found), self.values)[:, *columns]

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        row_bytes = BLOCK_KINDS[self.stored.kind].row_bytes(self.stored.shape[1])
        found = torch.empty((end - begin, row_bytes), dtype=torch.uint8)
        self.handle.seek(self.stored.offset + begin * row_bytes)
        if self.handle.readinto(found.numpy()) != found.nbytes:
            raise CheckpointError(f"{self.file} is truncated. Download it again.")
        return found


def in_gguf(
    folder: Path, stack: ExitStack, dtype: torch.dtype
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """(the matrices that the folder's table of blocks names, as values in ``dtype``, their blocks
    as "NAME.KIND"). The stack closes the file."""
    table = read_blocks_table(folder)
    if table is None:
        return {}, {}
    parts = table.open(folder, stack)
    values: dict[str, StoredTensor] = {}
    blocks: dict[str, StoredTensor] = {}
    for name, stored in table.tensors.items():
        path, handle = parts[stored.part]
        values[name] = GGUFBlocks(path, handle, name, stored, values=dtype)
        blocks[f"{name}.{stored.kind}"] = GGUFBlocks(path, handle, name, stored, values=None)
    return values, blocks


def _in_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head in Hugging Face's order: the first elements of all pairs, then the
    second ones."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
