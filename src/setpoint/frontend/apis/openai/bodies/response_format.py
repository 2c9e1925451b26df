"""Converts OpenAI's ``response_format`` to sampling parameters with a constraint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.core.wording import kind_of


def is_strict(response_format: Mapping[str, Any] | None) -> bool:
    """Whether a schema is to be refused if a part of it cannot be enforced."""
    match response_format:
        case {"json_schema": {"strict": bool(strict)}}:
            return strict
    return False


_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def constraint_of(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sampling parameters with one constraint, or with none for text. Raises RequestError (400) for
    a format that neither OpenAI nor SGLang has."""
    if response_format is None:
        return {}
    match response_format:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json_schema": schema}
        case {"type": "json_schema"}:
            raise RequestError(
                'response_format.json_schema must be like {"name": "answer", "schema": {"type":'
                ' "object"}}, with the schema as an object.'
            )
        case {"type": "structural_tag"}:
            return {"structural_tag": dict(response_format)}
        case {"type": str(kind)}:
            got = quoted(kind, 64)
        case _:
            got = kind_of(response_format.get("type"))
    raise RequestError(f"response_format.type must be one of {', '.join(_TYPES)}; got {got}.")
