"""The text of a constraint on an output: a schema, a regular expression, a grammar or a structural
tag. Checks its form only; whether it can be compiled is known where grammars are made.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.wording import kind_of

ConstraintKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]

KINDS: tuple[ConstraintKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")
"""The sampling parameters that constrain the output. A request has at most one of them."""

JSON_KINDS = ("json_schema", "structural_tag")
"""The kinds whose text is JSON."""

MAX_CHARS: dict[str, int] = {"regex": 1 << 14} | dict.fromkeys(
    ("json_schema", "ebnf", "structural_tag"), 1 << 18
)
"""Longest text of each kind, in characters. The largest schemas of public collections have half as
many. Regular expressions get less, because each of their characters costs time at every token."""

_SHOWN_AS = {"json_schema": "json"}


def compile_refusal(kind: ConstraintKind) -> str:
    """The beginning of the message that refuses a constraint of this kind which cannot be compiled;
    the same as in SGLang."""
    return f"Failed to compile {_SHOWN_AS.get(kind, kind)} grammar: "


INVALID_TOOL = "The tools have an invalid "
"""The beginning of the message that refuses the schema of a tool."""


class Constraint(NamedTuple):
    kind: ConstraintKind
    text: str


def constraint_text(kind: str, value: Any) -> str:
    """The constraint as text. A schema or a structural tag may be given as an object, which becomes
    JSON. Raises RequestError (400)."""
    if kind in JSON_KINDS and not isinstance(value, str):
        if not isinstance(value, dict):
            raise RequestError(
                f"{kind} must be an object, or an object as JSON text, got {kind_of(value)}."
            )
        try:
            value = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{kind} cannot be encoded as JSON: {error}") from None
    if not isinstance(value, str):
        raise RequestError(f"{kind} must be a string, got {kind_of(value)}.")
    if len(value) > MAX_CHARS[kind]:
        raise RequestError(
            f"{kind} must have at most {MAX_CHARS[kind]} characters, got {len(value)}."
        )
    if "\0" in value:
        raise RequestError(f"{kind} must not contain a NUL character.")
    if not value:
        raise RequestError(f"{kind} is empty, which constrains nothing. Leave it out.")
    return value
