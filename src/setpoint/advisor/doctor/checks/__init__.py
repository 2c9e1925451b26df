"""The checks: one file for each cause, with its rule, its source in the guides and its
counter-evidence."""

from __future__ import annotations

from setpoint.advisor.doctor.checks import (
    admission_delayed,
    batch_too_large,
    client_bound,
    grammar_queue,
    healthy,
    host_bound,
    kv_conservative,
    kv_full,
    kv_optimistic,
    long_prompt_blocking,
    not_enough_evidence,
    other_pool_full,
    prefill_budget,
    prefix_miss,
    queue_too_long,
    rank_imbalance,
    seq_cap,
)
from setpoint.advisor.doctor.checks.check import Check

CHECKS: tuple[Check, ...] = (
    client_bound.CHECK,
    seq_cap.CHECK,
    kv_conservative.CHECK,
    kv_optimistic.CHECK,
    kv_full.CHECK,
    prefill_budget.CHECK,
    long_prompt_blocking.CHECK,
    queue_too_long.CHECK,
    prefix_miss.CHECK,
    batch_too_large.CHECK,
    rank_imbalance.CHECK,
    grammar_queue.CHECK,
    other_pool_full.CHECK,
    host_bound.CHECK,
    admission_delayed.CHECK,
    healthy.CHECK,
    not_enough_evidence.CHECK,
)
BY_CAUSE: dict[str, Check] = {check.cause: check for check in CHECKS}
