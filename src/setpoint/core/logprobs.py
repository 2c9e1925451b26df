"""Logprobs as messages carry them, and as they are kept."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import TypeVar

import msgspec

T = TypeVar("T", int, float)


class LogprobBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of consecutive positions, as plain lists (see core.result.PositionLogprobs)."""

    values: list[float]
    ids: list[int]
    top_values: list[list[float]]
    top_ids: list[list[int]]
    picked: list[list[float]]


class KeptLogprobs:
    """The logprobs of a sequence so far in arrays, which take a tenth of the memory of lists. Every
    position has as many top and picked logprobs as the first."""

    def __init__(self) -> None:
        self.values = array("d")
        self._ids = array("i")
        self._top_values = array("d")
        self._top_ids = array("i")
        self._picked = array("d")

    def __len__(self) -> int:
        """The number of positions."""
        return len(self.values)

    @property
    def num_numbers(self) -> int:
        return len(self.values) + len(self._top_values) + len(self._picked)

    def add(self, block: LogprobBlock, length: int) -> None:
        """Add the first ``length`` positions of a block."""
        self.values.extend(block.values[:length])
        self._ids.extend(block.ids[:length])
        self._top_values.extend(chain.from_iterable(block.top_values[:length]))
        self._top_ids.extend(chain.from_iterable(block.top_ids[:length]))
        self._picked.extend(chain.from_iterable(block.picked[:length]))

    def block(self, start: int = 0) -> LogprobBlock:
        """The positions from ``start`` on. Rows without top or picked logprobs are left out."""
        return LogprobBlock(
            self.values[start:].tolist(),
            self._ids[start:].tolist(),
            self._rows(self._top_values, start),
            self._rows(self._top_ids, start),
            self._rows(self._picked, start),
        )

    def _rows(self, flat: array[T], start: int) -> list[list[T]]:
        width = len(flat) // max(len(self.values), 1)
        begins = range(start * width, len(flat), width) if width else ()
        return [flat[begin : begin + width].tolist() for begin in begins]
