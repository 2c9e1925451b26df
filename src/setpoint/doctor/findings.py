"""The types of the doctor's report: plain data, the same for the terminal, JSON, HTML and
``GET /doctor``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from setpoint.doctor.observations import Evidence, Source

Direction = Literal["increase", "decrease", "set"]


@dataclass(slots=True, frozen=True)
class Action:
    """One change. If ``flag`` is None, the change is outside the server (in the client, on another
    machine)."""

    text: str
    """What to do, as one imperative sentence."""
    flag: str | None = None
    """The flag as the user types it: "--max-running-requests"."""
    direction: Direction | None = None
    value: Any = None
    """The new value of the flag, computed from the observations; without a flag, the number in
    ``text``, if there is one."""
    live: bool = False
    """Whether Setpoint accepts the change while it runs (``setpoint set``)."""


@dataclass(slots=True, frozen=True)
class Effect:
    """The predicted effect of the action on one figure, as a factor of today's value."""

    figure: str
    """"output throughput", "time to first token", "retractions per minute", …"""
    low: float
    expected: float
    high: float
    why: str
    """The equation with its numbers, as one sentence."""


@dataclass(slots=True, frozen=True)
class RuledOut:
    cause: str
    why: str


@dataclass(slots=True, frozen=True)
class Finding:
    cause: str
    """The id of a check."""
    confidence: float
    """0 to 1."""
    summary: str
    """One sentence that names the limit and the number that proves it."""
    evidence: tuple[Evidence, ...]
    action: Action
    effect: Effect | None = None
    ruled_out: tuple[RuledOut, ...] = ()
    risk: str = ""
    verify: str = ""
    """How to see that it helped."""
    falsify: str = ""
    """What would show that this finding is wrong."""
    share: float | None = None
    """Share of the time under load in which this limit bound."""


Phase = Literal["start-up", "ramp", "steady", "drain", "idle"]


@dataclass(slots=True, frozen=True)
class PhaseSpan:
    phase: Phase
    start: float
    end: float


@dataclass(slots=True)
class Report:
    verdict: str
    """Cause of the first finding, or "healthy", or "not-enough-evidence"."""
    summary: str
    """The verdict in one sentence, with the number that proves it."""
    findings: list[Finding]
    """The binding limit first."""
    coverage: float
    sources: list[Source]
    phases: dict[str, list[PhaseSpan]] = field(default_factory=dict)
    """The phases of each rank, by its name."""
    evidence: tuple[Evidence, ...] = ()
    """The evidence of a verdict that is not the cause of a finding."""
    missing: tuple[str, ...] = ()
    """What a source would have to show for a more certain answer; for not-enough-evidence, what to
    do to get it."""
