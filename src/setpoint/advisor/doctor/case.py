"""What a check is given: the observations, and what several checks compute from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from setpoint.advisor.doctor.findings import PhaseSpan
from setpoint.advisor.doctor.observations import Facts, Observations, Rank


@dataclass(slots=True, frozen=True)
class Case:
    """Frozen view of one server. Checks are pure functions of it."""

    seen: Observations
    phases: dict[str, list[PhaseSpan]] = field(default_factory=dict)
    """By the name of the rank."""

    @property
    def facts(self) -> Facts:
        return self.seen.facts

    @property
    def ranks(self) -> list[Rank]:
        return self.seen.ranks
