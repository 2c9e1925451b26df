"""Regular expressions that end an answer, searched in text that arrives in pieces.

Clients write them, so the search never goes back: Python's own takes exponential time for some. An
expression becomes positions and the positions that may follow each (Glushkov's construction); a
step takes one character and time that ``MAX_EDGES`` bounds. Python's parser reads the expressions,
so they have its syntax. What looks at the text around a match (anchors, look-around) or refers back
to a part of it is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.shown import shown

MAX_EDGES = 512
"""Most positions, and pairs of a position and one that may follow it, in all expressions of a
request."""
_MAX_REMEMBERED = 1024
"""How many characters, and how many sets of positions, a pattern remembers the positions of."""
_MAX_KEPT_PATTERNS = 256

Test = Callable[[str], bool]
"""Whether a position takes a character."""


@dataclass(slots=True)
class _Part:
    """A part of an expression: the positions that it may begin and end with."""

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    is_optional: bool = True
    """Whether it matches the empty text."""


@dataclass(slots=True)
class StopPattern:
    """The expressions of a request, compiled; immutable but for what it remembers. A set of
    positions is an integer with their bits."""

    tests: list[Test] = field(default_factory=list)
    """Of each position."""
    follow: list[int] = field(default_factory=list)
    """Position -> the positions that may come next."""
    first: int = 0
    """The positions that a match may begin with."""
    ends: list[int] = field(default_factory=list)
    """Of each expression: the positions that a match may end with."""
    _taking: dict[str, int] = field(default_factory=dict)
    _next: dict[int, int] = field(default_factory=dict)

    def taking(self, character: str) -> int:
        """The positions that take a character."""
        found = self._taking.get(character)
        if found is None:
            _make_room(self._taking)
            found = sum(1 << at for at, test in enumerate(self.tests) if test(character))
            self._taking[character] = found
        return found

    def next(self, positions: int) -> int:
        """The positions that may come after any of ``positions``."""
        found = self._next.get(positions)
        if found is None:
            _make_room(self._next)
            found, left = 0, positions
            while left:
                found |= self.follow[(left & -left).bit_length() - 1]
                left &= left - 1
            self._next[positions] = found
        return found


def _make_room(remembered: dict[Any, int]) -> None:
    if len(remembered) >= _MAX_REMEMBERED:
        remembered.clear()


class StopSearch:
    """Searches one text, from its beginning."""

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern
        self._alive: list[tuple[int, int]] = []
        """(Where a match begins, the positions that took the last character), the earliest
        beginning first; each position stands with the earliest beginning that reaches it."""
        self._length = 0
        self.matched: tuple[int, int, int] | None = None
        """The first match to be complete, and of those the longest: where it begins and ends, and
        the index of its expression."""

    @property
    def certain(self) -> int:
        """The length of the text that no later match can reach back to."""
        return self._alive[0][0] if self._alive else self._length

    def feed(self, text: str) -> None:
        """Search more text, up to the end of the first match."""
        for character in text:
            self._step(self._pattern.taking(character))
            self._length += 1
            self.matched = self._complete()
            if self.matched is not None:
                return

    def _step(self, taking: int) -> None:
        alive, untaken = [], taking
        for start, positions in self._alive:
            reached = self._pattern.next(positions) & untaken
            if reached:
                alive.append((start, reached))
                untaken &= ~reached
        begun = self._pattern.first & untaken
        if begun:
            alive.append((self._length, begun))
        self._alive = alive

    def _complete(self) -> tuple[int, int, int] | None:
        for start, positions in self._alive:
            for index, ends in enumerate(self._pattern.ends):
                if positions & ends:
                    return start, self._length, index
        return None


@lru_cache(_MAX_KEPT_PATTERNS)
def compiled(expressions: tuple[str, ...]) -> StopPattern:
    """Raises RequestError (400) for an expression that is wrong, that is searched in no way of
    bounded time, or that matches the empty text."""
    pattern = StopPattern()
    builder = _Builder(pattern)
    for expression in expressions:
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = _parser.parse(expression)
            part = builder.sequence(tree, tree.state.flags)
        except (re.error, OverflowError, RecursionError) as error:
            raise _refused(expression, f"is not a valid expression: {error}") from None
        except _Refused as error:
            raise _refused(expression, str(error)) from None
        if part.is_optional:
            raise _refused(expression, "matches the empty text")
        pattern.first |= _bits(part.first)
        pattern.ends.append(_bits(part.last))
    return pattern


def _bits(positions: Collection[int]) -> int:
    return sum(1 << position for position in positions)


class _Refused(Exception):
    """The reason why an expression is not searched."""


def _refused(expression: str, why: str) -> RequestError:
    return RequestError(f"stop_regex {shown(expression, 64)!r} {why}.")


class _Builder:
    """Makes the positions of parsed expressions."""

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern
        self._num_edges = 0

    def sequence(self, items: Iterable[Any], flags: int) -> _Part:
        part = _Part()
        for kind, value in items:
            part = self._joined(part, self._item(kind, value, flags))
        return part

    def _item(self, kind: Any, value: Any, flags: int) -> _Part:
        if kind in (ops.LITERAL, ops.NOT_LITERAL, ops.IN, ops.ANY):
            return self._position(_test(kind, value, flags))
        if kind is ops.SUBPATTERN:
            _, added, removed, items = value
            return self.sequence(items, (flags | added) & ~removed)
        if kind is ops.BRANCH:
            parts = [self.sequence(items, flags) for items in value[1]]
            return _Part(
                frozenset().union(*(part.first for part in parts)),
                frozenset().union(*(part.last for part in parts)),
                any(part.is_optional for part in parts),
            )
        if kind in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, repeated = value
            return self._repeated(least, most, repeated, flags)
        raise _Refused("uses an anchor, look-around, a reference or an atomic part")

    def _position(self, test: Test) -> _Part:
        self._count(1)
        self._pattern.tests.append(test)
        self._pattern.follow.append(0)
        here = frozenset((len(self._pattern.tests) - 1,))
        return _Part(here, here, is_optional=False)

    def _joined(self, before: _Part, after: _Part) -> _Part:
        self._connect(before.last, after.first)
        return _Part(
            before.first | after.first if before.is_optional else before.first,
            after.last | before.last if after.is_optional else after.last,
            before.is_optional and after.is_optional,
        )

    def _repeated(self, least: int, most: Any, items: Any, flags: int) -> _Part:
        part = _Part()
        for _ in range(least):
            again = self.sequence(items, flags)
            if not again.first:
                return part  # nothing, however often
            part = self._joined(part, again)
        if most is ops.MAXREPEAT:
            looped = self.sequence(items, flags)
            self._connect(looped.last, looped.first)
            return self._joined(part, _Part(looped.first, looped.last))
        tail = _Part()
        for _ in range(most - least):
            again = self.sequence(items, flags)
            if not again.first:
                break
            inner = self._joined(again, tail)
            tail = _Part(inner.first, inner.last)
        return self._joined(part, tail)

    def _connect(self, before: Collection[int], after: Collection[int]) -> None:
        self._count(len(before) * len(after))
        bits = _bits(after)
        for position in before:
            self._pattern.follow[position] |= bits

    def _count(self, num_edges: int) -> None:
        self._num_edges += num_edges
        if self._num_edges > MAX_EDGES:
            raise _Refused("is too complex, alone or together with the other expressions")


def _test(kind: Any, value: Any, flags: int) -> Test:
    if kind is ops.ANY:
        return (
            (lambda character: True) if flags & re.DOTALL else (lambda character: character != "\n")
        )
    if kind is ops.IN:
        negated = value[0][0] is ops.NEGATE
        members = [_member(of, each, flags) for of, each in (value[1:] if negated else value)]
        return lambda character: any(holds(character) for holds in members) is not negated
    same = _member(ops.LITERAL, value, flags)
    return same if kind is ops.LITERAL else lambda character: not same(character)


def _member(kind: Any, value: Any, flags: int) -> Test:
    """The test of one member of a set: a character, a range, or a category."""
    if kind is ops.CATEGORY:
        return _category(str(value), ascii_only=bool(flags & re.ASCII))
    low, high = value if kind is ops.RANGE else (value, value)
    if not flags & re.IGNORECASE:
        return lambda character: low <= ord(character) <= high
    return lambda character: any(
        low <= ord(form) <= high
        for form in (character, character.lower(), character.upper())
        if len(form) == 1
    )


def _category(name: str, *, ascii_only: bool) -> Test:
    """name: Python's, such as CATEGORY_NOT_DIGIT."""
    tests: dict[str, Test] = {
        "DIGIT": str.isdecimal,
        "SPACE": str.isspace,
        "WORD": lambda character: character.isalnum() or character == "_",
    }
    negated = "_NOT_" in name
    holds = tests[name.rpartition("_")[2]]
    if ascii_only:
        return lambda character: (character.isascii() and holds(character)) is not negated
    return lambda character: holds(character) is not negated


def check(expressions: Sequence[str]) -> None:
    """Raise RequestError (400) for expressions that ``compiled`` refuses."""
    if expressions:
        compiled(tuple(expressions))
