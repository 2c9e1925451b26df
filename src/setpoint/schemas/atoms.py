"""Sets of JSON values of one type, as a schema describes them. A *shape* holds them for every type;
those of one type are the union of its atoms.

An atom is what it says, whether a grammar has it or not: ``writing`` decides what is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from setpoint.schemas.expressions import is_found
from setpoint.schemas.states import ANYTHING, NOTHING, State
from setpoint.schemas.values import KINDS, Constant, Kind, constant, is_integral, is_multiple


class Source(NamedTuple):
    """A keyword in the document, for the client."""

    keyword: str
    path: str
    """JSON pointer of the keyword."""
    is_opposite: bool = False
    """Whether the opposite of what the keyword says is demanded."""


class Expression(NamedTuple):
    pattern: str
    source: Source


Lost = frozenset[Source]
"""Demands that an atom should satisfy and does not describe."""

# ``spare`` in an atom: the keywords for which there is another atom, with some of the same values.
# If no grammar has this one as it is, it is left out.


@dataclass(frozen=True)
class Values:
    """Some values."""

    kind: Kind
    values: tuple[Constant, ...]
    lost: Lost = frozenset()
    spare: Lost = frozenset()


@dataclass(frozen=True)
class Numbers:
    low: float = -math.inf
    high: float = math.inf
    low_excluded: bool = False
    high_excluded: bool = False
    is_integer: bool = False
    multiples: frozenset[float] = frozenset()
    no_multiples: frozenset[tuple[float, Source]] = frozenset()
    no_integer: frozenset[Source] = frozenset()
    """Nothing, or the keyword that excludes integers."""
    lost: Lost = frozenset()
    spare: Lost = frozenset()
    kind: Kind = field(default="number", init=False)

    @property
    def is_empty(self) -> bool:
        if self.is_integer and self.no_integer:
            return True
        if self.is_integer:
            first, last = self.integers
            return first > last
        return self.low > self.high or (
            self.low == self.high and (self.low_excluded or self.high_excluded)
        )

    @property
    def integers(self) -> tuple[float, float]:
        """The first and the last integer in the range."""
        first, last = self.low, self.high
        if first != -math.inf:
            first = math.ceil(first)
            first += self.low_excluded and first == self.low
        if last != math.inf:
            last = math.floor(last)
            last -= self.high_excluded and last == self.high
        return first, last

    def has(self, value: float) -> bool:
        return (
            (self.low < value or (value == self.low and not self.low_excluded))
            and (value < self.high or (value == self.high and not self.high_excluded))
            and not (self.is_integer and not is_integral(value))
            and not (self.no_integer and is_integral(value))
            and all(is_multiple(value, each) for each in self.multiples)
            and not any(is_multiple(value, each) for each, _ in self.no_multiples)
        )


@dataclass(frozen=True)
class Strings:
    min_length: int = 0
    max_length: int | None = None
    patterns: frozenset[Expression] = frozenset()
    no_patterns: frozenset[Expression] = frozenset()
    formats: frozenset[str] = frozenset()
    no_texts: frozenset[tuple[str, Source]] = frozenset()
    lost: Lost = frozenset()
    spare: Lost = frozenset()
    kind: Kind = field(default="string", init=False)

    @property
    def is_empty(self) -> bool:
        return self.max_length is not None and self.min_length > self.max_length

    def has(self, text: str) -> tuple[bool, Lost]:
        """Whether it has a text, as far as that is known, and what is not known."""
        lost = set()
        is_in = self.min_length <= len(text) and len(text) <= (
            len(text) if self.max_length is None else self.max_length
        )
        is_in = is_in and not any(text == each for each, _ in self.no_texts)
        for expressions, wanted in ((self.patterns, True), (self.no_patterns, False)):
            for each in expressions:
                found = is_found(each.pattern, text)
                if found is None:
                    lost.add(each.source)
                elif found != wanted:
                    is_in = False
        return is_in, frozenset(lost)


@dataclass(frozen=True)
class Contains:
    """At least ``least`` and at most ``most`` items from ``start`` on are of the state."""

    state: State
    least: int
    most: int | None
    source: Source
    start: int = 0


@dataclass(frozen=True)
class Arrays:
    prefix: tuple[State, ...] = ()
    rest: State = ANYTHING
    """What every item behind the prefix must satisfy."""
    min_items: int = 0
    max_items: int | None = None
    contains: frozenset[Contains] = frozenset()
    unique: frozenset[Source] = frozenset()
    seen_prefix: int = 0
    """Items that count as evaluated (unevaluatedItems)."""
    seen_all: bool = False
    seen_states: frozenset[State] = frozenset()
    """Items that are evaluated if they are of one of these."""
    lost: Lost = frozenset()
    spare: Lost = frozenset()
    kind: Kind = field(default="array", init=False)

    @property
    def is_empty(self) -> bool:
        return self.max_items is not None and self.min_items > self.max_items

    def item(self, index: int) -> State:
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True)
class Objects:
    names: tuple[tuple[str, State], ...] = ()
    """Properties that were named, in order, with all that holds for them."""
    patterns: tuple[tuple[Expression, State], ...] = ()
    """All that holds for other properties whose names match."""
    rest: State = ANYTHING
    """What every other property must satisfy."""
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    counts: frozenset[Source] = frozenset()
    """The keywords that the two numbers are from."""
    keys: frozenset[tuple[State, Source]] = frozenset()
    """What every name must satisfy."""
    seen_names: frozenset[str] = frozenset()
    seen_patterns: frozenset[str] = frozenset()
    seen_all: bool = False
    is_listed: bool = False
    """Whether a schema lists properties."""
    is_open: bool = False
    """Whether a schema says something about properties that it does not list."""
    lost: Lost = frozenset()
    spare: Lost = frozenset()
    kind: Kind = field(default="object", init=False)

    @property
    def is_empty(self) -> bool:
        most = self.max_properties
        if any(state == NOTHING and name in self.required for name, state in self.names):
            return True
        return most is not None and max(self.min_properties, len(self.required)) > most


Atom = Values | Numbers | Strings | Arrays | Objects
Shape = dict[Kind, tuple[Atom, ...]]

BOOLEANS = Values("boolean", (constant(True), constant(False)))
NULL = Values("null", (constant(None),))
WHOLE: dict[Kind, Atom] = {
    "null": NULL,
    "boolean": BOOLEANS,
    "number": Numbers(),
    "string": Strings(),
    "array": Arrays(),
    "object": Objects(),
}
"""All values of each type."""


def everything() -> Shape:
    return {kind: (atom,) for kind, atom in WHOLE.items()}


def shape_of(atoms: Iterable[Atom], *, other_kinds: bool = False) -> Shape:
    """A shape of these atoms. other_kinds: the types that have none among them are whole."""
    shape: Shape = {}
    for atom in atoms:
        shape[atom.kind] = (*shape.get(atom.kind, ()), atom)
    if other_kinds:
        for kind in KINDS:
            shape.setdefault(kind, (WHOLE[kind],))
    return shape


def losing(shape: Shape, *sources: Source) -> Shape:
    """The shape with demands that it does not describe."""
    return {
        kind: tuple(replace(atom, lost=atom.lost | set(sources)) for atom in atoms)
        for kind, atoms in shape.items()
    }


def union(*shapes: Shape) -> Shape:
    found: Shape = {}
    for shape in shapes:
        for kind, atoms in shape.items():
            found[kind] = _without_covered(kind, dict.fromkeys((*found.get(kind, ()), *atoms)))
    return found


def _has_seen(atom: Atom) -> bool:
    if isinstance(atom, Objects):
        return bool(atom.seen_names or atom.seen_patterns or atom.seen_all)
    if isinstance(atom, Arrays):
        return bool(atom.seen_prefix or atom.seen_all or atom.seen_states)
    return False


def _without_covered(kind: Kind, atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    """The atoms without those that others cover. All lists of values become one atom. Beside the
    atom of all values of the type, only those stay that record what they have evaluated."""
    others = [each for each in atoms if not (isinstance(each, Values) and not each.lost)]
    values = [each for each in atoms if isinstance(each, Values) and not each.lost]
    if WHOLE[kind] in others:
        # What an alternative has seen matters where it allows nothing new.
        others = [each for each in others if each == WHOLE[kind] or _has_seen(each)]
        values = []
    if len(values) > 1:
        unique = tuple(dict.fromkeys(value for each in values for value in each.values))
        values = [Values(kind, unique)]
    return (*values, *others)
