"""A client's schema from its text, in its outer form."""

from __future__ import annotations

import json
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.schemas.checks import check_keywords
from setpoint.schemas.document import parts_of, schemas_in

ANY_JSON = "$$ANY$$"
"""The ``json_schema`` that means any JSON (SGLang's word)."""

MAX_DEPTH = 64
"""Most lists and objects inside each other in a schema."""


def read_schema(text: str) -> Any:
    """The JSON of a ``json_schema``. Raises RequestError (400)."""
    try:
        schema = json.loads("{}" if text == ANY_JSON else text)
        json.dumps(schema, ensure_ascii=False).encode()
        return schema
    except UnicodeEncodeError:
        raise RequestError(
            r"a string in the schema has one half of a surrogate pair (\ud800 to \udfff) alone"
        ) from None
    except RecursionError:
        raise RequestError("the schema is nested too deeply, or not valid JSON") from None
    except ValueError as error:
        raise RequestError(f"the schema is not valid JSON ({error})") from None


def checked_schema(schema: Any) -> dict[str, Any]:
    """A schema as an object. Raises RequestError (400) for what is no schema, has a keyword with a
    value of another type, or is too deep."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise RequestError("a schema must be an object, true or false")
    if _is_deeper(schema, MAX_DEPTH):
        raise RequestError(f"lists and objects in the schema are nested more than {MAX_DEPTH} deep")
    for each, path in schemas_in(schema):
        check_keywords(each, path, is_old=True)
        for step, inner in parts_of(each):
            if not isinstance(inner, dict | bool):
                raise RequestError(
                    f"{excerpt(path + step, 200)}: a schema must be an object, true or false"
                )
    return schema


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
