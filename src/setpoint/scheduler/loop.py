"""The engine's only loop: messages in, plans to the executor, results back, events out.

Overlap and pipelining are queue depths of this loop, not other loops. It runs in the engine
process's main thread and is the only caller of the scheduler and the executor. Everything that
enters or leaves it goes to its observer as records, and only the loop reads the clock.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from setpoint.core.control import (
    Answer,
    CacheFlush,
    Call,
    Change,
    Continue,
    Done,
    EngineReport,
    FlushCache,
    GetMoments,
    GetState,
    Hold,
    InternalState,
    ListRequests,
    Moments,
    Operate,
    OperationDone,
    Pause,
    PauseDone,
    Refused,
)
from setpoint.core.errors import RequestError, SetpointError, StepOutOfMemoryError
from setpoint.core.excerpt import excerpt
from setpoint.core.executor import Clock, Executor, PendingStep
from setpoint.core.failures import log_failure, log_operation_failure
from setpoint.core.handover import PromptReceived, PromptSent, PromptWanted
from setpoint.core.messages import (
    Abort,
    Announce,
    PagesMoved,
    PrefixFound,
    Prepared,
    Reply,
    Shutdown,
    Stop,
    Submit,
    ToFrontend,
    TokenEvent,
    Tokens,
    ToLoop,
)
from setpoint.core.operations import MemoryPart, Operation, Operator
from setpoint.core.plan import OWN_LENGTH, StepPlan
from setpoint.core.preparation import Need
from setpoint.core.records import (
    CacheFlushed,
    Observer,
    PoolRebuilt,
    Received,
    Rested,
    ResultTaken,
    SendFailed,
    SettingsChanged,
    StepLost,
    StepPlanned,
    Turn,
    TurnDone,
)
from setpoint.scheduler import invariants
from setpoint.scheduler.listing import request_list
from setpoint.scheduler.scheduler import Scheduler
from setpoint.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
"""Seconds after which an idle loop wakes up, to notice a dead frontend."""
STUCK_S = 0.05
"""Longest wait of a loop whose requests cannot run before a transfer ends."""
SETTLING_S = 0.05
"""Seconds for which a loop that has just become idle leaves the cores to the frontend, which is
sending the last answers, before the executor prepares for later steps."""


class Link(Protocol):
    """The loop's inbox, and its way to send messages to the frontend."""

    def receive(self, timeout_s: float) -> list[ToLoop]:
        """All messages that have arrived. Waits up to ``timeout_s`` for the first one (0 = do not
        wait)."""
        ...

    def send(self, message: ToFrontend) -> None: ...


class StrictAccountingError(AssertionError):
    """``--strict-accounting`` found the state inconsistent; the message lists every violation."""


@dataclass(slots=True)
class _TurnTimes:
    """Where the seconds of the present turn were spent (see ``TurnDone``); written by the loop."""

    began: float = 0.0
    plan_s: float = 0.0
    model_s: float = 0.0
    link_s: float = 0.0
    cpu_began: float = 0.0


class NoOperator:
    """The operator of a loop whose executor can do nothing but steps: refuses every operation."""

    released: frozenset[MemoryPart] = frozenset()

    def operate(self, call_id: int, operation: Operation) -> str:
        raise RequestError("This engine does not support operations.")


class Loop:
    """Drives the scheduler and the executor. ``depth`` steps may be in flight while the next one is
    planned (0 = synchronous)."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        link: Link,
        *,
        depth: int,
        clock: Clock,
        observer: Observer,
        operator: Operator | None = None,
        heartbeat: Callable[[], None] = lambda: None,
        accompany: Callable[[], object] = lambda: None,
        report: Callable[[], EngineReport] = EngineReport,
        moments: Callable[[int], Moments] = lambda since: Moments(since, []),
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        """heartbeat: called every turn. accompany: called in every turn that submits no rows; takes
        part in a step that other engines have begun, if there is one. Where engines compute in
        step (DP attention), the link must wake the loop up for it. report: returns the part of an
        InternalState that the scheduler does not know. moments: answers GetMoments. cpu_clock: how
        long this thread has had a CPU, in seconds; None where another device computes the steps.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._link = link
        self._depth = depth
        self._clock = clock
        self._observer = observer
        self._operator = operator or NoOperator()
        self._heartbeat = heartbeat
        self._accompany = accompany
        self._report = report
        self._moments = moments
        self._cpu_clock = cpu_clock
        self._inflight: deque[PendingStep] = deque()
        self._times = _TurnTimes()
        self._stuck_s = 0.0
        """How long the next turn waits for a message although requests are open: transfers hold the
        pages that the requests need."""
        self._stopping = False
        self._was_idle = self._was_settled = True
        self._unchanged = False
        """Whether the last turn found the engine at rest and no message; written by ``_turn``."""
        self._announced: set[int] = set()
        """The sequences in flight according to the last Announce."""

    def run(self) -> None:
        """Serve until a Shutdown message."""
        while not self._stopping:
            self.step()
        self._executor.shutdown()

    def step(self) -> None:
        """Run one turn. An exception ends the engine; the log then names the requests of the steps
        in flight."""
        try:
            self._turn()
        except Exception:
            rids = [
                excerpt(seq.rid) for step in self._scheduler.state.inflight for seq in step.seqs
            ]
            logger.error(
                "The engine ends: a step failed as a whole. Requests of the steps in flight: %s",
                ", ".join(rids) or "none",
            )
            raise

    def _turn(self) -> None:
        """Run one turn. The order matters: messages are handled before the step is planned, and
        with ``depth`` > 0 the step is submitted before the loop waits for the result of an earlier
        one, so that the device has work while the host commits."""
        scheduler, inflight, depth = self._scheduler, self._inflight, self._depth
        self._heartbeat()
        state = scheduler.state
        resting = state.is_at_rest
        messages = self._receive(self._rest_s() if resting else self._stuck_s, resting=resting)
        # Requests in preparation have time limits, which a standstill suspends.
        waits = bool(state.preparing or state.handing)
        quiet = resting and not messages and (state.stands_still or not waits)
        if quiet and self._unchanged:
            self._accompany()
            return
        self._observer.on(Turn(state.now))
        if not self._unchanged:
            self._check(idle=state.is_idle, settled=state.is_settled)
        self._unchanged = quiet
        for message in messages:
            self._take(message)
        plan = self._plan()
        self._announce()
        pending = None if plan is None else self._submit(plan)
        self._emit(scheduler.take_events())
        if inflight and (pending is None or len(inflight) >= depth > 0):
            self._commit_oldest()
            self._announce()
        if pending is not None:
            assert plan is not None
            if self._finish(pending, plan):
                inflight.append(pending)
        if depth == 0 and inflight:
            self._commit_oldest()
            if state.is_idle:
                self._announce()
        for news in state.cache.take_news():
            self._send(news)
        is_stuck = plan is None and not inflight and bool(state.transfers)
        self._stuck_s = STUCK_S if is_stuck else 0.0
        if plan is not None:
            self._observer.on(self._turn_done(plan))
        if plan is None or not len(plan.rows):
            self._accompany()

    def _receive(self, timeout_s: float, *, resting: bool) -> list[ToLoop]:
        """The messages that have arrived. A loop at rest waits for one. The turn's time starts
        here."""
        times = self._times = _TurnTimes()
        before = self._clock.now()
        messages = self._link.receive(timeout_s)
        now = self._clock.now()
        # A loop at rest has waited, and how much of that time was spent receiving is not known.
        times.began, times.link_s = (now, 0.0) if resting else (before, now - before)
        if self._cpu_clock is not None:
            times.cpu_began = self._cpu_clock()
        self._scheduler.state.now = now
        return messages

    def _plan(self) -> StepPlan | None:
        began = self._clock.now()
        plan = self._scheduler.schedule()
        self._times.plan_s = self._clock.now() - began
        if plan is not None:
            self._observer.on(StepPlanned(plan))
        return plan

    def _submit(self, plan: StepPlan) -> PendingStep | None:
        """Begin the step. Returns None if it is lost."""
        began = self._clock.now()
        try:
            pending = self._executor.submit(plan)
        except StepOutOfMemoryError as error:
            self._lose(plan, error, sampling=False)
            return None
        self._times.model_s += self._clock.now() - began
        return pending

    def _finish(self, pending: PendingStep, plan: StepPlan) -> bool:
        """Begin the step's sampling. Returns False if the step is lost."""
        masks = self._scheduler.masks(plan)
        began = self._clock.now()
        try:
            pending.finish(masks)
        except StepOutOfMemoryError as error:
            self._lose(plan, error, sampling=True)
            return False
        self._times.model_s += self._clock.now() - began
        return True

    def _lose(self, plan: StepPlan, error: StepOutOfMemoryError, *, sampling: bool) -> None:
        """Take the results of the steps before this one, and give it up."""
        self._commit_all()
        self._observer.on(
            StepLost(
                plan.step_id,
                sampling,
                len(self._scheduler.state.running),
                error.lack,
                error.is_final,
            )
        )
        self._scheduler.lose(error)
        self._announce()

    def _commit_oldest(self) -> None:
        began = self._clock.now()
        result = self._inflight.popleft().result()
        now = self._clock.now()
        self._times.model_s += now - began
        self._observer.on(ResultTaken(result, now))
        self._emit(self._scheduler.update(result, now))

    def _commit_all(self) -> None:
        while self._inflight:
            self._commit_oldest()

    def _turn_done(self, plan: StepPlan) -> TurnDone:
        times, starts = self._times, plan.rows.starts
        return TurnDone(
            step_id=plan.step_id,
            prefill=bool((starts != OWN_LENGTH).any()),
            turn_s=self._clock.now() - times.began,
            plan_s=times.plan_s,
            model_s=times.model_s,
            link_s=times.link_s,
            cpu_s=None if self._cpu_clock is None else self._cpu_clock() - times.cpu_began,
        )

    def _rest_s(self) -> float:
        """Seconds that a turn at rest waits for a message: 0 while the executor of an idle engine
        still has something to prepare."""
        if self._scheduler.state.stands_still:
            return IDLE_WAIT_S
        if not self._was_idle:
            return SETTLING_S
        if not self._executor.idle():
            return self._until_deadline_s(IDLE_WAIT_S)
        return 0.0

    def _until_deadline_s(self, most: float) -> float:
        """Seconds until a request stops waiting for a cache tier, at most ``most``."""
        state = self._scheduler.state
        if state.tiers is None:
            return most
        return min(max(state.tiers.next_deadline - state.now, 0.001), most)

    def _emit(self, events: list[TokenEvent]) -> None:
        """Send the events in one message. If that raises, send each in a message of its own; if
        that raises too, send the failure of its sequence instead."""
        if not events:
            return
        try:
            self._send(Tokens(events))
        except Exception as error:
            if len(events) > 1:
                for event in events:
                    self._emit([event])
            else:
                seq_id, why = events[0].seq_id, log_failure("sending its tokens", error)
                self._observer.on(SendFailed(seq_id, type(error).__name__))
                self._send(Tokens([self._scheduler.give_up(seq_id, why)]))

    def _send(self, message: ToFrontend) -> None:
        began = self._clock.now()
        self._link.send(message)
        self._times.link_s += self._clock.now() - began

    def _announce(self) -> None:
        """Tell the frontend how the set of sequences in flight has changed, if it has. Called
        before a plan executes, and when no step follows a result. A synchronous engine sends
        nothing in between: most steps run the same sequences as the step before.
        """
        steps, before = self._scheduler.state.inflight, self._announced
        named = {seq.seq_id: seq for step in steps for seq in step.seqs}
        if named.keys() == before:
            return
        joined = {seq_id: seq.rid for seq_id, seq in named.items() if seq_id not in before}
        self._send(Announce(joined, sorted(before - named.keys())))
        self._announced = set(named)

    def _take(self, message: ToLoop) -> None:
        self._observer.on(Received(message))
        match message:
            case Submit(seq_id, request):
                event = self._scheduler.add(seq_id, request)
                self._emit([event] if event is not None else [])
            case Prepared():
                event = self._scheduler.take_grammar(message)
                self._emit([event] if event is not None else [])
            case PrefixFound() | PagesMoved():
                self._scheduler.take_news(message)
            case PromptWanted() | PromptSent() | PromptReceived():
                event = self._scheduler.take_handover(message)
                self._emit([event] if event is not None else [])
            case Stop() | Abort():
                self._end_early(message)
            case Shutdown():
                self._stopping = True
            case _:
                self._control(message)

    def _end_early(self, message: Stop | Abort) -> None:
        try:
            if isinstance(message, Stop):
                self._scheduler.stop(message.seq_id)
            else:
                self._scheduler.abort(message)
        except Exception as error:
            log_operation_failure(type(message).__name__, error)
        self._emit(self._scheduler.take_events())

    def _control(self, call: Call) -> None:
        """Carry out a control call and answer it. An exception becomes the answer, except one in
        finishing the steps in flight, which concerns these steps and not the call."""
        if isinstance(call, Pause | Hold | Operate):
            self._commit_all()
        try:
            reply = Reply(call.id, self._answer(call))
            self._emit(self._scheduler.take_events())
            self._send(reply)
            return
        except SetpointError as error:
            refused = Refused(str(error))
        except Exception as error:
            name = type(call.operation if isinstance(call, Operate) else call).__name__
            refused = Refused(log_operation_failure(name, error), status_code=500)
        self._emit(self._scheduler.take_events())
        self._send(Reply(call.id, refused))

    def _answer(self, call: Call) -> Answer:
        """The answer to a control call. Raises SetpointError if the call is refused."""
        state = self._scheduler.state
        match call:
            case GetState():
                return self._internal_state()
            case GetMoments(_, since):
                return self._moments(since)
            case ListRequests():
                return request_list(state)
            case FlushCache():
                return self._flush()
            case Change(_, settings, options, by, why):
                self._scheduler.change(settings)
                self._observer.on(SettingsChanged(settings, tuple(options), by, why))
                return Done()
            case Pause(_, mode):
                self._scheduler.pause(mode)
                return PauseDone(state.num_paused)
            case Hold(_, flushes):
                self._scheduler.hold(flushes=flushes)
                return Done()
            case Continue():
                self._scheduler.resume()
                return Done()
            case Operate():
                path = self._scheduler.operate(call, self._operator)
                return OperationDone(state.num_paused, path)

    def _flush(self) -> CacheFlush:
        state = self._scheduler.state
        flushed = state.can_flush
        num_tokens = state.flush() if flushed else 0
        self._observer.on(
            CacheFlushed(
                flushed,
                num_tokens,
                num_queued=len(state.queue) + len(state.preparing),
                num_running=len(state.running),
            )
        )
        return CacheFlush(flushed, num_tokens)

    def _internal_state(self) -> InternalState:
        state = self._scheduler.state
        running = state.running.values()
        return InternalState(
            num_running=len(running),
            num_queued=len(state.queue) + len(state.preparing),
            num_preparing=len(state.preparing),
            num_loading=sum(Need.GRAMMAR not in seq.needs for seq in state.preparing),
            num_retracted=sum(seq.num_retractions > 0 for seq in state.queue),
            num_paused_reqs=state.num_paused,
            paused=state.pause,
            released=sorted(state.released),
            num_pending_tokens=state.num_pending_tokens,
            num_running_tokens=sum(seq.num_known for seq in running),
            running_per_key=_seqs_per_key(running),
            open_per_key=_seqs_per_key([*running, *state.queue]),
            pool=state.cache.pool_stats(),
            settings=state.settings,
            report=self._report(),
            handover=self._scheduler.handover_counts(),
        )

    def _check(self, *, idle: bool, settled: bool) -> None:
        """Check the accounting: after every step if strict, otherwise whenever the engine becomes
        idle. A leak found then is recorded and repaired, since no sequence can lose anything, and
        the server continues. Also record that the engine has become idle.
        """
        state = self._scheduler.state
        if state.config.strict_accounting:
            found = invariants.violations(state)
            if found:
                raise StrictAccountingError("; ".join(found))
        elif settled and not self._was_settled:
            found = invariants.leaks(state.cache.pool_stats(), idle=True)
            if found:
                self._observer.on(PoolRebuilt(tuple(found)))
                state.cache.reset()
        if settled and not self._was_settled:
            self._observer.on(Rested(state.cache.pool_stats()))
        self._was_idle, self._was_settled = idle, settled


def _seqs_per_key(seqs: Iterable[Sequence]) -> list[int]:
    """How many of the sequences have each routing key; those without one do not count."""
    keys = (seq.request.options.routing_key for seq in seqs)
    return list(Counter(key for key in keys if key).values())
