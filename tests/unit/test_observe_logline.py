"""Log lines of the scheduler's own decisions: one each, with the reason."""

from __future__ import annotations

import logging

import pytest

from setpoint.core.stats import Preemption, Retraction
from setpoint.observe.logline import LogLines


def test_what_happens_to_requests_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines(decode_log_interval=40, device="cpu", started_at=0.0)
    with caplog.at_level(logging.INFO):
        lines.on_retraction(Retraction(2, 31, 0.25, 0.5))
        lines.on_preemption(Preemption("u", ("a", "b"), 12))
        lines.on_dropped("r", "Request waiting timeout reached.")
        lines.on_fallback("lpm acts as fcfs", "there is no prefix cache")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 31, #new_token_ratio: 0.2500 -> 0.5000",
        ),
        ("INFO", "Priority preemption. #preempted_reqs: 2, #new_tokens_gained: 12, for request u; back in the queue: a, b"),
        ("WARNING", "Request r was answered 503: Request waiting timeout reached."),
        ("WARNING", "Fallback: lpm acts as fcfs (there is no prefix cache)"),
    ]
