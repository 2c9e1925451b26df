"""The doctor of a server. It gives the doctor's checks, which the frontend does not know, to the
frontend's watch (``frontend.telemetry.watching``)."""

from __future__ import annotations

from collections.abc import Sequence

from setpoint.core.moments import Moment
from setpoint.doctor.binding_limit import SchedulerLimits, binding_limit
from setpoint.doctor.checks.diagnose import ADVICE, STATES, diagnose
from setpoint.doctor.contract import contract
from setpoint.doctor.observations import Observations
from setpoint.doctor.readers.info import facts_of
from setpoint.doctor.readers.kept import live_observations, together
from setpoint.frontend.info import Info
from setpoint.frontend.telemetry.limit_news import Diagnosis
from setpoint.frontend.telemetry.watching import Seen, WatchedEngine

WANTS_MORE = "client-bound"
"""Verdicts of a server that waits for requests, where none of its own limits binds."""


class ServerDoctor:
    """Implements ``frontend.telemetry.watching.Doctor``."""

    def __init__(self, info: Info) -> None:
        """info: what the server says of itself."""
        self._info = info

    def examine(self, seen: Seen) -> Diagnosis:
        has_ended = all(life.death for life, _ in seen)
        report = diagnose(
            together(
                {
                    life.line.rank: self._observations(life, moments, has_ended=has_ended)
                    for life, moments in seen
                }
            )
        )
        action = report.findings[0].action.text if report.findings else ""
        binds = report.verdict not in (*STATES, *ADVICE, WANTS_MORE, "server-dead")
        return Diagnosis(
            limit=report.verdict,
            binds=binds,
            sentence=f"{report.summary} {action}".rstrip(),
            report=contract(report),
        )

    def limits_of(self, life: WatchedEngine, moments: Sequence[Moment]) -> list[str | None]:
        facts = facts_of(self._info.known(life.line), engine="setpoint")
        sizes = [
            size
            for size in (facts.chunked_prefill_size, facts.max_prefill_tokens)
            if size and size > 0
        ]
        limits = SchedulerLimits(
            slots=facts.max_running_requests,
            prefill_tokens=min(sizes, default=None),
            reasons=True,
        )
        found = (binding_limit(moment, limits) for moment in moments)
        return [None if limit == "unknown" else limit for limit in found]

    def _observations(
        self, life: WatchedEngine, moments: Sequence[Moment], *, has_ended: bool
    ) -> Observations:
        """has_ended: whether no engine is left, so that the death of this one is the server's."""
        note = life.silence and f"{life.silence} The report is about the time before."
        if life.death and not has_ended:
            note = f"The engine has ended: {life.death}"
        return live_observations(
            self._info.known(life.line),
            moments,
            name=self._info.model_name,
            death=life.death if has_ended else "",
            note="" if has_ended else note,
            tiers=life.tiers,
        )
