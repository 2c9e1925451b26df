"""What follows an engine that has ended: the words of the reasons, and engines that compute in
step."""

from __future__ import annotations

import pytest

from setpoint.core.messages import Failed
from setpoint.ipc.engine_life import HOUR_S, EngineLife, EngineLives, RestartBudget, Successor
from setpoint_testing.fake_engine import SOME_FACTS

OUT = "An operator took it out of service."


def gone(lives: EngineLives, rank: int = 0, *, failed: Failed | None = None) -> EngineLife:
    """An engine that was ready, if it could start, and whose process has ended."""
    life = EngineLife(rank)
    lives.start(life)
    if failed is None:
        life.ready(SOME_FACTS)
    life.die(f"Engine {rank} is dead.", failed=failed)
    life.close()
    return life


def test_all_have_ended_before_any_starts_again_and_one_decides() -> None:
    lives = EngineLives(RestartBudget(2), in_step=True)
    decisions: list[Successor | str | None] = []
    for left in (1, 0, 0):
        latest = [EngineLife(rank) for rank in range(3)]
        for life in latest:
            lives.start(life)
            life.ready(SOME_FACTS)
        for life in (latest[1], latest[0]):
            life.die(f"Engine {life.rank} is dead.")
            life.close()
            assert not lives.follow_together(life)
            assert not life.is_decided
        latest[2].die("Engine 2 is dead.")
        latest[2].close()
        assert lives.follow_together(latest[2])
        assert lives.restarts.left == left
        decisions += [lives.follow(life) or life.why_last for life in latest]
    none = "Engine 2 is dead. It is not started again: --max-engine-restarts is 2 an hour."
    assert decisions == [Successor.RESTART] * 6 + [none] * 3


def test_engines_in_step_do_not_follow_once_the_server_ends() -> None:
    lives = EngineLives(RestartBudget(2), in_step=True)
    life = gone(lives)
    assert lives.follow_together(life)
    assert life.successor is Successor.RESTART
    lives.end()
    assert lives.follow(life) is None
    assert life.why_last == "Engine 0 is dead."


def test_a_standby_takes_over_when_no_restart_is_left() -> None:
    lives = EngineLives(RestartBudget(0))
    assert lives.follow(gone(lives), has_standby=True) is Successor.STANDBY
    assert lives.restarts.num_spent == 1
    following = gone(lives)
    none = "Engine 0 is dead. It is not started again: --max-engine-restarts is 0 an hour."
    assert lives.follow(following) is None
    assert following.why_last == none


@pytest.mark.parametrize(
    ("served", "failed", "why"),
    [
        (False, Failed("No memory."), "Engine 0 is dead."),
        (True, Failed("No memory."), ""),
        (True, Failed("The file has changed.", is_final=True), "Engine 0 is dead."),
    ],
)
def test_an_engine_that_cannot_start_gets_no_other(served: bool, failed: Failed, why: str) -> None:
    lives = EngineLives(RestartBudget(9))
    if served:
        gone(lives)
    life = gone(lives, failed=failed)
    assert lives.why_never(life) == why


def test_a_process_that_ends_before_it_has_ever_served_says_that_it_could_not_start() -> None:
    lives, life = EngineLives(RestartBudget(9)), EngineLife()
    lives.start(life)
    life.die("The engine process ended with exit code 1.")
    assert lives.why_never(life).startswith("It could not start: The engine process ended")


def test_a_rank_that_is_taken_out_of_service_and_wanted_again_costs_no_restart() -> None:
    lives = EngineLives(RestartBudget(1))
    life = gone(lives)
    life.retire(OUT)
    lives.want(0)
    assert lives.why_never(life) == OUT
    assert lives.follow(life) is None
    life.give_up(life.why_last)
    assert life.why_last == OUT
    assert not lives.is_over
    lives.start(EngineLife())
    assert lives.restarts.left == 1
    assert lives.may_come()


def test_nobody_starts_an_engine_that_nobody_wants() -> None:
    lives = EngineLives(RestartBudget(1))
    life = gone(lives)
    life.retire(OUT)
    with pytest.raises(AssertionError, match="Nobody wants"):
        lives.start(EngineLife())


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


def test_a_server_that_ends_starts_nothing_that_operators_have_wanted() -> None:
    lives = EngineLives(RestartBudget(1))
    life = gone(lives)
    life.retire(OUT)
    lives.want(0)
    lives.end()
    lives.want(0)
    assert not life.is_wanted
    assert lives.follow(life) is None
    life.give_up(life.why_last)
    assert lives.is_over
