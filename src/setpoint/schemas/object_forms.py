"""Objects without ``propertyNames``, and with ``minProperties`` and ``maxProperties`` only where
every listed property is required: grammar libraries count no optional ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

from setpoint.schemas.atoms import Expression, Objects, Source, Strings, Values
from setpoint.schemas.expressions import is_regular, none_of, of_length, one_of
from setpoint.schemas.meeting import state_of_name
from setpoint.schemas.report import Report
from setpoint.schemas.shapes import Shapes
from setpoint.schemas.states import NOTHING, State

MAX_COUNTED = 6
"""Most optional properties that are counted: each doubles the number of alternatives."""


def forms_of(objects: Objects, shapes: Shapes, report: Report) -> list[Objects]:
    """What cannot be enforced goes to the report."""
    for keys, source in sorted(objects.keys, key=lambda each: each[1]):
        objects = _with_keys(objects, keys, source, shapes, report)
    objects = _with_required(replace(objects, keys=frozenset()), report)
    if objects.is_empty:
        return []
    return _counted(objects, shapes, report)


def _with_keys(
    objects: Objects, keys: State, source: Source, shapes: Shapes, report: Report
) -> Objects:
    """The objects whose names satisfy the state."""
    names = {}
    for name, state in objects.names:
        verdict = shapes.satisfies(name, keys)
        if verdict is None:
            report.lose((source,))
        names[name] = NOTHING if verdict is False else state
    named = replace(objects, names=tuple(names.items()))
    for name in objects.required:
        if name not in names and shapes.satisfies(name, keys) is False:
            return replace(named, names=(*named.names, (name, NOTHING)))
    allowed = shapes.of(keys).get("string", ())
    values = shapes.values_of(keys)
    if not allowed or values is not None:
        for value in values or ():
            if isinstance(value.value, str) and value.value not in names:
                names[value.value], lost = state_of_name(objects, value.value)
                report.lose(lost)
        return replace(named, names=tuple(names.items()), patterns=(), rest=NOTHING)
    if all(state == NOTHING for _, state in objects.patterns) and objects.rest == NOTHING:
        return named
    expression = _expression([atom for atom in allowed if isinstance(atom, Strings | Values)])
    if expression is None or objects.patterns:
        report.lose((source,))
        return named
    if expression == "":
        return named
    return replace(named, patterns=((Expression(expression, source), objects.rest),), rest=NOTHING)


def _expression(atoms: list[Strings | Values]) -> str | None:
    """An expression for the strings of these atoms: "" for all strings, None if there is none."""
    found = []
    for atom in atoms:
        if isinstance(atom, Values):
            return None
        patterns = [each.pattern for each in atom.patterns]
        if atom.no_texts:
            patterns.append(none_of([text for text, _ in atom.no_texts]))
        if atom.min_length or atom.max_length is not None:
            patterns.append(of_length(atom.min_length, atom.max_length))
        if len(patterns) > 1 or atom.no_patterns or atom.formats or atom.lost:
            return None
        if patterns and not is_regular(patterns[0]):
            return None
        if not patterns:
            return ""
        found += patterns
    return one_of(found)


def _with_required(objects: Objects, report: Report) -> Objects:
    """The objects with all required properties among the named ones."""
    names = dict(objects.names)
    is_listed = objects.is_listed and all(name in names for name in objects.required)
    for name in (each for each in objects.required if each not in names):
        names[name], lost = state_of_name(objects, name)
        report.lose(lost)
    return replace(objects, names=tuple(names.items()), is_listed=is_listed)


def closed(objects: Objects) -> Objects:
    """The objects with only the properties that their schemas list, unless one speaks of others.
    JSON Schema allows any others then, with which a small model continues until it has no tokens
    left."""
    if not objects.is_listed or objects.is_open:
        return objects
    return replace(objects, patterns=(), rest=NOTHING)


def _counted(objects: Objects, shapes: Shapes, report: Report) -> list[Objects]:
    names = {
        name: NOTHING if shapes.nothing_satisfies(state) else state for name, state in objects.names
    }
    if any(names[name] == NOTHING for name in objects.required):
        return []
    objects = closed(replace(objects, names=tuple(names.items())))
    possible = [name for name, state in names.items() if state != NOTHING]
    is_closed = shapes.nothing_satisfies(objects.rest) and not objects.patterns
    least, most = objects.min_properties, objects.max_properties
    if most is not None and is_closed and most >= len(possible):
        most = None
    if least <= len(objects.required):
        least = 0
    objects = replace(objects, min_properties=least, max_properties=most)
    optional = [name for name in possible if name not in objects.required]
    if not optional or (least == 0 and most is None):
        return [objects]
    if len(optional) > MAX_COUNTED:
        return [_uncounted(objects, report, is_closed=is_closed)]
    forms = []
    subsets = chain.from_iterable(combinations(optional, n) for n in range(len(optional) + 1))
    for chosen in subsets:
        required = (*objects.required, *chosen)
        form = replace(
            objects,
            names=tuple(
                (name, state if name in required else NOTHING) for name, state in names.items()
            ),
            required=required,
        )
        if not form.is_empty and not (is_closed and len(required) < least):
            forms.append(form)
    return forms


def _uncounted(objects: Objects, report: Report, *, is_closed: bool) -> Objects:
    """The objects as they are, if llguidance counts these properties, or without the counts."""
    count = len(objects.required)
    least = max(0, objects.min_properties - count)
    most = None if objects.max_properties is None else objects.max_properties - count
    if is_closed and least <= 1 and most in (None, 1):
        return objects
    report.lose(objects.counts)
    return replace(objects, min_properties=0, max_properties=None)
