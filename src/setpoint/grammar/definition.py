"""Turns a constraint's text into the grammar that llguidance compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.grammar.constraint_refusal import not_compiled
from setpoint.grammar.schema import JsonSpacing, llguidance_schema
from setpoint.grammar.tag_definition import NO_FORCING, as_terminal, lark_of
from setpoint.grammar.tags import parse_tag
from setpoint.schemas.reading import read_schema

_IN_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)
"""The library's own test in linear time: the library's tries every line break as the beginning of
all that follow, and holds the interpreter's lock meanwhile."""

_UNICODE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
"""A character of EBNF in a form that the converter does not know."""

MAX_RULES = 5000
"""Most rules of a grammar that is converted: the converter's time grows with their square."""


def definition(
    constraint: Constraint, special_tokens: Mapping[str, int], spacing: JsonSpacing
) -> str:
    """The grammar that llguidance compiles for a constraint. Raises RequestError (400) if the
    constraint's text is not valid for its kind."""
    try:
        match constraint.kind:
            case "json_schema":
                return _json_schema(constraint.text, spacing)
            case "regex":
                return LLMatcher.grammar_from_regex(as_terminal(constraint.text))
            case "ebnf":
                return LLMatcher.grammar_from_lark(_lark(constraint.text))
            case "structural_tag":
                return lark_of(parse_tag(constraint.text), special_tokens, spacing, _lark)
    except RequestError as error:
        raise not_compiled(constraint, error.message) from None


def check_whitespace(expression: str) -> None:
    """Raise RequestError (400) if an expression cannot be compiled, or matches anything but
    whitespace of JSON."""
    constraint = Constraint("regex", expression)
    try:
        others = f"start: T\nT: /{as_terminal(expression)}/ & ~/[ \\n\\r\\t]*/"
    except RequestError as error:
        raise not_compiled(constraint, error.message) from None
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(others), log_level=0)
    if matcher.is_error():
        raise not_compiled(constraint, matcher.get_error())
    matcher.compute_bitmask()
    if not matcher.is_error():  # otherwise nothing is left
        raise RequestError(
            "it matches more than spaces, tabs and line breaks, and only these may be between the"
            " parts of a JSON text"
        )


def _json_schema(text: str, spacing: JsonSpacing) -> str:
    schema = llguidance_schema(read_schema(text), spacing)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _lark(text: str) -> str:
    """The grammar in Lark's syntax, converted if it is in the EBNF of llama.cpp and xgrammar."""
    if _IN_LARK.search(text):
        return f"{text}\n{NO_FORCING}"  # behind it, so that the lines in errors are the client's
    if text.count("::=") > MAX_RULES:
        raise RequestError(f"the grammar has more than {MAX_RULES} rules")
    try:
        return NO_FORCING + gbnf_to_lark(_UNICODE.sub(_without_escape, text))
    except RecursionError:
        raise RequestError("groups in the grammar are nested too deeply") from None
    except Exception as error:  # the converter raises its own, IndexError, and others
        raise RequestError(f"the grammar cannot be read ({error})") from None


def _without_escape(found: re.Match[str]) -> str:
    code = int(found[2] or found[3], 16)
    if code < 0x80:
        return f"{found[1]}\\x{code:02x}"
    is_character = code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
    return found[1] + chr(code) if is_character else found[0]
