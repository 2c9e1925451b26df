"""JSON schemas on their way to llguidance."""

from __future__ import annotations

from typing import Any

from setpoint.core.errors import RequestError

ANY_JSON = "$$ANY$$"
"""The ``json_schema`` that means any JSON (SGLang's word)."""

MAX_DEPTH = 64
"""Most lists and objects inside each other in a schema."""

OPTIONS = "x-guidance"
"""The key of a schema under which llguidance looks for its options."""


def prepared_schema(schema: Any) -> dict[str, Any]:
    """The schema with the options that it is compiled with. Raises RequestError (400) for what is
    no schema, or is too deep."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise RequestError("a schema must be an object, true or false")
    if _is_deeper(schema, MAX_DEPTH):
        raise RequestError(f"the schema has more than {MAX_DEPTH} lists and objects inside others")
    given = schema.get(OPTIONS)
    # lenient would drop keywords that llguidance does not know, without a word.
    return {**schema, OPTIONS: {**(given if isinstance(given, dict) else {}), "lenient": False}}


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether a JSON value has more than ``depth`` lists and objects inside each other."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True
