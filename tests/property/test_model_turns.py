"""Turns of several models: room, open requests and waiting, over random traces of few models."""

from __future__ import annotations

import math
import random

import pytest

from setpoint.frontend.multi_model.swap_planner import (
    AdmitRequests,
    CloseModel,
    LoadModel,
    LoadState,
    SwapPlanner,
    UnloadModel,
)

TURN_S = 5.0


class World:
    """Models whose engines take their time, and a dict model of who waits and who runs."""

    def __init__(self, num_models: int, most: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = [f"m{number}" for number in range(num_models)]
        self.most, self.now = most, 0.0
        self.turns = SwapPlanner(self.names, most=most, turn_s=TURN_S)
        self.running: dict[str, list[float]] = {name: [] for name in self.names}
        """When each admitted request came."""
        self.waiting: dict[str, list[float]] = {name: [] for name in self.names}
        self.going_on: list[tuple[str, str]] = []
        """Loads and unloads that are not done yet."""
        self.longest_wait = 0.0

    def arrive(self, name: str) -> None:
        if self.turns.arrived(name, self.now):
            assert self.turns.state(name) is LoadState.LOADED
            self.running[name].append(self.now)
        else:
            self.waiting[name].append(self.now)
        self.look()

    def end(self, name: str) -> None:
        self.running[name].pop(self.rng.randrange(len(self.running[name])))
        self.turns.ended(name, self.now)
        self.look()

    def give_up(self, name: str) -> None:
        position = self.rng.randrange(len(self.waiting[name]))
        del self.waiting[name][position]
        self.turns.gave_up(name, position)
        self.look()

    def finish(self, *, fails: bool = False) -> None:
        kind, name = self.going_on.pop(self.rng.randrange(len(self.going_on)))
        if kind == "load" and fails:
            self.waiting[name] = []
            while self.turns.num_waiting(name):
                self.turns.gave_up(name, 0)
            self.turns.failed(name)
        elif kind == "load":
            self.turns.loaded(name, self.now)
        elif fails:
            self.turns.stayed(name, self.now)
        else:
            self.turns.unloaded(name)
        self.look()

    def look(self) -> None:
        for action in self.turns.step(self.now):
            match action:
                case AdmitRequests(name):
                    assert self.turns.state(name) is LoadState.LOADED
                    waits = [self.now - came for came in self.waiting[name]]
                    self.longest_wait = max(self.longest_wait, *waits)
                    self.running[name] += self.waiting[name]
                    self.waiting[name] = []
                case LoadModel(name):
                    assert not self.running[name]
                    self.going_on.append(("load", name))
                case UnloadModel(name):
                    assert not self.running[name], "it has open requests"
                    self.going_on.append(("unload", name))
                case CloseModel(name, wanted):
                    assert self.running[name]
                    assert self.turns.state(wanted) is LoadState.UNLOADED
                    assert self.now - self.turns.wanted_since(wanted) >= TURN_S
        self.check()

    def check(self) -> None:
        places = [self.turns.state(name) for name in self.names]
        assert sum(state is not LoadState.UNLOADED for state in places) <= self.most
        for name in self.names:
            assert self.turns.num_running(name) == len(self.running[name])
            assert self.turns.num_waiting(name) == len(self.waiting[name])
            if self.running[name]:
                assert self.turns.state(name) is LoadState.LOADED
        # Nothing that could be done now is left.
        assert self.turns.step(self.now) == []


@pytest.mark.parametrize("seed", range(40))
def test_any_trace_keeps_the_room_and_loses_no_request(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng.randint(1, 4), rng.randint(1, 3), seed)
    for _ in range(2000):
        world.now += rng.choice((0.0, 0.1, 1.0))
        name = rng.choice(world.names)
        what = rng.random()
        if what < 0.35:
            world.arrive(name)
        elif what < 0.65 and world.running[name]:
            world.end(name)
        elif what < 0.72 and world.waiting[name]:
            world.give_up(name)
        elif what < 0.78:
            seconds = rng.choice((0.0, 2.0, math.inf))
            world.turns.keep(name, seconds, world.now)
            world.look()
        elif what < 0.80:
            world.turns.wish(name, world.now)
            world.look()
        elif what < 0.82:
            world.turns.dismiss(name)
            world.look()
        elif world.going_on:
            world.finish(fails=rng.random() < 0.1)
        else:
            world.look()
    drain(world)


def drain(world: World) -> None:
    """Let everything end: every request that waits must get its turn."""
    for _ in range(10_000):
        if not any(world.waiting.values()) and not any(world.running.values()):
            return
        if world.going_on:
            world.finish()
        for name in world.names:
            if world.running[name]:
                world.end(name)
        world.now += 0.5
        world.look()
    raise AssertionError(f"requests wait for ever: {world.waiting}")


@pytest.mark.parametrize("num_models", [2, 3, 4])
def test_a_model_that_is_never_idle_does_not_keep_others_waiting(num_models: int) -> None:
    """Every model always has clients that send the next request as soon as one ends; a request
    takes two seconds, and loading and unloading half of one."""
    world = World(num_models, 1, 0)
    for name in world.names:
        for _ in range(3):
            world.arrive(name)
    served = dict.fromkeys(world.names, 0)
    for _ in range(4000):
        world.now += 0.5
        if world.going_on:
            world.finish()
        for name in world.names:
            for came in list(world.running[name]):
                if world.now - came >= 2 and world.rng.random() < 0.3:
                    world.arrive(name)
                    world.end(name)
                    served[name] += 1
        world.look()
    # The others have a turn each: the turn, its last requests, and the change.
    assert world.longest_wait < (num_models - 1) * (TURN_S + 25)
    assert min(served.values()) > max(served.values()) / 3


def test_the_model_that_was_idle_for_longest_makes_room() -> None:
    turns = SwapPlanner("abc", most=2, turn_s=TURN_S)
    turns.loaded("a", 0.0)
    turns.loaded("b", 1.0)
    assert turns.arrived("a", 2.0)
    turns.ended("a", 3.0)
    assert not turns.arrived("c", 4.0)
    assert turns.step(4.0) == [UnloadModel("b", "c needs its room")]
    turns.unloaded("b")
    assert turns.step(4.1) == [LoadModel("c")]
    turns.loaded("c", 4.2)
    assert turns.step(4.2) == [AdmitRequests("c")]


def test_a_busy_model_is_closed_after_its_turn_and_opened_again_when_nobody_waits() -> None:
    turns = SwapPlanner("ab", most=1, turn_s=TURN_S)
    turns.loaded("a", 0.0)
    assert turns.arrived("a", 1.0)
    assert not turns.arrived("b", 2.0)
    assert turns.step(2.0) == []
    assert turns.next_at(2.0) == 7.0
    assert turns.arrived("a", 6.9)
    assert turns.step(7.0) == [CloseModel("a", "b")]
    assert turns.step(7.0) == [], "it is said once"
    assert not turns.arrived("a", 7.1), "the model is closed"
    turns.gave_up("b", 0)
    assert turns.step(7.2) == [AdmitRequests("a")]


def test_a_model_is_unloaded_when_its_keep_alive_has_passed() -> None:
    turns = SwapPlanner("a", most=1, turn_s=TURN_S)
    turns.loaded("a", 0.0)
    assert turns.arrived("a", 1.0)
    turns.keep("a", 5.0, 1.0)
    assert turns.step(7.0) == []
    turns.ended("a", 8.0)
    assert turns.step(8.0) == []
    assert turns.next_at(8.0) == 13.0
    assert turns.step(13.0) == [UnloadModel("a", "its keep_alive has passed")]


def test_a_dismissed_model_goes_when_its_requests_have_ended_and_may_come_back() -> None:
    turns = SwapPlanner("a", most=1, turn_s=TURN_S)
    turns.loaded("a", 0.0)
    assert turns.arrived("a", 1.0)
    turns.dismiss("a")
    assert turns.step(1.0) == []
    turns.ended("a", 2.0)
    assert turns.step(2.0) == [UnloadModel("a", "a client asked for it")]
    turns.unloaded("a")
    turns.wish("a", 3.0)
    assert turns.step(3.0) == [LoadModel("a")]
    turns.loaded("a", 4.0)
    assert turns.step(4.0) == []
