"""Reads JSON and text files of a model folder. Their content is not trusted: every failure is a
one-line CheckpointError that names the file.

Works on paths. The callers know what the keys mean.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from setpoint.core.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises CheckpointError."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return value


def read_json(path: Path) -> Any:
    """The value in the file, as ``parse_json`` reads it. Raises CheckpointError."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from None


def read_text(path: Path) -> str:
    """The file's text, decoded as UTF-8. Raises CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from None


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for JSON that is nested too deeply.

    NaN and Infinity, which are not JSON, and numbers too large for a float are returned as text:
    keys that nobody reads do not matter, and a caller that expects a number refuses the text by the
    key's name.
    """
    try:
        return json.loads(text, parse_constant=str, parse_float=_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _number(digits: str) -> float | str:
    value = float(digits)
    return value if math.isfinite(value) else digits
