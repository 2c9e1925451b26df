"""The engine's one loop: messages in, plans to the executor, results back, events out.

Overlap and pipelining are its queue depth, not other loops. It runs in the engine process's main
thread and is the only caller of the scheduler and the executor.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from setpoint.core.executor import Executor, PendingStep
from setpoint.core.failures import failure
from setpoint.core.messages import (
    Abort,
    Announce,
    Call,
    Reply,
    Shutdown,
    Stop,
    Submit,
    ToEngine,
    ToFrontend,
    TokenEvent,
    Tokens,
)
from setpoint.core.shown import shown
from setpoint.scheduler import invariants
from setpoint.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
"""An idle loop looks up this often, so that a dead frontend is noticed."""
SETTLING_S = 0.05
"""A loop that has just fallen idle leaves the cores to those who answer for that long, before it
prepares for what may come."""


class Link(Protocol):
    """The engine's end of the wire to the frontend."""

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Everything that has arrived; waits up to ``timeout_s`` for a first message (0 = do not
        wait)."""
        ...

    def send(self, message: ToFrontend) -> None: ...


class StrictAccountingError(AssertionError):
    """``--strict-accounting`` found the state inconsistent; the message lists every violation."""


class Loop:
    """``depth`` steps may be in flight while the next one is planned (0 = synchronous)."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        link: Link,
        *,
        depth: int,
        heartbeat: Callable[[], None] = lambda: None,
        state_info: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """``heartbeat`` is called every turn; ``state_info`` adds to the answer of a "state"
        call."""
        self._scheduler = scheduler
        self._executor = executor
        self._link = link
        self._depth = depth
        self._heartbeat = heartbeat
        self._state_info = state_info
        self._inflight: deque[PendingStep] = deque()
        self._stopping = False
        self._was_idle = True
        self._unchanged = False
        """Nothing has happened since the last check."""
        self._announced: set[int] = set()
        """The sequences in flight, as the frontend knows them."""

    def run(self) -> None:
        """Serve until a Shutdown message."""
        while not self._stopping:
            self.step()
        self._executor.shutdown()

    def step(self) -> None:
        """One turn of the loop. What it raises ends the engine, and the log then says who was
        computed."""
        try:
            self._turn()
        except Exception:
            rids = [shown(seq.rid) for step in self._scheduler.state.inflight for seq in step.seqs]
            logger.error(
                "The engine ends: a step failed as a whole. Requests of the steps in flight: %s",
                ", ".join(rids) or "none",
            )
            raise

    def _turn(self) -> None:
        scheduler, inflight, depth = self._scheduler, self._inflight, self._depth
        self._heartbeat()
        idle = scheduler.state.is_idle
        timeout_s = self._idle_wait_s() if idle else 0.0
        if not self._unchanged:
            self._check(idle)
        self._unchanged = not self._intake(timeout_s) and idle
        plan = scheduler.schedule()
        self._announce()
        pending = None if plan is None else self._executor.submit(plan)
        self._emit(scheduler.take_events())
        if inflight and (pending is None or len(inflight) >= depth > 0):
            self._emit(scheduler.update(inflight.popleft().result()))
            self._announce()
        if pending is not None:
            assert plan is not None
            pending.finish(scheduler.masks(plan))
            inflight.append(pending)
        if depth == 0 and inflight:
            self._emit(scheduler.update(inflight.popleft().result()))
            if scheduler.state.is_idle:
                self._announce()

    def _idle_wait_s(self) -> float:
        """How long an idle turn waits for a message; not at all while the executor still has
        something to prepare."""
        if not self._was_idle:
            return SETTLING_S
        return 0.0 if self._executor.idle() else IDLE_WAIT_S

    def _emit(self, events: list[TokenEvent]) -> None:
        """Send them in one message; if that raises each alone, and instead of one that still does
        its sequence's failure."""
        if not events:
            return
        try:
            self._link.send(Tokens(events))
        except Exception as error:
            if len(events) > 1:
                for event in events:
                    self._emit([event])
            else:
                self._link.send(
                    Tokens(
                        [
                            self._scheduler.give_up(
                                events[0].seq_id, failure("sending its tokens", error)
                            )
                        ]
                    )
                )

    def _announce(self) -> None:
        """Say how the set of sequences in flight has changed, if it has.

        Called before a plan executes, and when nothing follows a result. In between, a synchronous
        engine says nothing: most steps run the sequences of the step before.
        """
        steps, before = self._scheduler.state.inflight, self._announced
        named = {seq.seq_id: seq for step in steps for seq in step.seqs}
        if named.keys() == before:
            return
        joined = {seq_id: seq.rid for seq_id, seq in named.items() if seq_id not in before}
        self._link.send(Announce(joined, sorted(before - named.keys())))
        self._announced = set(named)

    def _intake(self, timeout_s: float) -> bool:
        """Take what has come; whether anything has."""
        messages = self._link.receive(timeout_s)
        for message in messages:
            match message:
                case Submit(seq_id, request):
                    event = self._scheduler.add(seq_id, request)
                    self._emit([event] if event is not None else [])
                case Stop(seq_id):
                    self._scheduler.stop(seq_id)
                case Abort(seq_ids):
                    self._emit(self._scheduler.abort(seq_ids))
                case Call():
                    self._link.send(self._answer(message))
                case Shutdown():
                    self._stopping = True
        return bool(messages)

    def _answer(self, call: Call) -> Reply:
        state = self._scheduler.state
        counts = {"num_queued": len(state.queue), "num_running": len(state.running)}
        if call.name == "state":
            return Reply(
                call.id,
                True,
                self._state_info() | counts | {"pool": asdict(state.cache.pool_stats())},
            )
        if call.name == "flush_cache":
            if not state.is_idle:
                logger.warning(
                    "Cache not flushed because there are pending requests. #queue-req: %d,"
                    " #running-req: %d",
                    counts["num_queued"],
                    counts["num_running"],
                )
                return Reply(call.id, False, counts)
            logger.info("Cache flushed successfully!")
            return Reply(call.id, True, {"num_tokens": state.cache.flush()})
        return Reply(call.id, False, {"error": f"unknown call {call.name!r}"})

    def _check(self, idle: bool) -> None:
        """Accounting: every step when strict, else whenever the engine falls idle.

        A leak found idle is logged and repaired (no sequence can lose anything then) instead of
        ending the server.
        """
        state = self._scheduler.state
        if state.config.strict_accounting:
            found = invariants.violations(state)
            if found:
                raise StrictAccountingError("; ".join(found))
        elif idle and not self._was_idle:
            found = invariants.leaks(state.cache.pool_stats(), idle=True)
            if found:
                logger.error(
                    "KV cache accounting is broken and was rebuilt empty: %s", "; ".join(found)
                )
                state.cache.reset()
        self._was_idle = idle
