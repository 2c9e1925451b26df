"""The life of an engine as one state machine: its states, what moves it, what follows its end.

A rank has one engine after another. Each has an ``EngineLife``; ``EngineLives`` has the latest one
of every rank and decides what follows::

    STARTING ── ready ──▶ READY
        │                   │
        ├────── stop ───────┼──▶ STOPPING ──┐
        │                   │               ├── close ──▶ GONE ── give_up ──▶ GIVEN_UP
        └────── die ────────┴──▶ DEAD ──────┘               │                    │ (wanted)
                                                            └─────── start ──────┤
                                                                                 ▼
                                                            REPLACED by the next life of its rank

STARTING: it loads its model. READY: it takes requests. STOPPING: it was asked to end. DEAD: it
ended, or failed, by itself. Its requests leave it with either. GONE: its process has ended as well,
and ``EngineLives.follow`` says what comes next: a restart, the standby, or nothing. GIVEN_UP: its
rank gets no further engine until an operator wants one. REPLACED: the rank has its next engine.

Two things do not depend on these states. A signal may have stopped the process (``suspended_at``)
while it loads or serves. And an operator may have taken the rank out of service (``retire``): its
engine is asked to end if it has not ended before, and nothing follows it, whatever ended it, unless
the operator wants the rank again (``EngineLives.want``).

``EngineLine`` tells this module what happens to an engine, ``EngineClient`` sends requests to
engines that are ready, and ``EngineSession`` starts what follows. Nothing here waits or sends, and
only the budget of restarts has a clock. A move that is not in the diagram is a failed assertion.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Literal

from setpoint.core.control import EngineFacts
from setpoint.core.messages import Failed

HOUR_S = 3600.0


class EngineState(enum.StrEnum):
    """The words that clients read."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DEAD = "dead"
    GONE = "gone"
    GIVEN_UP = "given up"
    REPLACED = "replaced"


MOVES: dict[EngineState, tuple[EngineState, ...]] = {
    EngineState.STARTING: (EngineState.READY, EngineState.STOPPING, EngineState.DEAD),
    EngineState.READY: (EngineState.STOPPING, EngineState.DEAD),
    EngineState.STOPPING: (EngineState.GONE,),
    EngineState.DEAD: (EngineState.GONE,),
    EngineState.GONE: (EngineState.GIVEN_UP, EngineState.REPLACED),
    EngineState.GIVEN_UP: (EngineState.REPLACED,),
    EngineState.REPLACED: (),
}
"""State -> the states that may come next."""


class Successor(enum.Enum):
    """What takes the place of an engine that is gone."""

    RESTART = "a new engine"
    STANDBY = "the standby"


class EngineLife:
    """One engine. Only this module changes its fields."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.state = EngineState.STARTING
        self.facts: EngineFacts | None = None
        """What it said of itself when it became ready; None before."""
        self.suspended_at: float | None = None
        """When a signal has stopped the process; None: it runs."""
        self.death = ""
        """Why it has ended, in words for people."""
        self.failed: Failed | None = None
        """Its message that it cannot start; None if there was none."""
        self.was_killed = False
        """Whether a signal that no program sends itself has ended the process: a person, a service
        manager or the kernel that ran out of memory, and probably no request."""
        self.num_before = 0
        """Number of engines that its rank had before it."""
        self.death_before = ""
        """Why the one before it ended; "" if there was none."""
        self.rank_has_served = False
        """Whether it or an earlier engine of its rank has ever been ready."""
        self.why_last = ""
        """Why its rank gets no further engine; "" if it may get one."""
        self.is_retired = False
        """Whether an operator has taken its rank out of service."""
        self.is_wanted = False
        """Whether an operator wants an engine after it, although none would follow."""
        self.successor: Successor | None = None
        """What follows it; None before that is decided, or if nothing does."""
        self._in_step: Collection[EngineLife] = (self,)
        """The lives of the engines that compute in step with it, and it itself."""

    @property
    def has_ended(self) -> bool:
        return self.state not in (EngineState.STARTING, EngineState.READY)

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended, too."""
        return self.has_ended and self.state not in (EngineState.STOPPING, EngineState.DEAD)

    @property
    def is_ready(self) -> bool:
        """Whether a request would be processed now."""
        return self.state is EngineState.READY and not any(
            each.is_suspended for each in self._in_step
        )

    @property
    def is_decided(self) -> bool:
        """Whether it is known what follows it, or that nothing does."""
        return bool(self.successor or self.why_last)

    @property
    def is_suspended(self) -> bool:
        """Whether a signal has stopped the process (SIGSTOP)."""
        return self.suspended_at is not None and not self.has_ended

    def ready(self, facts: EngineFacts) -> Collection[EngineLife]:
        """It takes requests. Returns the engines that do so from now on."""
        self._move(EngineState.READY)
        self.facts, self.rank_has_served = facts, True
        return (self,)

    def suspend(self, now: float) -> None:
        """A signal has stopped its process (SIGSTOP)."""
        assert not self.has_ended
        assert not self.is_suspended
        self.suspended_at = now

    def go_on(self) -> Collection[EngineLife]:
        """Its process runs again (SIGCONT). Returns the engines that take requests again."""
        assert self.is_suspended
        self.suspended_at = None
        return [each for each in self._in_step if each.is_ready]

    def stop(self, reason: str) -> None:
        """It is asked to end, and has ended for its requests. No request is to blame for that."""
        self._move(EngineState.STOPPING)
        self.death = reason

    def die(self, reason: str, *, was_killed: bool = False, failed: Failed | None = None) -> None:
        """It has ended, or is to be ended because of what it did."""
        self._move(EngineState.DEAD)
        self.death, self.was_killed, self.failed = reason, was_killed, failed

    def close(self) -> None:
        """Its process has ended, and nothing more is received. It may be said again."""
        if not self.is_gone:
            self._move(EngineState.GONE)

    def give_up(self, reason: str) -> None:
        """Nothing follows."""
        self._move(EngineState.GIVEN_UP)
        self.why_last = reason

    def retire(self, reason: str) -> None:
        """Its rank is taken out of service; it is to be asked to end, unless it has ended."""
        self.why_last, self.is_retired, self.is_wanted = reason, True, False

    def _move(self, state: EngineState) -> None:
        assert state in MOVES[self.state], f"An engine that is {self.state} cannot become {state}."
        self.state = state

    def _begin_after(self, earlier: EngineLife) -> None:
        """Begin in the place of an engine that is gone."""
        earlier._move(EngineState.REPLACED)
        self.num_before, self.death_before = earlier.num_before + 1, earlier.death
        self.rank_has_served |= earlier.rank_has_served


class RestartBudget:
    """How many engines may be started in the place of others within an hour
    (--max-engine-restarts)."""

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        """now: a clock in seconds."""
        self.most = most
        self._now = now
        self._spent: deque[float] = deque()
        """Times of the restarts within the last hour."""

    @property
    def num_spent(self) -> int:
        """Number of restarts within the last hour."""
        now = self._now()
        while self._spent and now - self._spent[0] > HOUR_S:
            self._spent.popleft()
        return len(self._spent)

    @property
    def left(self) -> int:
        return max(self.most - self.num_spent, 0)

    def spend(self) -> None:
        self._spent.append(self._now())

    def reset(self) -> None:
        self._spent.clear()


class EngineLives:
    """The latest engine of each rank, and what follows when one ends."""

    def __init__(self, restarts: RestartBudget | None = None, *, in_step: bool = False) -> None:
        """restarts: limits the restarts of all ranks together; None: nobody starts engines after
        others. in_step: the engines compute in step, so they end together, and follow together."""
        self.restarts = restarts or RestartBudget(0)
        self.in_step = in_step
        self.recovers = restarts is not None
        """Whether an engine may follow one that has ended; no longer once the server ends."""
        self.standby: Literal["starting", "ready", "ended"] | None = None
        """State of the standby engine. ended: there was a standby, and none is started for now.
        None: the server has no standby. The code that starts standbys writes this field and the
        next two."""
        self.standby_death = ""
        """Why the last standby ended and, if none follows, why not."""
        self.num_standby_deaths = 0
        self._latest: dict[int, EngineLife] = {}

    def start(self, life: EngineLife) -> None:
        """The rank has a new engine. The one before it, if any, is gone."""
        earlier = self._latest.get(life.rank)
        if earlier is not None:
            assert earlier.is_wanted or not earlier.why_last, "Nobody wants an engine of this rank."
            life._begin_after(earlier)
        self._latest[life.rank] = life
        if self.in_step:
            life._in_step = self._latest.values()

    def end(self) -> None:
        """The server ends: nothing follows any more, whatever operators have asked for."""
        self.recovers = False
        for life in self._latest.values():
            life.is_wanted = False

    def want(self, rank: int) -> None:
        """An operator wants an engine of this rank if nothing follows its latest one."""
        life = self._latest.get(rank)
        if self.recovers and life is not None and life.why_last:
            life.is_wanted = True

    @property
    def is_ready(self) -> bool:
        """Whether a request would be processed now."""
        return any(each.is_ready for each in self._latest.values())

    @property
    def num_served(self) -> int:
        """How many ranks have ever had an engine that was ready."""
        return sum(each.rank_has_served for each in self._latest.values())

    @property
    def has_ended(self) -> bool:
        """Whether no engine takes requests, and none is being started."""
        return all(each.has_ended for each in self._latest.values()) and not self.may_come()

    @property
    def is_over(self) -> bool:
        """Whether all ranks are given up, and no operator wants one again."""
        return bool(self._latest) and all(
            each.state is EngineState.GIVEN_UP and not each.is_wanted
            for each in self._latest.values()
        )

    def may_come(self, without: Collection[int] = ()) -> bool:
        """Whether an engine that is not ready may become ready. without: ranks that do not
        count."""
        return self.recovers and any(
            not (each.why_last or each.is_ready or rank in without)
            for rank, each in self._latest.items()
        )

    def why_never(self, life: EngineLife) -> str:
        """Why nothing may follow an engine that has ended, even if restarts are left; "" if
        something may."""
        if not self.recovers:
            return life.death
        if life.why_last:
            return life.why_last
        if not life.rank_has_served:
            return life.death if life.failed else f"It could not start: {life.death}"
        return life.death if life.failed is not None and life.failed.is_final else ""

    def follow(self, life: EngineLife, *, has_standby: bool = False) -> Successor | None:
        """What follows an engine that is gone, decided once: the standby, if there is one, or a
        restart, which the budget pays; the caller starts it. None: nothing. Then the life's
        ``why_last`` says why, and the caller gives the rank up."""
        assert life.state is EngineState.GONE, f"It is {life.state}."
        if not self.recovers:
            life.why_last = life.death
        elif not life.is_decided:
            assert not self.in_step, "they follow together"
            self._decide((life,), life, Successor.STANDBY if has_standby else Successor.RESTART)
        return None if life.why_last else life.successor

    def follow_together(self, last: EngineLife) -> bool:
        """Decide what follows engines that compute in step, if this was the last of them to end: a
        restart of all, which counts once, or nothing. Returns whether it was."""
        lives = self._latest.values()
        is_last = all(each.state is EngineState.GONE and not each.is_decided for each in lives)
        if is_last:
            self._decide(lives, last, Successor.RESTART)
        return is_last

    def _decide(self, lives: Collection[EngineLife], last: EngineLife, wanted: Successor) -> None:
        """Give these engines the successor or, if none may follow, the reason. last: the one that
        ended last."""
        why = next(filter(None, map(self.why_never, lives)), "")
        if not (why or self.restarts.left or wanted is Successor.STANDBY):
            most = self.restarts.most
            why = f"{last.death} It is not started again: --max-engine-restarts is {most} an hour."
        if not why:
            self.restarts.spend()
        for each in lives:
            each.why_last, each.successor = why, None if why else wanted
