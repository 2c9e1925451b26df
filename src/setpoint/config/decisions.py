"""Defines a Decision, which is a resolved value with its reason, and the Book in which ``resolve``
collects them. Pure; decides nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from setpoint.config.groups.declare import Scalar, masked
from setpoint.config.options import OPTION_FIELDS, Options

_DEFAULTS = Options()
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Decision:
    """One resolved value and its reason. The start-up log prints it, and advice quotes it."""

    field: str
    value: Scalar | tuple[Scalar, ...]
    why: str
    warn: bool = False
    """The value is not what the user asked for, or is likely to hurt; logged as a warning."""
    is_news: bool = False
    """The decision answers something that the user asked for, so it is logged at the level of other
    start-up messages; all other decisions are logged as details."""

    def __str__(self) -> str:
        return f"{self.field}={self.value} ({self.why})"


class Book:
    """Collects the values that differ from what the user wrote, and the reasons."""

    def __init__(
        self, options: Options, given: Set[str], profile: Mapping[str, tuple[str, bool]]
    ) -> None:
        """profile: what the workload's profile says about each option; it is added to the reason
        for the value."""
        self.options = options
        self.values: dict[str, Any] = {}
        self._given = given
        self._profile = profile
        self._reasons: dict[str, tuple[str, bool]] = {}
        self._news = set(profile)

    def put(self, name: str, value: T, why: str, *, warn: bool = False, is_news: bool = False) -> T:
        """Set ``name`` to ``value`` and return the value."""
        self.values[name] = value
        self._reasons[name] = why, warn
        if is_news:
            self._news.add(name)
        return value

    def fill(self, name: str, value: Scalar, why: str) -> None:
        """Set ``name`` to ``value`` unless it is already settled."""
        if self.get(name) is None:
            self.put(name, value, why)

    def get(self, name: str) -> Any:
        """The value as settled so far."""
        return self.values[name] if name in self.values else self.options.get(name)

    def changed(self, name: str) -> bool:
        """Whether the user asked for a value other than the default."""
        return bool(self.options.get(name) != _DEFAULTS.get(name))

    def decisions(self) -> list[Decision]:
        decisions = []
        for field in OPTION_FIELDS:
            value = self.get(field.name)
            said = [
                found[field.name] for found in (self._reasons, self._profile) if field.name in found
            ]
            why = "; ".join(words for words, _ in said) or self._default_reason(
                field.name, field.default, value
            )
            warn = any(warns for _, warns in said)
            decisions.append(
                Decision(
                    field.name, masked(field, value), why, warn, is_news=field.name in self._news
                )
            )
        return decisions

    def _default_reason(self, name: str, default: Scalar, value: Scalar) -> str:
        if name in self._given:
            return "given"
        return "default" if value == default else "not given; set by this command"
