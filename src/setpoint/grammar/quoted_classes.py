"""Writes the expressions of strings so that llguidance (1.9.1) quotes them rightly for JSON.

Where a character may be any of U+0000 to U+001F (or any of these but the line break), llguidance
allows an escaped quote and an escaped backslash as well, whether or not the class has these two. So
a class that does not have both is written without U+0000.
"""

from __future__ import annotations

import re

from setpoint.core.errors import RequestError

_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    r"|[xuU]\{(?P<braced>[0-9a-fA-F]{1,6})\}|[pP](?:\{[^}]*\}|.)|.)",
    re.DOTALL,
)
_OPENING = re.compile(r"\[\^?\]?")
_POSIX = re.compile(r"\[:\^?\w+:\]")
_NAME = re.compile(r"\(\?P?<[^>]*>")
_FLAG_X = re.compile(r"\(\?[a-zA-Z]*x")
_ITEM = re.compile(rf"{_ESCAPE.pattern}|.", re.DOTALL)
_ALL_BUT_SOME = (r"\D", r"\W", r"\S")
_SETS = re.compile(r"\[|\\[pP]|&&|--|~~")
"""What makes a class a set of others, whose characters are not looked at here."""


def quoted_rightly(pattern: str) -> str:
    """The expression, without U+0000 in some classes. Raises RequestError (400) for U+0000 outside
    of classes, for the flag x, with which a class may be a comment, and for a class without end."""
    out, at = [], 0
    while at < len(pattern):
        if _FLAG_X.match(pattern, at):
            raise RequestError("the flag x is not supported in the expression of a schema")
        found = _NAME.match(pattern, at) or _ITEM.match(pattern, at)
        assert found is not None
        end = _end_of_class(pattern, at) if found[0] == "[" else found.end()
        part = pattern[at:end]
        if part[0] == "[" or part[:2] in (r"\p", r"\P"):
            out.append(part if _has_both(part) else rf"[{part}&&[^\x00]]")
        elif part == "\0" or (part[0] == "\\" and _code_point(part) == 0):
            raise RequestError("the character U+0000 in an expression can only be in a class ([…])")
        else:
            out.append(part)
        at = end
    return "".join(out)


def _end_of_class(pattern: str, at: int) -> int:
    depth = 0
    while at < len(pattern):
        if pattern[at] == "[" and not (depth and _POSIX.match(pattern, at)):
            depth += 1
            found = _OPENING.match(pattern, at)
        else:
            depth -= pattern[at] == "]"
            found = _POSIX.match(pattern, at) or _ITEM.match(pattern, at)
        assert found is not None
        at = found.end()
        if depth == 0:
            return at
    raise RequestError("a class of characters ([…]) is not closed")


def _has_both(part: str) -> bool:
    """Whether a class certainly has the quote and the backslash."""
    if part[0] == "\\":
        return False
    is_negated = part[1] == "^"
    inside = part[1 + is_negated : -1]
    if _SETS.search(inside):
        return False
    items = [found[0] for found in _ITEM.finditer(inside)]
    listed, at = set[str](), 0
    while at < len(items):
        is_range = at + 2 < len(items) and items[at + 1] == "-"
        low, high = _code(items[at]), _code(items[at + 2 if is_range else at])
        listed |= {each for each in '"\\' if low <= ord(each) <= high or items[at] in _ALL_BUT_SOME}
        at += 3 if is_range else 1
    return not listed if is_negated else len(listed) == 2


def _code(item: str) -> int:
    """-1 stands for a class or a control character, which no range with a quote ends with."""
    return _code_point(item) if item[0] == "\\" and len(item) > 1 else ord(item)


def _code_point(escape: str) -> int:
    """The character that an escape names; -1 for a class, and for other escapes with a letter."""
    found = _ESCAPE.fullmatch(escape)
    assert found is not None
    digits = found["x"] or found["u"] or found["U"] or found["braced"]
    if digits:
        return int(digits, 16)
    return -1 if escape[1].isalnum() else ord(escape[1])
