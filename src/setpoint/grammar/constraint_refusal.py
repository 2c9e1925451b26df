"""The words with which a constraint is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from setpoint.core.constraint import JSON_KINDS, Constraint, compile_refusal
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.grammar.fault import located

_LISTING = re.compile(r"\s*\n\s*(\d+ \||<).*", re.DOTALL)
"""What llguidance writes below an error: lines of the definition, which the client did not write,
and its own state."""

_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")
"""The place of an expression or a schema in llguidance's own grammar, which the client did not
write."""

_SAID: list[tuple[str, str]] = [
    # The picture of an expression has several lines, which neither a line of the log nor a JSON
    # string can show.
    (r" \(in regex\): (?:regex parse error:.*\berror: )?", ": "),
    (r"regex parse error:.*\berror: ", ""),
    (r"\n  while processing .*", ""),
    (r"unclosed group", "a group is not closed"),
    (r"unopened group", "a group is closed that is not open"),
    (r"unclosed character class", "a class of characters ([…]) is not closed"),
    (r"unclosed counted repetition", "a repetition ({…}) is not closed"),
    (r"repetition operator missing expression", "nothing is in front of a repetition"),
    (r"unrecognized escape sequence", "a backslash is in front of a character that needs none"),
    (
        r"invalid (?P<a>repetition count|character class) range, the start must be <= the end",
        r"a \g<a> range begins above its end",
    ),
    (r"anyOf is empty", "the list is empty"),
    (
        r"lookarounds not supported yet; Word\w* in regex .*",
        r"the edge of a word (\\b, \\B) cannot be enforced; leave it out",
    ),
    (
        r"lookarounds not supported yet; (?:Start|End)\w* in regex .*",
        "'^' may only be at the beginning of the text, and '$' at its end, not between characters"
        " or lines",
    ),
    (
        r"look-around, including look-ahead and look-behind, is not supported",
        "look-around ((?=…), (?!…), (?<=…), (?<!…)) cannot be enforced; leave it out",
    ),
    (
        r"backreferences are not supported",
        r"a reference to a group (\\1) cannot be enforced; leave it out; \\0 is written \\x00",
    ),
    (r"fuel exhausted.*", "it takes too much work to compile"),
    (
        r"unrecognized flag",
        "'(?' may be followed by the flags i, m, s and x, by ':' or by the name of a group",
    ),
    (
        r"Invalid type: (?P<a>.*)",
        r"type must be null, boolean, object, array, number, integer or string, not \g<a>",
    ),
    (
        r"Unimplemented keys: \[(?P<a>.*?)\]",
        r"these keywords cannot be enforced here; leave them out: \g<a>",
    ),
    (r"Unsatisfiable schema: ", "no JSON value satisfies the schema: "),
    (r"Expected f64 for", "Expected a number for"),
    (
        r"Resource '(?P<a>.*?)' is not present in a registry.*",
        r"'\g<a>' is outside of the schema, and nothing is fetched; write what is meant under"
        r" $defs and refer to '#/$defs/NAME'",
    ),
    (r"Pointer '(?P<a>.*?)' does not exist", r"$ref leads to '#\g<a>', which the schema has not"),
    (
        r"patternProperty regexes (?P<a>.*) and (?P<b>.*) are not disjoint",
        r"a name may match only one expression of patternProperties, and some names match both"
        r" \g<a> and \g<b>",
    ),
    (
        r"Failed to generate regex for integer range: .*",
        "the bounds of an integer must be numbers of 64 bits",
    ),
    (
        r"unknown special token: (?P<a>.*); following special tokens are available: .*",
        r"the tokenizer has no special token \g<a>",
    ),
]
"""What llguidance says, and what a client is told, who knows neither the library nor its language.
"""
_TOLD = [(re.compile(said, re.DOTALL), told) for said, told in _SAID]

_OWN = re.compile(r'^invalid regex ".*": ', re.DOTALL)
"""An expression as it was given to llguidance, in other words than the client's."""

MAX_WORDS = 1000
"""Longest reason that a client gets."""


def not_compiled(constraint: Constraint, why: str) -> RequestError:
    """The error for a constraint of which the grammar library says ``why``. It names the place in a
    schema, and the regular expression."""
    why = _LISTING.sub("", why).strip()
    if constraint.kind != "ebnf":
        why = _PLACE.sub("", why)
    pointer, expression = "", constraint.text if constraint.kind == "regex" else None
    for schema in _schemas(constraint):
        pointer, expression, words = located(schema, why)
        if pointer:
            why = words
            break
    for said, told in _TOLD:
        why = said.sub(told, why)
    if expression is not None and not why.startswith("the expression"):
        quoted = excerpt(json.dumps(expression, ensure_ascii=False), 64)
        why = f"the expression {quoted} cannot be used: {_OWN.sub('', why)}"
    place = f"{excerpt(pointer, 200)}: " if pointer else ""
    return RequestError(compile_refusal(constraint.kind) + place + excerpt(why, MAX_WORDS))


def _schemas(constraint: Constraint) -> Iterator[Any]:
    """The JSON schemas in a constraint; none if it is not JSON."""
    try:
        todo = [json.loads(constraint.text)] if constraint.kind in JSON_KINDS else []
    except (ValueError, RecursionError):
        return
    if constraint.kind == "json_schema":
        yield from todo
        return
    while todo:
        node = todo.pop()
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        todo += inner
        if isinstance(node, dict):
            yield from (node[key] for key in ("json_schema", "schema") if key in node)
