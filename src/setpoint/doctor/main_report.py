"""Chooses the report to show if there are several: of several sources, or of several servers in
one."""

from __future__ import annotations

from collections.abc import Sequence

from setpoint.doctor.findings import Report
from setpoint.doctor.observations import Observations


def main_report(reports: Sequence[tuple[Report, Observations]]) -> tuple[Report, Observations]:
    """The latest report with a finding; if there is none, the latest that is healthy."""

    def weight(place: int) -> tuple[int, int]:
        verdict = reports[place][0].verdict
        return {"not-enough-evidence": 0, "healthy": 1}.get(verdict, 2), place

    return reports[max(range(len(reports)), key=weight)]
