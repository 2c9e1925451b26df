"""The checks: one file for each cause, with its rule, its source in the guides and its
counter-evidence."""

from __future__ import annotations

from setpoint.advisor.doctor.checks import client_bound, kv_conservative, seq_cap
from setpoint.advisor.doctor.checks.check import Check

CHECKS: tuple[Check, ...] = (
    client_bound.CHECK,
    seq_cap.CHECK,
    kv_conservative.CHECK,
)
BY_CAUSE: dict[str, Check] = {check.cause: check for check in CHECKS}
