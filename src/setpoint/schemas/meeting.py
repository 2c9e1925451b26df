"""The values that two shapes have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from setpoint.schemas.atoms import (
    WHOLE,
    Arrays,
    Atom,
    Lost,
    Numbers,
    Objects,
    Shape,
    Strings,
    Values,
)
from setpoint.schemas.expressions import is_found
from setpoint.schemas.states import ANYTHING, State, both
from setpoint.schemas.values import Constant


class Judge(Protocol):
    """Knows what states mean."""

    def spend(self, steps: int = 1) -> None:
        """Count work. Raises TooLarge if it was too much."""

    def has(self, atom: Atom, value: Constant) -> tuple[bool, Lost]:
        """Whether the atom has a value of its type, as far as that is known, and what is not."""
        ...


def meet(first: Shape, second: Shape, judge: Judge) -> Shape:
    found: Shape = {}
    for kind, atoms in first.items():
        others = second.get(kind, ())
        judge.spend(len(atoms) * len(others))
        met = (meet_atoms(one, other, judge) for one in atoms for other in others)
        if some := tuple(dict.fromkeys(atom for atom in met if atom is not None)):
            found[kind] = some
    return found


def meet_atoms(one: Atom, other: Atom, judge: Judge) -> Atom | None:
    """None if they have no value in common."""
    if one == WHOLE[one.kind]:
        return other
    if other == WHOLE[other.kind]:
        return one
    if isinstance(one, Values):
        return _values_in(one, other, judge)
    if isinstance(other, Values):
        return _values_in(other, one, judge)
    met: Numbers | Strings | Arrays | Objects
    match one, other:
        case Numbers(), Numbers():
            met = _numbers(one, other)
        case Strings(), Strings():
            met = _strings(one, other)
        case Arrays(), Arrays():
            met = _arrays(one, other, judge)
        case Objects(), Objects():
            met = _objects(one, other, judge)
        case _:
            raise AssertionError(f"{one.kind} meets {other.kind}")
    if met.is_empty:
        return None
    lost, spare = met.lost | one.lost | other.lost, one.spare | other.spare
    return replace(met, lost=lost, spare=spare)


def _values_in(values: Values, atom: Atom, judge: Judge) -> Values | None:
    kept, lost = [], values.lost | atom.lost
    for value in values.values:
        judge.spend()
        is_in, unknown = judge.has(atom, value)
        if is_in:
            kept.append(value)
            lost |= unknown
    return Values(values.kind, tuple(kept), lost, values.spare | atom.spare) if kept else None


def _numbers(one: Numbers, other: Numbers) -> Numbers:
    low, high = max(one.low, other.low), min(one.high, other.high)
    pair = (one, other)
    return Numbers(
        low,
        high,
        low_excluded=any(each.low == low and each.low_excluded for each in pair),
        high_excluded=any(each.high == high and each.high_excluded for each in pair),
        is_integer=one.is_integer or other.is_integer,
        multiples=one.multiples | other.multiples,
        no_multiples=one.no_multiples | other.no_multiples,
        no_integer=one.no_integer | other.no_integer,
    )


def _least(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _strings(one: Strings, other: Strings) -> Strings:
    return Strings(
        max(one.min_length, other.min_length),
        _least(one.max_length, other.max_length),
        patterns=one.patterns | other.patterns,
        no_patterns=one.no_patterns | other.no_patterns,
        formats=one.formats | other.formats,
        no_texts=one.no_texts | other.no_texts,
    )


def _arrays(one: Arrays, other: Arrays, judge: Judge) -> Arrays:
    length = max(len(one.prefix), len(other.prefix))
    judge.spend(length)
    return Arrays(
        tuple(both(one.item(index), other.item(index)) for index in range(length)),
        both(one.rest, other.rest),
        max(one.min_items, other.min_items),
        _least(one.max_items, other.max_items),
        contains=one.contains | other.contains,
        unique=one.unique | other.unique,
        seen_prefix=max(one.seen_prefix, other.seen_prefix),
        seen_all=one.seen_all or other.seen_all,
        seen_states=one.seen_states | other.seen_states,
    )


def state_of_name(objects: Objects, name: str) -> tuple[State, Lost]:
    """What a property must satisfy, and which expressions could not be tried on its name."""
    for own, state in objects.names:
        if own == name:
            return state, frozenset()
    state, lost, is_matched = ANYTHING, set(), False
    for expression, each in objects.patterns:
        match = is_found(expression.pattern, name)
        if match is None:
            lost.add(expression.source)
        elif match:
            state, is_matched = both(state, each), True
    if not is_matched and not lost:
        state = objects.rest
    return state, frozenset(lost)


def _objects(one: Objects, other: Objects, judge: Judge) -> Objects:
    lost = one.lost | other.lost
    names: dict[str, State] = {}
    for name in dict.fromkeys(name for each in (one, other) for name, _ in each.names):
        judge.spend()
        (first, some), (second, more) = state_of_name(one, name), state_of_name(other, name)
        names[name] = both(first, second)
        lost |= some | more
    patterns = {}
    own = [{each.pattern: state for each, state in it.patterns} for it in (one, other)]
    for expression, _ in (*one.patterns, *other.patterns):
        judge.spend()
        patterns[expression.pattern] = (
            expression,
            both(
                own[0].get(expression.pattern, one.rest),
                own[1].get(expression.pattern, other.rest),
            ),
        )
    return Objects(
        tuple(names.items()),
        tuple(patterns.values()),
        both(one.rest, other.rest),
        tuple(dict.fromkeys((*one.required, *other.required))),
        max(one.min_properties, other.min_properties),
        _least(one.max_properties, other.max_properties),
        counts=one.counts | other.counts,
        keys=one.keys | other.keys,
        seen_names=one.seen_names | other.seen_names,
        seen_patterns=one.seen_patterns | other.seen_patterns,
        seen_all=one.seen_all or other.seen_all,
        is_listed=one.is_listed or other.is_listed,
        is_open=one.is_open or other.is_open,
        lost=lost,
    )
