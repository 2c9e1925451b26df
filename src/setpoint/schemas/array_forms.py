"""Arrays without ``contains`` and ``uniqueItems``: as alternatives that list their items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, combinations, permutations, product
from math import comb, perm

from setpoint.schemas.atoms import Arrays, Atom, Contains, Values
from setpoint.schemas.report import Report
from setpoint.schemas.shapes import Shapes
from setpoint.schemas.states import NOTHING, State, both, opposite
from setpoint.schemas.values import Constant, constant

MAX_ALTERNATIVES = 256
"""Most alternatives that one keyword makes of an array."""
MAX_LISTED = 2000
"""Most arrays that are listed one by one."""
WINDOW = 8
"""How many items, behind those that the schema lists, may be the ones that ``contains`` wants."""


def forms_of(array: Arrays, shapes: Shapes, report: Report) -> list[Atom]:
    """Atoms without ``contains`` and ``unique``; what cannot be enforced goes to the report."""
    array = _shortened(array, shapes)
    if array.unique:
        listed = _different(array, shapes, report)
        if listed is not None:
            return [Values("array", tuple(listed))] if listed else []
        if not _differ_anyway(array, shapes):
            report.lose(array.unique)
        array = replace(array, unique=frozenset())
    forms = [array]
    for demand in sorted(array.contains, key=lambda each: each.source):
        forms = [each for form in forms for each in _containing(form, demand, shapes, report)][
            :MAX_ALTERNATIVES
        ]
    return [replace(form, contains=frozenset()) for form in forms if not form.is_empty]


def _shortened(array: Arrays, shapes: Shapes) -> Arrays:
    """The array with the length that its items allow."""
    for index, state in enumerate((*array.prefix, array.rest)):
        if shapes.nothing_satisfies(state):
            most = index if array.max_items is None else min(index, array.max_items)
            array = replace(array, max_items=most, prefix=array.prefix[:most], rest=NOTHING)
            break
    if array.max_items is not None and len(array.prefix) > array.max_items:
        array = replace(array, prefix=array.prefix[: array.max_items])
    return array


def _different(array: Arrays, shapes: Shapes, report: Report) -> list[Constant] | None:
    """All arrays of different items one by one; if they are too many, those whose items come in the
    order of the schema. None if these are too many, too, or not known."""
    choices = _choices(array, shapes)
    if choices is None:
        return None
    unlike = {value for values in choices for value in values}
    most = len(unlike) if array.max_items is None else min(array.max_items, len(unlike))
    lengths = range(array.min_items, most + 1)
    if len(choices) != 1:
        return _listed(array, shapes, chain.from_iterable(_lists(choices, n) for n in lengths))
    (values,) = choices
    if sum(perm(len(values), length) for length in lengths) <= MAX_LISTED:
        orders: Callable[..., Iterable[tuple[Constant, ...]]] = permutations
    elif sum(comb(len(values), length) for length in lengths) <= MAX_LISTED:
        orders = combinations
        for source in array.unique:
            report.narrow(source, "the items come in the order in which the schema lists them")
    else:
        return None
    return _listed(array, shapes, chain.from_iterable(orders(values, n) for n in lengths))


def _choices(array: Arrays, shapes: Shapes) -> list[tuple[Constant, ...]] | None:
    """The values of each item of the prefix, and of those behind it; None if not known."""
    states = [array.item(index) for index in range(len(array.prefix) + 1)]
    if array.max_items is not None and array.max_items <= len(array.prefix):
        states = states[: array.max_items]
    found = []
    for state in states:
        values = shapes.values_of(state)
        if values is None:
            return None
        found.append(values)
    return found


def _lists(choices: list[tuple[Constant, ...]], length: int) -> Iterator[tuple[Constant, ...]]:
    """Lists of this length, of one of each place's choices."""
    return product(*(choices[min(index, len(choices) - 1)] for index in range(length)))


def _listed(
    array: Arrays, shapes: Shapes, lists: Iterable[tuple[Constant, ...]]
) -> list[Constant] | None:
    """The lists that are in the array; None if they are too many."""
    found: list[Constant] = []
    for tried, items in enumerate(lists):
        if tried >= MAX_LISTED:
            return None
        if len(set(items)) == len(items):
            shapes.spend()
            value = constant([each.value for each in items])
            if not array.contains or shapes.has(array, value)[0]:
                found.append(value)
    return found


def _differ_anyway(array: Arrays, shapes: Shapes) -> bool:
    """Whether no two items can be equal because their schemas exclude each other."""
    if array.max_items is None or array.max_items > WINDOW:
        return False
    states = [array.item(index) for index in range(array.max_items)]
    return all(shapes.nothing_satisfies(both(*pair)) for pair in combinations(states, 2))


def _containing(
    array: Arrays, demand: Contains, shapes: Shapes, report: Report
) -> Iterator[Arrays]:
    """The array as alternatives in which it is fixed which items are of the demand's state."""
    wanted, unwanted = demand.state, opposite(demand.state)
    least, most, start = demand.least, demand.most, demand.start
    length = max(len(array.prefix), start)
    states = [array.item(index) for index in range(start, length + 1)]
    if all(shapes.nothing_satisfies(both(state, unwanted)) for state in states):
        top = array.max_items if most is None else _least(array.max_items, most + start)
        floor = max(array.min_items, least + start if least else 0)
        yield replace(array, min_items=floor, max_items=top)
        return
    if most is not None and most > WINDOW:
        report.narrow(demand.source, f"the array has at most {most + start} items")
        array = replace(array, max_items=_least(array.max_items, most + start))
        demand, most = replace(demand, most=None), None
    if least == 0 and most is None:
        yield array
        return
    window, is_whole = _window(array, demand)
    if window is None:
        report.lose((demand.source,))
        yield array
        return
    if not is_whole and least > 0:
        report.narrow(demand.source, f"these items are among the first {window}")
    possible = window - start
    for count in range(least, (possible if most is None else min(most, possible)) + 1):
        for places in combinations(range(start, window), count):
            yield _with_places(array, places, window, demand, wanted, unwanted)
        if most is None:
            return  # the others may be of any state


def _window(array: Arrays, demand: Contains) -> tuple[int | None, bool]:
    """Up to which item the wanted ones may be, and whether that excludes no array."""
    length = max(len(array.prefix), demand.start)
    if demand.least > MAX_ALTERNATIVES:
        return None, False
    furthest = length + max(WINDOW, demand.least)
    if array.max_items is not None:
        furthest = min(array.max_items, furthest + MAX_ALTERNATIVES)
    for window in range(furthest, demand.start + demand.least - 1, -1):
        places = window - demand.start
        most = demand.least if demand.most is None else min(demand.most, places)
        number = sum(comb(places, count) for count in range(demand.least, most + 1))
        if number <= MAX_ALTERNATIVES:
            return window, window == array.max_items
    return None, False


def _with_places(
    array: Arrays,
    places: tuple[int, ...],
    window: int,
    demand: Contains,
    wanted: State,
    unwanted: State,
) -> Arrays:
    exact = demand.most is not None
    length = window if exact else (places[-1] + 1 if places else 0)
    prefix = []
    for index in range(max(length, len(array.prefix), demand.start if exact else 0)):
        state = array.item(index)
        if index in places:
            state = both(state, wanted)
        elif exact and index >= demand.start:
            state = both(state, unwanted)
        prefix.append(state)
    return replace(
        array,
        prefix=tuple(prefix),
        rest=both(array.rest, unwanted) if exact else array.rest,
        min_items=max(array.min_items, places[-1] + 1 if places else 0),
    )


def _least(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
