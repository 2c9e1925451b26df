"""What a device knows of the rows that it samples, and the interface of kernels that work on it.

Knows nothing of requests or of what the parameters mean: a kernel reads them where
``sampling.columns.SLOT_DTYPE`` has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import torch


class Draws(IntEnum):
    """What the row of a batch that needs the most needs."""

    NONE = 0
    """All rows are greedy."""
    WHOLE = 1
    """Draws from whole distributions."""
    TRUNCATED = 2
    """Draws from what top-k, top-p or min-p leave."""


@dataclass(slots=True, frozen=True)
class TokenEntries:
    """Tokens whose logits are changed one by one, those of row i being [ends[2 i], ends[2 i + 1]),
    which it must not choose, and [ends[2 i + 1], ends[2 i + 2]), to which a bias is added."""

    ends: torch.Tensor
    """[2 S + 1] int32."""
    tokens: torch.Tensor
    """[E] int32."""
    values: torch.Tensor
    """[E] fp32: the biases."""


@dataclass(slots=True, frozen=True)
class DeviceRows:
    """S sampling rows, on the device."""

    parameters: torch.Tensor
    """[S, 16] int32: rows of ``sampling.columns.SLOT_DTYPE``, as they were before this sampling."""
    places: torch.Tensor
    """[S] int32: where in the flat ``known`` each row's token will be."""
    known: torch.Tensor
    """[slots, context + 1] int32: the table of ids, whose row ends with the known tokens before the
    place."""
    entries: TokenEntries | None
    """None if no row has any."""

    def rows(self, block: slice) -> DeviceRows:
        """These rows."""
        entries = self.entries
        if entries is not None:
            ends = entries.ends[2 * block.start : 2 * block.stop + 1]
            entries = replace(entries, ends=ends)
        return DeviceRows(self.parameters[block], self.places[block], self.known, entries)


@dataclass(slots=True, frozen=True)
class DeviceMasks:
    """The masks of some rows, on the device."""

    of_row: torch.Tensor
    """[S] int32: the number of each row's mask; -1: it has none."""
    words: torch.Tensor
    """[masks, >= V / 32] int32, as in ``Ops.mask_tokens``."""


class SamplingKernels(Protocol):
    """Contract: nothing waits for the device; a row's result does not depend on the others."""

    def edit(
        self, logits: torch.Tensor, rows: DeviceRows, masks: DeviceMasks | None, *, in_place: bool
    ) -> torch.Tensor:
        """logits [S, V] after the changes that ``sampling.edits`` defines: a copy in fp32.
        in_place: there are masks and no other changes, and the logits themselves are changed."""
        ...

    def choose(self, logits: torch.Tensor, rows: DeviceRows, draws: Draws) -> torch.Tensor:
        """The token of each row, as ``sampling.sampler`` defines it, [S] int64; -1 if the row's
        logits are not finite. It is written to its place in ``known`` too, -1 as 0."""
        ...

    def place(self, ids: torch.Tensor, rows: DeviceRows) -> None:
        """Write chosen tokens ``ids`` [S] int64 to their places in ``known``, -1 as 0."""
        ...
