"""What a place in a JSON text must satisfy: a *state* is a set of demands, all of which hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Demand(NamedTuple):
    """Demands that a schema of the document is satisfied, or that it is not."""

    node: int
    """Number of the schema in the document."""
    holds: bool = True


@dataclass(frozen=True, slots=True)
class OneOfStates:
    """Demands that at least one of these states is satisfied."""

    states: frozenset[State]


State = frozenset[Demand | OneOfStates]

ANYTHING: State = frozenset()
NOTHING: State = frozenset((OneOfStates(frozenset()),))


def either(states: Iterable[State]) -> State:
    """The state that is satisfied where one of these is."""
    unique = frozenset(state for state in states if state != NOTHING)
    if ANYTHING in unique:
        return ANYTHING
    if len(unique) == 1:
        return next(iter(unique))
    return frozenset((OneOfStates(unique),))


def both(first: State, second: State) -> State:
    return NOTHING if NOTHING in (first, second) else first | second


def opposite(state: State) -> State:
    """The state that is satisfied where this one is not."""
    return either(_opposite(demand) for demand in state) if state else NOTHING


def _opposite(demand: Demand | OneOfStates) -> State:
    if isinstance(demand, Demand):
        return frozenset((Demand(demand.node, not demand.holds),))
    found = ANYTHING
    for state in demand.states:
        found = both(found, opposite(state))
    return found
