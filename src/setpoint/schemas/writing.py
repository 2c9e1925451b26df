"""Writes shapes as a JSON schema of the keywords that grammar libraries enforce."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

from setpoint.schemas import array_forms, object_forms
from setpoint.schemas.atoms import WHOLE, Arrays, Atom, Numbers, Objects, Strings, Values
from setpoint.schemas.document import LISTS
from setpoint.schemas.expressions import is_regular, none_of
from setpoint.schemas.report import Report
from setpoint.schemas.shapes import Shapes, listed_numbers
from setpoint.schemas.states import ANYTHING, State
from setpoint.schemas.values import KINDS

MAX_EXCLUDED_CHARS = 2000
MAX_EXCLUDED_LENGTH = 100
"""Most characters of the texts that a string must not be, in all and of each."""

BOTH_BRANCHES = "where 'if' does not hold, both 'then' and 'else' do"

Schema = dict[str, Any] | bool


class Writer:
    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self.report = Report()
        self._names: dict[State, str] = {}
        self._definitions: dict[str, Schema] = {}
        self._uses: dict[str, int] = {}

    def document(self, state: State) -> Schema:
        """The schema of a state, and of all that it refers to."""
        begun = self._written(state)
        root: Schema = self._resolved(begun)
        if not isinstance(root, dict):
            return root
        kept = {
            name: self._resolved(schema, is_own=True)
            for name, schema in self._definitions.items()
            if self._uses[name] > 1
        }
        return {**root, **({"$defs": kept} if kept else {})}

    def _written(self, state: State) -> Schema:
        """The schema of a state: itself, or a reference to it."""
        if state == ANYTHING:
            return True
        name = self._names.get(state)
        if name is None:
            self._shapes.spend()
            name = self._names[state] = str(len(self._names))
            self._uses[name] = 0
            schema = self._definitions[name] = self._of_state(state)
            if not _is_nested(schema):
                self._uses[name] = -1  # short enough to be repeated
        if self._uses[name] < 0:
            return self._definitions[name]
        self._uses[name] += 1
        return {"$ref": f"#/$defs/{name}"}

    def _resolved(self, schema: Any, *, is_own: bool = False) -> Any:
        """The schema with references to what is used once replaced by what they refer to."""
        if isinstance(schema, list):
            return [self._resolved(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        reference = schema.get("$ref")
        if isinstance(reference, str):
            name = reference.removeprefix("#/$defs/")
            return self._resolved(self._definitions[name]) if self._uses[name] <= 1 else schema
        literal = ("const", "enum")
        return {
            key: value if key in literal else self._resolved(value) for key, value in schema.items()
        }

    def _of_state(self, state: State) -> Schema:
        shape = self._shapes.of(state)
        found: list[Schema] = []
        whole = [kind for kind in KINDS if shape.get(kind) == (WHOLE[kind],)]
        if len(whole) == len(KINDS):
            return True
        if whole:
            found.append({"type": whole[0] if len(whole) == 1 else whole})
        for kind in KINDS:
            if kind not in whole:
                for atom in self._needed(shape.get(kind, ())):
                    found += self._of_atom(atom)
        possible = [each for each in found if each is not False]
        unique = list({json.dumps(each): each for each in possible}.values())
        if not unique:
            return False
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _needed(self, atoms: tuple[Atom, ...]) -> list[Atom]:
        """The atoms without the spare ones that no grammar has as they are."""
        kept = [atom for atom in atoms if not atom.spare or self._shapes.is_exact(atom)]
        if not kept:
            return list(atoms)
        for atom in atoms:
            if atom not in kept:
                for source in sorted(atom.spare):
                    self.report.narrow(source, BOTH_BRANCHES)
        return kept

    def _of_atom(self, atom: Atom) -> list[Schema]:
        self.report.lose(atom.lost)
        self._shapes.spend()
        if isinstance(atom, Numbers) and (atom.no_multiples or atom.no_integer):
            atom = listed_numbers(atom)
        match atom:
            case Values():
                return [_enumerated(atom)] if atom.values else []
            case Numbers():
                return [self._of_numbers(atom)]
            case Strings():
                return [self._of_strings(atom)]
            case Arrays():
                forms = array_forms.forms_of(atom, self._shapes, self.report)
                return [
                    _enumerated(form) if isinstance(form, Values) else self._of_array(form)
                    for form in forms
                    if isinstance(form, Values | Arrays)
                ]
            case Objects():
                objects = object_forms.forms_of(atom, self._shapes, self.report)
                return [self._of_object(form) for form in objects]

    def _of_numbers(self, atom: Numbers) -> Schema:
        self.report.lose(source for _, source in atom.no_multiples)
        self.report.lose(atom.no_integer)
        schema: dict[str, Any] = {"type": "integer" if atom.is_integer else "number"}
        if atom.low != -math.inf:
            schema["exclusiveMinimum" if atom.low_excluded else "minimum"] = atom.low
        if atom.high != math.inf:
            schema["exclusiveMaximum" if atom.high_excluded else "maximum"] = atom.high
        if atom.multiples:
            schema["multipleOf"] = _common_multiple(atom.multiples)
        return schema

    def _of_strings(self, atom: Strings) -> Schema:
        schema: dict[str, Any] = {"type": "string"}
        if atom.min_length:
            schema["minLength"] = atom.min_length
        if atom.max_length is not None:
            schema["maxLength"] = atom.max_length
        self.report.lose(each.source for each in atom.no_patterns)
        self.report.lose(each.source for each in atom.patterns if not is_regular(each.pattern))
        patterns = sorted(each.pattern for each in atom.patterns if is_regular(each.pattern))
        excluded = sorted(text for text, _ in atom.no_texts)
        if sum(map(len, excluded)) > MAX_EXCLUDED_CHARS or any(
            len(text) > MAX_EXCLUDED_LENGTH for text in excluded
        ):
            self.report.lose(source for _, source in atom.no_texts)
        elif excluded:
            patterns.append(none_of(excluded))
        parts = [{"pattern": each} for each in dict.fromkeys(patterns)]
        parts += [{"format": each} for each in sorted(atom.formats)]
        while parts and parts[0].keys().isdisjoint(schema):
            schema |= parts.pop(0)
        if parts:
            schema["allOf"] = [{"type": "string", **part} for part in parts]
        return schema

    def _of_array(self, atom: Arrays) -> Schema:
        """The schema; false if an item that the array must have turns out to be impossible."""
        schema: dict[str, Any] = {"type": "array"}
        written = [self._written(state) for state in atom.prefix[: atom.max_items]]
        if False in written[: atom.min_items]:
            return False
        if written:
            # xgrammar 0.2.8 refuses true there.
            schema["prefixItems"] = [{} if each is True else each for each in written]
        if atom.max_items is None or atom.max_items > len(atom.prefix):
            rest = self._written(atom.rest)
            if rest is False and atom.min_items > len(atom.prefix):
                return False
            if rest is not True:
                schema["items"] = rest
        else:
            schema["items"] = False
        if atom.min_items:
            schema["minItems"] = atom.min_items
        if atom.max_items is not None and schema.get("items") is not False:
            schema["maxItems"] = atom.max_items
        return schema

    def _of_object(self, atom: Objects) -> Schema:
        """The schema; false if a required property turns out to be impossible."""
        rest = self._written(atom.rest)
        patterns: dict[str, Schema] = {}
        for expression, state in atom.patterns:
            if is_regular(expression.pattern):
                patterns[expression.pattern] = self._written(state)
            else:
                self.report.lose((expression.source,))
        named = {name: self._written(state) for name, state in atom.names}
        if any(named.get(name) is False for name in atom.required):
            return False
        if rest is False and not patterns:
            named = {name: each for name, each in named.items() if each is not False}
        schema: dict[str, Any] = {"type": "object"}
        if named:
            schema["properties"] = named
        if patterns:
            schema["patternProperties"] = patterns
        if atom.required:
            schema["required"] = [name for name in named if name in atom.required]
        if atom.min_properties:
            schema["minProperties"] = atom.min_properties
        if atom.max_properties is not None:
            schema["maxProperties"] = atom.max_properties
        if rest is not True or named:
            schema["additionalProperties"] = rest
        return schema


def _enumerated(atom: Values) -> Schema:
    whole = WHOLE[atom.kind]
    if isinstance(whole, Values) and set(whole.values) == set(atom.values):
        return {"type": atom.kind}
    return {"enum": [each.value for each in atom.values]}


def _is_nested(schema: Schema) -> bool:
    return isinstance(schema, dict) and any(
        isinstance(value, dict) or (isinstance(value, list) and (len(value) > 8 or key in LISTS))
        for key, value in schema.items()
    )


def _common_multiple(numbers: frozenset[float]) -> float:
    fractions = [Fraction(repr(number)) for number in numbers]
    found = Fraction(
        math.lcm(*(each.numerator for each in fractions)),
        math.gcd(*(each.denominator for each in fractions)),
    )
    return found.numerator if found.denominator == 1 else float(found)
