"""From a constraint's text to the definition that llguidance compiles."""

from __future__ import annotations

import json

from llguidance import LLMatcher, grammar_from

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError

ANY_JSON = "$$ANY$$"
"""The ``json_schema`` that means any JSON (SGLang's word)."""

_SHOWN_AS = {"json_schema": "json"}


def not_compiled(constraint: Constraint, why: str) -> RequestError:
    name = _SHOWN_AS.get(constraint.kind, constraint.kind)
    return RequestError(f"Failed to compile {name} grammar: {why}")


def definition(constraint: Constraint) -> str:
    """Raises RequestError (400) for a text that is not of its kind."""
    match constraint.kind:
        case "json_schema":
            return _json_schema(constraint)
        case "regex":
            return str(LLMatcher.grammar_from_regex(constraint.text))
        case "ebnf":
            try:
                return str(grammar_from("ebnf", constraint.text))
            except ValueError as error:
                raise not_compiled(constraint, str(error)) from None
        case "structural_tag":
            raise RequestError("structural_tag is not supported by this server yet.")


def _json_schema(constraint: Constraint) -> str:
    text = "{}" if constraint.text == ANY_JSON else constraint.text
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise not_compiled(constraint, f"the schema is not valid JSON ({error})") from None
    if not isinstance(schema, dict | bool):
        raise not_compiled(constraint, "a schema must be an object")
    # lenient would drop keywords that llguidance does not know, without a word.
    return str(LLMatcher.grammar_from_json_schema(text, overrides={"lenient": False}))
