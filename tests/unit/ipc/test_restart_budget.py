"""Restarts within an hour."""

from __future__ import annotations

from setpoint.ipc.restart_budget import HOUR_S, RestartBudget


def test_restarts_come_back_after_an_hour() -> None:
    now = 0.0
    budget = RestartBudget(2, lambda: now)
    assert (budget.left, budget.num_spent) == (2, 0)
    budget.spend()
    now = HOUR_S / 2
    budget.spend()
    assert budget.left == 0
    budget.spend()  # a standby that takes over beyond the limit
    assert (budget.left, budget.num_spent) == (0, 3)
    now = HOUR_S + 1
    assert (budget.left, budget.num_spent) == (0, 2)
    now = 2 * HOUR_S
    assert (budget.left, budget.num_spent) == (2, 0)
    budget.spend()
    budget.reset()
    assert budget.left == 2
