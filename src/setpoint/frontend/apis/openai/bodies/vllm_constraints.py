"""Converts the constraints of vLLM's clients to sampling parameters: ``structured_outputs``, and
the older keys that begin with ``guided_``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import msgspec

from setpoint.core.constraint import ConstraintKind
from setpoint.core.errors import RequestError

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""Characters with a special meaning in a regular expression."""


class StructuredOutputs(msgspec.Struct, kw_only=True):
    json: Any = None
    """A JSON schema, as an object or as JSON text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    """The texts of which the output must be one."""
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class Guided(Protocol):
    """A body with vLLM's keys."""

    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    structured_outputs: StructuredOutputs | None


class Constrained(NamedTuple):
    """A constraint that a body asks for."""

    key: str
    """The key that asks for it, as the client sent it."""
    kind: ConstraintKind
    value: Any


def asked_for(body: Guided) -> Iterator[Constrained]:
    """Yields the constraints that a body asks for. Raises RequestError (400) for an empty list of
    choices."""
    older = StructuredOutputs(
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    yield from _asked(older, "guided_")
    if body.structured_outputs is not None:
        yield from _asked(body.structured_outputs, "structured_outputs.")


def without_repeated(wanted: Iterable[Constrained]) -> list[Constrained]:
    """The constraints that no earlier one is: clients that know several versions of vLLM send the
    same constraint under the names of each."""
    seen, kept = [], []
    for each in wanted:
        if (sense := _sense(each)) not in seen:
            seen.append(sense)
            kept.append(each)
    return kept


def _sense(asked: Constrained) -> tuple[ConstraintKind, Any]:
    """What a constraint means, however it is written."""
    if asked.kind in ("json_schema", "structural_tag") and isinstance(asked.value, str):
        with suppress(msgspec.DecodeError):
            return asked.kind, msgspec.json.decode(asked.value)
    return asked.kind, asked.value


def _asked(wanted: StructuredOutputs, prefix: str) -> Iterator[Constrained]:
    if wanted.json is not None:
        yield Constrained(f"{prefix}json", "json_schema", wanted.json)
    if wanted.json_object:
        yield Constrained(f"{prefix}json_object", "json_schema", {"type": "object"})
    if wanted.regex is not None:
        yield Constrained(f"{prefix}regex", "regex", wanted.regex)
    if wanted.choice is not None:
        if not wanted.choice:
            raise RequestError(f"{prefix}choice must not be empty.")
        yield Constrained(f"{prefix}choice", "regex", "|".join(map(_literal, wanted.choice)))
    if wanted.grammar is not None:
        yield Constrained(f"{prefix}grammar", "ebnf", wanted.grammar)
    if wanted.structural_tag is not None:
        yield Constrained(f"{prefix}structural_tag", "structural_tag", wanted.structural_tag)


def _literal(text: str) -> str:
    """A regular expression that matches only this text."""
    return _SPECIAL.sub(r"\\\g<0>", text)
