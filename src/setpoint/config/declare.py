"""How an option or an environment variable is declared: metadata on an annotated field of a frozen
struct.

The field's type and default belong to the struct; everything else (help, group, choices, bounds,
tuning range, whether it can change while serving) stands in one :class:`Option` or
:class:`EnvVar`. The parser, the documentation, ``/server_info`` and the checks read these and
nothing else.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

Scalar = str | int | float | bool | None
M = TypeVar("M")

MASK = "********"
"""Stands for a secret."""


@dataclass(slots=True, frozen=True)
class Range:
    """The values worth trying for a number, ends included."""

    low: float
    high: float
    log: bool = False
    """Try by factors instead of differences."""


@dataclass(slots=True, frozen=True)
class Option:
    """What a command-line option is, beyond its type and default."""

    group: str
    help: str
    choices: tuple[str | int, ...] = ()
    metavar: str = ""
    low: float | None = None
    """Smallest allowed value."""
    high: float | None = None
    """Largest allowed value."""
    infinite: bool = False
    """``inf`` is a value."""
    human: bool = False
    """Accepts human integers (``32k``, ``32Ki``)."""
    tunable: Range | tuple[Scalar, ...] | None = None
    """What a tuner may try; None = not a matter of tuning."""
    live: bool = False
    """Can change while the engine serves, between two steps (``config.live``)."""
    secret: bool = False
    """Its value is never printed: see ``shown``."""
    server_only: bool = False
    """Only where something listens; the other commands refuse it."""
    short: str = ""
    """A one-letter spelling, e.g. ``-o``."""
    no_effect: str = ""
    """Why it changes nothing here; "" for every option that does something."""

    @property
    def meaning(self) -> str:
        """The help, and that it changes nothing if so."""
        return (
            f"{self.help} Accepted without effect: {self.no_effect}."
            if self.no_effect
            else self.help
        )


@dataclass(slots=True, frozen=True)
class EnvVar:
    """An environment variable, under SGLang's name."""

    name: str
    help: str


@dataclass(slots=True, frozen=True)
class Field(Generic[M]):
    """One declared field: ``kind`` is the type of a value, without None; of one of them where there
    are several."""

    name: str
    kind: type
    default: Any
    """A Scalar, or a tuple of them."""
    about: M
    is_list: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def shown(field: Field[Option], value: Any) -> Any:
    """What logs, messages and ``/server_info`` show of the option's value."""
    return MASK if field.about.secret and value is not None else value


def declared(struct: type[msgspec.Struct], marker: type[M]) -> tuple[Field[M], ...]:
    """The fields of ``struct`` whose annotation carries a ``marker``, in order of declaration."""
    hints = typing.get_type_hints(struct, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    found = []
    for name, hint in hints.items():
        about = next(
            (extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, marker)),
            None,
        )
        assert about is not None, f"{struct.__name__}.{name} is not declared with {marker.__name__}"
        kind = _without_none(hint.__origin__)
        is_list = typing.get_origin(kind) is tuple
        found.append(
            Field(
                name, typing.get_args(kind)[0] if is_list else kind, defaults[name], about, is_list
            )
        )
    return tuple(found)


def _without_none(hint: typing.Any) -> type:
    if isinstance(hint, types.UnionType):
        (kind,) = (part for part in hint.__args__ if part is not types.NoneType)
        return typing.cast(type, kind)
    return typing.cast(type, hint)
