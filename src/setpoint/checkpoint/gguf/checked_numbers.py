"""Checked numbers of a GGUF file's metadata."""

from __future__ import annotations

import math

import numpy as np

from setpoint.checkpoint.folder.configfile import MAX_POSITIONS
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.core.errors import CheckpointError


def positive(file: GGUFFile, key: str) -> float:
    found = file.require(key, float)
    if not 0 < found < math.inf:
        raise CheckpointError(f"{file.path}: {key} is {found}; it must be a number above zero.")
    return shortest(found)


def shortest(value: float) -> float:
    """The number with the shortest decimal that gives the same float32: 1e-05, not
    9.999999747378752e-06."""
    return float(str(np.float32(value)))


def count(
    file: GGUFFile, key: str, *, default: int | None = None, low: int = 1, high: int = MAX_POSITIONS
) -> int:
    """An integer from ``low`` to ``high``. default: its value if the file has no such key; None:
    that is an error."""
    found = file.get(key, int) if default is not None else file.require(key, int)
    found = default if found is None else found
    if found is None or not low <= found <= high:
        raise CheckpointError(f"{file.path}: {key} is {found}; it must be from {low} to {high}.")
    return found
