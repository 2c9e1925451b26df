"""Reads the values of options that are JSON."""

from __future__ import annotations

from typing import Any

from setpoint.core.errors import ConfigError
from setpoint.core.jsonfile import parse_json


def json_object(flag: str, text: str, *, example: str) -> dict[str, Any]:
    """The JSON object in ``text``. Raises ConfigError for any other value; the message shows the
    example."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be a JSON object, e.g. '{example}'.")
    return found
