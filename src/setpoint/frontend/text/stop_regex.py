"""Regular expressions that end an answer, searched in text that arrives in pieces.

Clients write them, so the search never goes back: Python's own takes exponential time for some. An
expression becomes positions and the positions that may follow each (Glushkov's construction, with
what anchors demand of the place between two positions); a step takes one character and time that
``MAX_EDGES`` bounds. The end of a piece is an end of the text: what follows is not known yet.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.frontend.text import expression as tree
from setpoint.frontend.text.expression import RefusedExpression, Test, Where, parse_expression

MAX_EDGES = 512
"""Most positions, and pairs of a position and one that may follow it, in all expressions of a
request."""
COMPILE_S = 0.1
"""CPU time after which no further expression of a request is compiled. Python's ``re`` takes
milliseconds for each range of characters whose case is ignored."""
_MAX_REMEMBERED = 1024
"""How many characters, and how many sets of positions, a pattern remembers the positions of."""
_MAX_KEPT_PATTERNS = 256

Reached = frozenset[tuple[int, Where]]
"""Positions, each with what must hold at the place before it, or after it."""
Positions = dict[Where, int]
"""What must hold at a place -> the positions for which that is enough, as bits."""
ANYWHERE = Where(0)


@dataclass(slots=True)
class _Part:
    """A part of an expression: the positions that it may begin and end with."""

    first: Reached = frozenset()
    last: Reached = frozenset()
    empty: frozenset[Where] = frozenset((ANYWHERE,))
    """What must hold where the part matches the empty text; an empty set: it never matches that."""


@dataclass(slots=True)
class StopPattern:
    """The expressions of a request, compiled; immutable but for what it remembers. A set of
    positions is an integer with their bits."""

    tests: list[Test] = field(default_factory=list)
    """The test of each position."""
    follow: list[Positions] = field(default_factory=list)
    """Position -> the positions that may come next."""
    first: Positions = field(default_factory=dict)
    """The positions that a match may begin with."""
    ends: list[Positions] = field(default_factory=list)
    """For each expression, the positions with which a match may end."""
    has_anchors: bool = False
    _taking: dict[str, int] = field(default_factory=dict)
    _next: dict[tuple[int, Where], int] = field(default_factory=dict)

    def taking(self, character: str) -> int:
        """The positions that take a character."""
        found = self._taking.get(character)
        if found is None:
            _make_room(self._taking)
            found = sum(1 << at for at, test in enumerate(self.tests) if test(character))
            self._taking[character] = found
        return found

    def next(self, positions: int, here: Where) -> int:
        """The positions that may come after any of ``positions``, at a place of which ``here``
        holds."""
        found = self._next.get((positions, here))
        if found is None:
            _make_room(self._next)
            found, left = 0, positions
            while left:
                found |= _allowed(self.follow[(left & -left).bit_length() - 1], here)
                left &= left - 1
            self._next[positions, here] = found
        return found


def _allowed(positions: Positions, here: Where) -> int:
    if len(positions) == 1 and ANYWHERE in positions:
        return positions[ANYWHERE]
    found = 0
    for demanded, bits in positions.items():
        if demanded & here == demanded:
            found |= bits
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
        self._before = ""
        """The last character."""
        self.matched: tuple[int, int, int] | None = None
        """The first match to be complete, and of those the longest: where it begins and ends, and
        the index of its expression."""

    @property
    def certain(self) -> int:
        """The length of the text that no later match can reach back to."""
        return self._alive[0][0] if self._alive else self._length

    def feed(self, text: str) -> None:
        """Search more text, up to the end of the first match."""
        pattern, has_anchors = self._pattern, self._pattern.has_anchors
        here = _place(self._before, text[:2]) if has_anchors else ANYWHERE
        if has_anchors and text:
            # An anchor after the last character may hold only now that the next one is known.
            self.matched = self._complete(here)
            if self.matched is not None:
                return
        for index, character in enumerate(text):
            self._step(pattern.taking(character), here)
            self._length += 1
            self._before = character
            if has_anchors:
                here = _place(character, text[index + 1 : index + 3])
            self.matched = self._complete(here)
            if self.matched is not None:
                return

    def _step(self, taking: int, here: Where) -> None:
        alive, untaken = [], taking
        for start, positions in self._alive:
            reached = self._pattern.next(positions, here) & untaken
            if reached:
                alive.append((start, reached))
                untaken &= ~reached
        begun = _allowed(self._pattern.first, here) & untaken
        if begun:
            alive.append((self._length, begun))
        self._alive = alive

    def _complete(self, here: Where) -> tuple[int, int, int] | None:
        for start, positions in self._alive:
            for index, ends in enumerate(self._pattern.ends):
                if positions & _allowed(ends, here):
                    return start, self._length, index
        return None


def _place(before: str, after: str) -> Where:
    """What holds between two characters. before: the one before, "" at the beginning of the text;
    after: the next two that are known, as far as there are any."""
    here = ANYWHERE
    if not before:
        here |= Where.TEXT_BEGINS | Where.LINE_BEGINS
    elif before == "\n":
        here |= Where.LINE_BEGINS
    if not after:
        here |= Where.TEXT_ENDS | Where.LAST_LINE_ENDS | Where.LINE_ENDS
    elif after[0] == "\n":
        here |= Where.LINE_ENDS if len(after) > 1 else Where.LINE_ENDS | Where.LAST_LINE_ENDS
    is_edge = _is_of_word(before) is not _is_of_word(after[:1])
    here |= Where.WORD_EDGE if is_edge else Where.NO_WORD_EDGE
    in_ascii = [_is_of_word(each) and each.isascii() for each in (before, after[:1])]
    is_edge = in_ascii[0] is not in_ascii[1]
    return here | (Where.ASCII_WORD_EDGE if is_edge else Where.NO_ASCII_WORD_EDGE)


def _is_of_word(character: str) -> bool:
    return character.isalnum() or character == "_"


@lru_cache(_MAX_KEPT_PATTERNS)
def compile_expressions(expressions: tuple[str, ...]) -> StopPattern:
    """The pattern of these expressions. Raises RequestError (400) for an expression that is not
    valid, that cannot be searched in bounded time, that comes after others which take too long to
    compile, or that matches the empty text."""
    pattern = StopPattern()
    builder = _Builder(pattern)
    began = time.thread_time()
    for expression in expressions:
        if pattern.ends and time.thread_time() - began > COMPILE_S:
            raise _refused(expression, "was not compiled: those before it took too long")
        try:
            part = builder.part(parse_expression(expression))
        except RefusedExpression as error:
            raise _refused(expression, str(error)) from None
        if part.empty:
            raise _refused(expression, "matches the empty text")
        _add(pattern.first, part.first)
        pattern.ends.append({})
        _add(pattern.ends[-1], part.last)
    return pattern


def _add(positions: Positions, reached: Iterable[tuple[int, Where]]) -> None:
    for position, demanded in reached:
        positions[demanded] = positions.get(demanded, 0) | 1 << position


def _refused(expression: str, why: str) -> RequestError:
    return RequestError(f"stop_regex {quoted(expression, 64)} {why}.")


class _Builder:
    """Makes the positions of expressions."""

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern
        self._num_edges = 0

    def part(self, node: tree.Part) -> _Part:
        match node:
            case tree.Character(test):
                return self._position(test)
            case tree.Anchor(where):
                self._pattern.has_anchors = True
                return _Part(empty=frozenset((where,)))
            case tree.Concatenation(parts):
                whole = _Part()
                for each in parts:
                    whole = self._joined(whole, self.part(each))
                return whole
            case tree.Alternation(parts):
                made = [self.part(each) for each in parts]
                return _Part(
                    frozenset().union(*(each.first for each in made)),
                    frozenset().union(*(each.last for each in made)),
                    frozenset().union(*(each.empty for each in made)),
                )
            case tree.Repeat(part, least, most):
                return self._repeated(part, least, most)

    def _position(self, test: Test) -> _Part:
        self._count(1)
        self._pattern.tests.append(test)
        self._pattern.follow.append({})
        here = frozenset(((len(self._pattern.tests) - 1, ANYWHERE),))
        return _Part(here, here, frozenset())

    def _joined(self, before: _Part, after: _Part) -> _Part:
        self._connect(before.last, after.first)
        self._count(max(len(before.empty) * len(after.empty) - 1, 0))
        return _Part(
            before.first | self._under(before.empty, after.first),
            after.last | self._under(after.empty, before.last),
            frozenset(one | other for one in before.empty for other in after.empty),
        )

    def _under(self, demands: Collection[Where], reached: Reached) -> Reached:
        """The positions behind an empty part: they also need what that demands."""
        if ANYWHERE in demands:
            return reached
        self._count(len(demands) * len(reached))
        return frozenset((at, own | more) for at, own in reached for more in demands)

    def _repeated(self, node: tree.Part, least: int, most: int | None) -> _Part:
        whole = _Part()
        for _ in range(least):
            again = self.part(node)
            whole = self._joined(whole, again)
            if not again.first:
                return whole  # it is empty, however often
        if most is None:
            looped = self.part(node)
            self._connect(looped.last, looped.first)
            return self._joined(whole, _optional(looped))
        tail = _Part()
        for _ in range(most - least):
            again = self.part(node)
            if not again.first:
                break
            tail = _optional(self._joined(again, tail))
        return self._joined(whole, tail)

    def _connect(self, before: Reached, after: Reached) -> None:
        self._count(len(before) * len(after))
        for position, demanded in before:
            _add(self._pattern.follow[position], ((at, demanded | more) for at, more in after))

    def _count(self, num_edges: int) -> None:
        self._num_edges += num_edges
        if self._num_edges > MAX_EDGES:
            raise RefusedExpression("is too complex, alone or together with the other expressions")


def _optional(part: _Part) -> _Part:
    return _Part(part.first, part.last, part.empty | {ANYWHERE})


def check(expressions: Sequence[str]) -> None:
    """Raise RequestError (400) for expressions that ``compile_expressions`` refuses."""
    if expressions:
        compile_expressions(tuple(expressions))
