"""Finds the place in a refused schema at which the grammar library fails: it says only why."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from setpoint.core.errors import RequestError
from setpoint.grammar.schema import llguidance_schema
from setpoint.schemas.document import DEFINITIONS, escaped, parts_of

MAX_SEARCH_S = 0.5
"""Most processor time of one search. When it is over, the smallest schema found so far is named."""
_UNSATISFIABLE = "Unsatisfiable schema:"


def located(schema: Any, why: str) -> tuple[str, str | None, str]:
    """The JSON pointer of the smallest part of a schema that fails as the whole does, the regular
    expression if the part is one, and the library's words about it. why: the words about the
    whole. The pointer is "" if nothing in the schema fails alone."""
    if not isinstance(schema, dict) or why.startswith("#"):  # it names its place itself
        return "", None, why
    ends_at = time.thread_time() + MAX_SEARCH_S
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}

    def fails(part: dict[str, Any]) -> str:
        """The words about a part; "" if it does not fail, or fails for another reason."""
        if time.thread_time() > ends_at:
            return ""
        words = _words({**definitions, **part})
        return words if words.split()[:2] == why.split()[:2] else ""

    path, is_found = "#", bool(fails(schema))
    while is_found:
        is_found = False
        for step, part in _needed_parts(schema, why):
            if isinstance(part, dict) and (words := fails(part)):
                path, schema, why, is_found = path + step, part, words, True
                break
    for step, part, expression in _keywords(schema):
        if words := fails(part):
            return path + step, expression, words
    return ("" if path == "#" and not fails(schema) else path), None, why


def _words(schema: dict[str, Any]) -> str:
    """Why the library refuses a schema; "" if it does not."""
    try:
        definition = LLMatcher.grammar_from_json_schema(json.dumps(llguidance_schema(schema)))
    except RequestError as error:
        return error.message
    return LLMatcher(LLTokenizer("byte"), definition, log_level=0).get_error()


def _needed_parts(schema: dict[str, Any], why: str) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, definitions first: what refers to them fails as well.
    Properties that may be absent leave a schema satisfiable."""
    listed = schema.get("properties")
    if why.startswith(_UNSATISFIABLE) and isinstance(listed, dict):
        required = schema.get("required", ())
        schema = {
            **schema,
            "properties": {name: each for name, each in listed.items() if name in required},
        }
    yield from sorted(parts_of(schema), key=lambda part: not part[0].startswith(("/$d", "/def")))


def _keywords(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """The keywords of a schema as schemas of their own: where each is, the schema, and the regular
    expression if the keyword is one."""
    kind = {"type": schema["type"]} if "type" in schema else {}
    for key, value in schema.items():
        if key == "patternProperties":
            for name in value:
                yield f"/{key}/{escaped(name)}", {key: {name: True}}, name
        elif key not in DEFINITIONS:
            part = {**kind, key: value}
            yield f"/{key}", part, value if key == "pattern" else None
