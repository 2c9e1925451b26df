"""Engines of few ranks that start, serve, stop and end in any order, with an operator who takes ranks
out of service and wants them again: what follows an end, and what never does."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from setpoint.core.messages import Failed
from setpoint.ipc.engine_life import (
    HOUR_S,
    MOVES,
    EngineLife,
    EngineLives,
    EngineState,
    RestartBudget,
    Successor,
)
from setpoint_testing.fake_engine import SOME_FACTS

PICKS = st.integers(0, 2)
LIVING = (EngineState.STARTING, EngineState.READY)
ENDED = (EngineState.STOPPING, EngineState.DEAD)
ENDS = st.sampled_from(["stop", "crash", "kill", "fail", "fail for good"])
ACTS = {
    EngineState.READY: lambda life: life.ready(SOME_FACTS),
    EngineState.STOPPING: lambda life: life.stop("It was asked to."),
    EngineState.DEAD: lambda life: life.die("It crashed."),
    EngineState.GONE: lambda life: life.close(),
    EngineState.GIVEN_UP: lambda life: life.give_up("Nobody wants it."),
}


class Engines(RuleBasedStateMachine):
    """Does what the session of engines does, and notes what must not be forgotten."""

    @initialize(ranks=st.integers(1, 3), most=st.integers(0, 2), in_step=st.booleans())
    def begin(self, ranks: int, most: int, in_step: bool) -> None:
        self.now = 0.0
        self.most = most
        self.lives = EngineLives(RestartBudget(most, lambda: self.now), in_step=in_step)
        self.latest: dict[int, EngineLife] = {}
        self.all: list[EngineLife] = []
        self.ended: set[EngineLife] = set()
        self.out: set[int] = set()
        """The ranks that an operator has taken out of service, and not wanted since."""
        self.restarts: list[float] = []
        self.has_ended = False
        for rank in range(ranks):
            self._start(EngineLife(rank))

    def _start(self, life: EngineLife) -> None:
        assert not self.has_ended, "a server that ends starts no engine"
        assert life.rank not in self.out, "a rank out of service gets no engine"
        before = self.latest.get(life.rank)
        self.lives.start(life)
        self.latest[life.rank] = life
        self.all.append(life)
        if before is not None:
            assert before.state is EngineState.REPLACED
            assert (life.num_before, life.death_before) == (before.num_before + 1, before.death)

    def _one(self, pick: int, *states: EngineState) -> EngineLife:
        """One of the latest engines that are in these states."""
        found = self._found(*states)
        return found[pick % len(found)]

    def _found(self, *states: EngineState) -> list[EngineLife]:
        return [each for each in self.latest.values() if each.state in states]

    @precondition(lambda self: self._found(EngineState.STARTING))
    @rule(pick=PICKS)
    def ready(self, pick: int) -> None:
        life = self._one(pick, EngineState.STARTING)
        assert list(life.ready(SOME_FACTS)) == [life]

    @precondition(lambda self: self._found(*LIVING))
    @rule(pick=PICKS)
    def signal(self, pick: int) -> None:
        life = self._one(pick, *LIVING)
        if not life.is_suspended:
            life.suspend(self.now)
            assert not life.is_ready
        else:
            ready = {each for each in self.latest.values() if each.is_ready}
            again = set(life.go_on())
            assert {each for each in self.latest.values() if each.is_ready} == ready | again

    @precondition(lambda self: self._found(*LIVING))
    @rule(pick=PICKS, how=ENDS)
    def end(self, pick: int, how: str) -> None:
        life = self._one(pick, *LIVING)
        match how:
            case "stop":
                life.stop("It was asked to.")
            case "crash" | "kill":
                life.die("It crashed.", was_killed=how == "kill")
            case _:
                life.die("It has failed.", failed=Failed("It has failed.", how == "fail for good"))

    @precondition(lambda self: self._found(*ENDED))
    @rule(pick=PICKS)
    def close(self, pick: int) -> None:
        life = self._one(pick, *ENDED)
        life.close()
        if self.lives.in_step:
            are_all = all(each.is_gone and not each.is_decided for each in self.latest.values())
            assert self.lives.follow_together(life) is are_all
            assert life.is_decided is are_all, "not before all have ended"
            if life.successor is Successor.RESTART:
                self.restarts.append(self.now)
            if are_all:
                assert len({each.successor for each in self.latest.values()}) == 1

    @precondition(lambda self: self._to_follow())
    @rule(pick=PICKS, has_standby=st.booleans())
    def follow(self, pick: int, has_standby: bool) -> None:
        found, in_step = self._to_follow(), self.lives.in_step
        life = found[pick % len(found)]
        left = self.lives.restarts.left
        successor = self.lives.follow(life, has_standby=has_standby and not in_step)
        assert self.lives.follow(life) is successor, "it is decided once"
        assert bool(life.why_last) is (successor is None)
        following = EngineLife(life.rank)
        if successor is None:
            assert in_step or self.lives.restarts.left == left
            life.give_up(life.why_last)
            return
        if successor is Successor.STANDBY:
            assert has_standby
            following.ready(SOME_FACTS)
        elif not in_step:
            self.restarts.append(self.now)
        assert in_step or self.lives.restarts.left == max(left - 1, 0)
        self._start(following)

    def _to_follow(self) -> list[EngineLife]:
        """The engines that are gone; of those in step, the ones about which it is decided."""
        gone = self._found(EngineState.GONE)
        return [each for each in gone if each.is_decided or not self.lives.in_step]

    @precondition(lambda self: not self.lives.in_step)
    @rule(pick=PICKS)
    def out_of_service(self, pick: int) -> None:
        life = self._one(pick, *EngineState)
        life.retire("An operator took it out of service.")
        self.out.add(life.rank)
        if not life.has_ended:
            life.stop("An operator took it out of service.")

    @rule(pick=PICKS)
    def wanted(self, pick: int) -> None:
        life = self._one(pick, *EngineState)
        self.lives.want(life.rank)
        assert life.is_wanted is (bool(life.why_last) and not self.has_ended)
        if life.is_wanted:
            self.out.discard(life.rank)

    @precondition(lambda self: self._found(EngineState.GIVEN_UP))
    @rule(pick=PICKS)
    def start_wanted(self, pick: int) -> None:
        life = self._one(pick, EngineState.GIVEN_UP)
        if life.is_wanted:
            self._start(EngineLife(life.rank))
        else:
            with pytest.raises(AssertionError, match="Nobody wants"):
                self.lives.start(EngineLife(life.rank))

    @rule()
    def half_an_hour_passes(self) -> None:
        self.now += HOUR_S / 2 + 1.0

    @precondition(lambda self: len(self.all) > 3)
    @rule()
    def server_ends(self) -> None:
        self.lives.end()
        self.has_ended = True
        for life in self.latest.values():
            if not life.has_ended:
                life.stop("The engine is shutting down.")

    @invariant()
    def ended_engines_stay_ended(self) -> None:
        self.ended |= {each for each in self.all if each.has_ended}
        assert not any(each.is_ready or not each.death for each in self.ended)

    @invariant()
    def each_rank_has_one_engine(self) -> None:
        for life in self.all:
            is_latest = self.latest[life.rank] is life
            assert (life.state is EngineState.REPLACED) is not is_latest

    @invariant()
    def restarts_stay_within_the_budget(self) -> None:
        assert sum(self.now - at <= HOUR_S for at in self.restarts) <= self.most

    @invariant()
    def all_in_step_wait_for_one_that_is_stopped(self) -> None:
        if self.lives.in_step and any(each.is_suspended for each in self.latest.values()):
            assert not self.lives.is_ready

    @invariant()
    def requests_wait_only_if_an_engine_may_come(self) -> None:
        lives, latest = self.lives, self.latest.values()
        assert not (lives.has_ended and (lives.may_come() or lives.is_ready))
        if all(each.state is EngineState.GIVEN_UP for each in latest):
            assert lives.has_ended
            assert lives.is_over is not any(each.is_wanted for each in latest)
        if self.has_ended:
            assert lives.has_ended
            assert not any(each.is_wanted for each in latest)


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize(("state", "to"), list(product(EngineState, ACTS)))
def test_a_move_that_the_diagram_does_not_have_fails(state: EngineState, to: EngineState) -> None:
    life = EngineLife()
    life.state = state
    if to in MOVES[state] or (to is EngineState.GONE and life.is_gone):
        ACTS[to](life)
        assert life.state is to or life.is_gone
    else:
        with pytest.raises(AssertionError, match="cannot become"):
            ACTS[to](life)
        assert life.state is state


def test_an_engine_that_has_ended_never_lives_again() -> None:
    for state, moves in MOVES.items():
        assert state in LIVING or not set(moves) & set(LIVING)
    assert not MOVES[EngineState.REPLACED]
