"""A report as plain data: ``setpoint doctor --json`` and ``GET /doctor``. docs/doctor.md describes
it for programs; names do not change while ``FORMAT`` stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from setpoint.doctor.findings import Finding, Report
from setpoint.doctor.observations import Evidence

FORMAT = 1
"""Increases when a name changes its meaning or is removed; new names do not change it."""


def contract(report: Report, others: Sequence[Report] = ()) -> dict[str, Any]:
    """The report in JSON's types, without numbers that JSON does not have. ``others``: reports
    about other servers in the sources."""
    found = {"format": FORMAT, **_report(report), "others": [_report(other) for other in others]}
    return {name: _plain(value) for name, value in found.items()}


def _report(report: Report) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "summary": report.summary,
        "findings": [_finding(finding) for finding in report.findings],
        "evidence": [_evidence(evidence) for evidence in report.evidence],
        "coverage": round(report.coverage, 4),
        "missing": list(report.missing),
        "phases": {rank: [asdict(span) for span in spans] for rank, spans in report.phases.items()},
        "sources": [asdict(source) for source in report.sources],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "cause": finding.cause,
        "confidence": round(finding.confidence, 3),
        "summary": finding.summary,
        "action": asdict(finding.action),
        "effect": {} if finding.effect is None else asdict(finding.effect),
        "evidence": [_evidence(evidence) for evidence in finding.evidence],
        "ruled_out": [asdict(other) for other in finding.ruled_out],
        "risk": finding.risk,
        "verify": finding.verify,
        "falsify": finding.falsify,
        "share": finding.share,
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    found: dict[str, Any] = {"line": evidence.line, "text": evidence.text}
    return {**found, "source": evidence.source} if evidence.source else found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
