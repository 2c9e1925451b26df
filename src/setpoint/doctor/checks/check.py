"""The type of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from setpoint.doctor.case import Case
from setpoint.doctor.findings import Finding


@dataclass(slots=True, frozen=True)
class Check:
    """A cause, how it is found, and what ``setpoint doctor --explain`` teaches about it."""

    cause: str
    """Its fixed id, as "seq-cap"."""
    title: str
    """The cause in a few words, as it begins a line of the report."""
    find: Callable[[Case], Finding | None]
    """The finding; None if the cause does not hold or there is no evidence for it. Pure."""
    meaning: str
    """What the cause is, for somebody who has never heard of it."""
    rule: str
    """When the cause is reported."""
    counter_evidence: str
    """What rules the cause out although the rule holds."""
    advice: str
    """What the action asks for, as far as it is the same in every case."""
    guide: str
    """What the tuning guides say, in our words, and which guide says it."""
    equation: str = ""
    """How the value of the action is computed."""
    picture: str = ""
    """A drawing in text, at most 72 columns wide."""
