"""Reads regular expressions of Python's syntax into a tree, for a search that never goes back.

Python itself says whether an expression is valid, and what a single character matches; this module
only finds the parts. What no search in bounded time can decide is refused: look-around, references
and atomic parts.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag

Test = Callable[[str], bool]
"""Whether a character is taken."""


class Where(IntFlag):
    """What an anchor says about the place between two characters."""

    TEXT_BEGINS = 1
    LINE_BEGINS = 2
    TEXT_ENDS = 4
    LAST_LINE_ENDS = 8
    """The text ends here, or after one more line break."""
    LINE_ENDS = 16
    WORD_EDGE = 32
    NO_WORD_EDGE = 64
    ASCII_WORD_EDGE = 128
    NO_ASCII_WORD_EDGE = 256


@dataclass(slots=True, frozen=True)
class Character:
    test: Test


@dataclass(slots=True, frozen=True)
class Anchor:
    where: Where


@dataclass(slots=True, frozen=True)
class Concatenation:
    parts: list[Part]


@dataclass(slots=True, frozen=True)
class Alternation:
    parts: list[Part]


@dataclass(slots=True, frozen=True)
class Repeat:
    part: Part
    least: int
    most: int | None
    """None: any number."""


Part = Character | Anchor | Concatenation | Alternation | Repeat


class RefusedExpression(Exception):
    """The reason why an expression is not searched."""


def parse_expression(expression: str) -> Part:
    """The tree of an expression. Raises RefusedExpression."""
    try:
        with warnings.catch_warnings(action="ignore"):
            flags = re.compile(expression).flags
    except (re.error, OverflowError, RecursionError) as error:
        raise RefusedExpression(f"is not a valid expression: {error}") from None
    return _Reader(expression).choice(flags)


_ESCAPE = re.compile(
    r"\\(?:x..|u....|U........|N\{[^}]*\}|0[0-7]{0,2}|[1-3][0-7]{2}|(?P<reference>[1-9])|.)",
    re.DOTALL,
)
_GROUP = re.compile(
    r"\((?:\?(?:(?P<comment>#)|P<\w+>|(?P<on>[aiLmsux]*)(?:-(?P<off>[imsx]+))?(?P<kind>[:)])))?"
)
"""The beginning of a group; no other begins with ``(?``."""
_COUNTS = re.compile(r"\{(?:(\d+)|(\d*),(\d*))\}")
_SKIPPED = re.compile(r"(?:\s|#[^\n]*)*")
"""What an expression of many lines ((?x)) has between its parts."""
_FLAGS = {"a": re.A, "i": re.I, "L": re.L, "m": re.M, "s": re.S, "u": re.U, "x": re.X}
_REFUSED = "uses look-around, a reference or an atomic part"


class _Reader:
    """Reads a valid expression from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def choice(self, flags: int) -> Part:
        """The part up to the end of the group or of the expression."""
        parts = [self._sequence(flags)]
        while self._next("|"):
            parts.append(self._sequence(flags))
        return parts[0] if len(parts) == 1 else Alternation(parts)

    def _sequence(self, flags: int) -> Part:
        parts: list[Part] = []
        while True:
            self._skip(flags)
            if self._at == len(self._text) or self._text[self._at] in "|)":
                return Concatenation(parts)
            part = self._item(flags)
            if part is not None:
                parts.append(self._repeated(part, flags))

    def _item(self, flags: int) -> Part | None:
        """The next item; None for flags and comments, which match nothing, not even an empty
        text."""
        begin, character = self._at, self._text[self._at]
        if character == "(":
            return self._group(flags)
        if character == "[":
            return self._character(begin, self._end_of_set(), flags)
        if character == "\\":
            return self._escape(flags)
        self._at += 1
        if character == "^":
            return Anchor(Where.LINE_BEGINS if flags & re.M else Where.TEXT_BEGINS)
        if character == "$":
            return Anchor(Where.LINE_ENDS if flags & re.M else Where.LAST_LINE_ENDS)
        if character == ".":
            return self._character(begin, self._at, flags)
        return Character(_test(re.escape(character), flags))

    def _group(self, flags: int) -> Part | None:
        found = _GROUP.match(self._text, self._at)
        assert found is not None
        if found.end() == self._at + 1 and self._text.startswith("(?", self._at):
            raise RefusedExpression(_REFUSED)
        self._at = found.end()
        if found["comment"]:
            self._at = self._text.index(")", self._at) + 1
            return None
        if found["kind"] == ")":
            return None  # flags of the whole expression
        if "a" in (found["on"] or ""):
            flags &= ~re.U
        if "u" in (found["on"] or ""):
            flags &= ~re.A
        for letter in found["on"] or "":
            flags |= _FLAGS[letter]
        for letter in found["off"] or "":
            flags &= ~_FLAGS[letter]
        part = self.choice(flags)
        self._at += 1
        return part

    def _escape(self, flags: int) -> Part:
        found = _ESCAPE.match(self._text, self._at)
        assert found is not None
        if found["reference"]:
            raise RefusedExpression(_REFUSED)
        begin, self._at = self._at, found.end()
        ascii_only = bool(flags & re.A)
        match found[0]:
            case r"\A":
                return Anchor(Where.TEXT_BEGINS)
            case r"\Z" | r"\z":
                return Anchor(Where.TEXT_ENDS)
            case r"\b":
                return Anchor(Where.ASCII_WORD_EDGE if ascii_only else Where.WORD_EDGE)
            case r"\B":
                return Anchor(Where.NO_ASCII_WORD_EDGE if ascii_only else Where.NO_WORD_EDGE)
        return self._character(begin, self._at, flags)

    def _end_of_set(self) -> int:
        """The end of ``[…]``, in which the first character may be a bracket."""
        self._at += 2 if self._text.startswith("[^", self._at) else 1
        is_first = True
        while is_first or self._text[self._at] != "]":
            self._at += 2 if self._text[self._at] == "\\" else 1
            is_first = False
        self._at += 1
        return self._at

    def _character(self, begin: int, end: int, flags: int) -> Character:
        return Character(_test(self._text[begin:end], flags))

    def _repeated(self, part: Part, flags: int) -> Part:
        self._skip(flags)
        least: int
        most: int | None
        if self._next("*"):
            least, most = 0, None
        elif self._next("+"):
            least, most = 1, None
        elif self._next("?"):
            least, most = 0, 1
        elif found := _COUNTS.match(self._text, self._at):
            exactly, low, high = found.groups()
            least = int(exactly or low or 0)
            most = least if exactly else int(high) if high else None
            self._at = found.end()
        else:
            return part
        if self._next("+"):
            raise RefusedExpression(_REFUSED)
        self._next("?")  # which of several matches is taken is decided by their ends
        return Repeat(part, least, most)

    def _next(self, character: str) -> bool:
        """Whether this character comes next; it is read then."""
        found = self._text.startswith(character, self._at)
        self._at += found
        return found

    def _skip(self, flags: int) -> None:
        if flags & re.X:
            found = _SKIPPED.match(self._text, self._at)
            assert found is not None
            self._at = found.end()


def _test(source: str, flags: int) -> Test:
    """The test of an expression that matches one character."""
    with warnings.catch_warnings(action="ignore"):
        matches = re.compile(source, flags & ~re.X).fullmatch
    return lambda character: matches(character) is not None
