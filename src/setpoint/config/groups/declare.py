"""Defines how an option or an environment variable is declared: as metadata on an annotated field
of a frozen struct.

The struct defines the field's type and default; everything else (help, group, choices, bounds,
tuning range, whether it can change while serving) is in one :class:`Option` or :class:`EnvVar`. The
parser, the documentation, ``/server_info`` and the checks read these and nothing else.
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
"""What is shown in place of a secret."""


@dataclass(slots=True, frozen=True)
class Range:
    """The values of a number that are worth trying, ends included."""

    low: float
    high: float
    log: bool = False
    """Try multiples instead of equal steps."""


@dataclass(slots=True, frozen=True)
class Option:
    """The properties of a command-line option other than its type and default."""

    group: str
    help: str
    choices: tuple[str | int, ...] = ()
    metavar: str = ""
    low: float | None = None
    """Smallest allowed value."""
    high: float | None = None
    """Largest allowed value."""
    infinite: bool = False
    """Whether ``inf`` is a valid value."""
    human: bool = False
    """Whether it accepts human integers (``32k``, ``32Ki``)."""
    tunable: Range | tuple[Scalar, ...] | None = None
    """The values that a tuner may try; None if the option is not worth tuning."""
    live: bool = False
    """Whether it can change while the engine serves, between two steps
    (``config.live_changes``)."""
    secret: bool = False
    """Whether its value is a secret, which is never printed (``masked``)."""
    repeats: bool = False
    """Whether a command that listens takes it several times (``CommandLine.models``)."""
    server_only: bool = False
    """Whether it matters only to a command that listens; the other commands refuse it."""
    short: str = ""
    """A one-letter spelling, e.g. ``-o``."""
    no_effect: str = ""
    """Why the option has no effect here; "" for every option that has one."""

    @property
    def meaning(self) -> str:
        """The help text, followed by why the option has no effect, if it has none."""
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
    """One declared field. ``kind`` is the type of a value, without None; the type of one element
    for a field of several values."""

    name: str
    kind: type
    default: Any
    """A Scalar, or a tuple of Scalars."""
    about: M
    is_list: bool = False

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def flag_of(name: str) -> str:
    """The option of a field with this name, as it is written on the command line."""
    return "--" + name.replace("_", "-")


def masked(field: Field[Option], value: Any) -> Any:
    """The value as logs, messages and ``/server_info`` show it: a mask for a secret option."""
    return MASK if field.about.secret and value not in (None, ()) else value


def allowed(field: Field[Option]) -> str:
    """A sentence about the values that an option accepts."""
    about = field.about
    if field.kind is bool:
        return "true or false."
    if about.choices:
        return f"One of {', '.join(map(str, about.choices))}."
    if field.kind is str:
        return "A text."
    number = "A whole number" if field.kind is int else "A number"
    if about.low is not None and about.high is not None:
        return f"{number} from {about.low:g} to {about.high:g}."
    return number + (f" of at least {about.low:g}." if about.low is not None else ".")


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
