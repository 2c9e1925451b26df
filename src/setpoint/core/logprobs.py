"""Logprobs as messages carry them."""

from __future__ import annotations

import msgspec


class LogprobBlock(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of consecutive positions, as plain lists (see core.result.PositionLogprobs)."""

    values: list[float]
    ids: list[int]
    top_values: list[list[float]]
    top_ids: list[list[int]]
    picked: list[list[float]]
