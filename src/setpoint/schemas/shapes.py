"""The shapes of states: which values satisfy all of their demands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from setpoint.schemas.atoms import (
    Arrays,
    Atom,
    Lost,
    Numbers,
    Objects,
    Shape,
    Source,
    Strings,
    Values,
    everything,
    union,
)
from setpoint.schemas.document import Document
from setpoint.schemas.judging import Validator, Verdict, every, negated, some
from setpoint.schemas.keywords import Keywords
from setpoint.schemas.limits import (
    MAX_ATOMS,
    MAX_STEPS,
    MAX_VALUES,
    PRUNED_FROM,
    LoopError,
    TooLargeError,
    TooManyError,
)
from setpoint.schemas.meeting import meet, state_of_name
from setpoint.schemas.states import Demand, OneOfStates, State
from setpoint.schemas.values import Constant, constant

Order = tuple[Any, ...]


def order_of(demand: Demand | OneOfStates) -> Order:
    """Demands are expanded in the order of the document, so that a schema always gives the same
    grammar."""
    if isinstance(demand, Demand):
        return (0, demand.node, not demand.holds)
    return (1, tuple(sorted(order_of_state(state) for state in demand.states)))


def order_of_state(state: State) -> Order:
    return tuple(sorted(map(order_of, state)))


class Shapes:
    def __init__(self, document: Document) -> None:
        self.document = document
        self._keywords = Keywords(document, self)
        self._validator = Validator(document, self.spend)
        self._steps = 0
        self._of_demand: dict[Demand, Shape] = {}
        self._of_state: dict[State, Shape] = {}
        self._expanding: set[Demand] = set()
        self._judging: set[State] = set()
        self._empty: dict[State, bool] = {}

    def spend(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise TooLargeError

    def of(self, state: State) -> Shape:
        """Raises RequestError, TooLargeError."""
        if state in self._of_state:
            return self._of_state[state]
        shape = everything()
        for demand in sorted(state, key=order_of):
            shape = self.met(shape, self._shape(demand))
        self._of_state[state] = shape
        return shape

    def met(self, first: Shape, second: Shape) -> Shape:
        """What two shapes have in common. Raises TooManyError."""
        if any(
            len(first.get(kind, ())) * len(atoms) > 16 * MAX_ATOMS for kind, atoms in second.items()
        ):
            raise TooManyError
        found = union(meet(first, second, self))
        if any(len(atoms) > PRUNED_FROM for atoms in found.values()):
            found = {
                kind: tuple(atom for atom in atoms if not self._is_empty(atom))
                for kind, atoms in found.items()
            }
        if any(len(atoms) > MAX_ATOMS for atoms in found.values()):
            raise TooManyError
        return found

    def _shape(self, demand: Demand | OneOfStates) -> Shape:
        self.spend()
        if isinstance(demand, OneOfStates):
            return union(*(self.of(state) for state in sorted(demand.states, key=order_of_state)))
        return self.of_schema(demand)

    def of_schema(self, demand: Demand) -> Shape:
        """Raises LoopError for one that refers to itself without a property or an item between."""
        if demand in self._of_demand:
            return self._of_demand[demand]
        if demand in self._expanding:
            raise LoopError
        self._expanding.add(demand)
        try:
            shape = self._keywords.shape(demand)
        finally:
            self._expanding.discard(demand)
        self._of_demand[demand] = shape
        return shape

    # What is asked about states and atoms.

    def is_empty(self, shape: Shape) -> bool:
        """Whether certainly no value is in it."""
        return all(self._is_empty(atom) for atoms in shape.values() for atom in atoms)

    def nothing_satisfies(self, state: State) -> bool:
        """Whether certainly no value satisfies the state."""
        if state in self._empty:
            return self._empty[state]
        if state in self._judging:
            return False
        self._judging.add(state)
        try:
            found = self.is_empty(self.of(state))
        except LoopError:
            return False
        finally:
            self._judging.discard(state)
        if found or not self._judging:  # otherwise it may rest on what is not known yet
            self._empty[state] = found
        return found

    def excludes(self, first: Shape, second: Shape) -> bool:
        """Whether it can be seen at once that no value is in both: they are of different types, or
        objects that differ in the value of a required property."""
        return all(
            isinstance(one, Objects) and isinstance(other, Objects) and self._differ(one, other)
            for kind in first.keys() & second.keys()
            for one in first[kind]
            for other in second[kind]
        )

    def _differ(self, one: Objects, other: Objects) -> bool:
        own, others = dict(one.names), dict(other.names)
        for name in one.required:
            if name in own and name in others:
                values = [self.values_of(own[name]), self.values_of(others[name])]
                if all(each is not None for each in values):
                    first, second = (set(each or ()) for each in values)
                    if first.isdisjoint(second):
                        return True
        return False

    def _is_empty(self, atom: Atom) -> bool:
        self.spend()
        if isinstance(atom, Objects):
            needed = [state_of_name(atom, name)[0] for name in atom.required]
        elif isinstance(atom, Arrays):
            needed = [
                atom.item(index) for index in range(min(atom.min_items, len(atom.prefix) + 1))
            ]
        else:
            needed = []
        return any(self.nothing_satisfies(state) for state in needed)

    def is_exact(self, atom: Atom) -> bool:
        """Whether a grammar has the atom as it is, as far as can be seen from here."""
        self.spend()
        if atom.lost:
            return False
        match atom:
            case Numbers():
                return not (atom.no_multiples or atom.no_integer)
            case Strings():
                return not atom.no_patterns
            case Objects():
                inner = [state for _, state in atom.names] + [state for _, state in atom.patterns]
                return all(self._is_exact(state) for state in (*inner, atom.rest))
            case Arrays():
                inner = [*atom.prefix, atom.rest, *(each.state for each in atom.contains)]
                return all(self._is_exact(state) for state in inner)
        return True

    def _is_exact(self, state: State) -> bool:
        if not state or state in self._judging:
            return True
        self._judging.add(state)
        try:
            return all(self.is_exact(atom) for atoms in self.of(state).values() for atom in atoms)
        except LoopError:
            return True
        finally:
            self._judging.discard(state)

    def values_of(self, state: State) -> tuple[Constant, ...] | None:
        """All values that satisfy the state, if these are few and known."""
        found: list[Constant] = []
        for atoms in self.of(state).values():
            for atom in atoms:
                listed = listed_numbers(atom) if isinstance(atom, Numbers) else atom
                if not isinstance(listed, Values) or listed.lost:
                    return None
                found += listed.values
        unique = tuple(dict.fromkeys(found))
        return unique if len(unique) <= MAX_VALUES else None

    # What is asked about values.

    def has(self, atom: Atom, value: Constant) -> tuple[bool, Lost]:
        plain, unknown = value.value, frozenset[Source]()
        match atom:
            case Values():
                return value in atom.values, unknown
            case Numbers():
                return atom.has(plain), unknown
            case Strings():
                return atom.has(plain)
            case Arrays():
                verdict = self._array_has(atom, plain)
                sources = {each.source for each in atom.contains} | atom.unique
            case Objects():
                verdict = self._object_has(atom, plain)
                sources = {each.source for each, _ in atom.patterns} | {
                    each for _, each in atom.keys
                }
        if verdict is None:
            return True, frozenset(sources) or frozenset((Source("enum", "#"),))
        return verdict, unknown

    def satisfies(self, value: Any, state: State) -> Verdict:
        return every(self._meets(value, demand) for demand in state)

    def _meets(self, value: Any, demand: Demand | OneOfStates) -> Verdict:
        if isinstance(demand, OneOfStates):
            return some(self.satisfies(value, state) for state in demand.states)
        verdict = self._validator.verdict(demand.node, value)
        return verdict if demand.holds else negated(verdict)

    def _array_has(self, atom: Arrays, value: list[Any]) -> Verdict:
        if (
            not atom.min_items
            <= len(value)
            <= (len(value) if atom.max_items is None else atom.max_items)
        ):
            return False
        if atom.unique and len(set(map(constant, value))) < len(value):
            return False
        found = [self.satisfies(each, atom.item(index)) for index, each in enumerate(value)]
        for demand in atom.contains:
            which = [self.satisfies(each, demand.state) for each in value[demand.start :]]
            most = len(which) if demand.most is None else demand.most
            if None in which:
                found.append(None)
            else:
                found.append(demand.least <= which.count(True) <= most)
        return every(found)

    def _object_has(self, atom: Objects, value: dict[str, Any]) -> Verdict:
        most = len(value) if atom.max_properties is None else atom.max_properties
        has_required = all(name in value for name in atom.required)
        if not (has_required and atom.min_properties <= len(value) <= most):
            return False
        found: list[Verdict] = []
        for name, each in value.items():
            state, unknown = state_of_name(atom, name)
            found.append(None if unknown else self.satisfies(each, state))
            found += [self.satisfies(name, keys) for keys, _ in atom.keys]
        return every(found)


def listed_numbers(atom: Numbers) -> Atom:
    """The numbers one by one if they are few integers; otherwise the atom."""
    first, last = atom.integers
    if not atom.is_integer or last - first >= MAX_VALUES:
        return atom
    own = replace(atom, lost=frozenset())
    values = (number for number in range(int(first), int(last) + 1) if own.has(number))
    return Values("number", tuple(map(constant, values)), atom.lost)
