"""The scheduler: decides step by step which sequences run, how many tokens of each, and on which
pages.

Works on ids, page numbers and counts. Prefill has priority: a step that can admit or continue a
prompt does so, and decode waits unless mixed chunks are on (docs/sglang/scheduling.md#one-step). It
knows nothing of tensors, text, sockets or the clock; the loop moves plans and results between it
and an executor.

Contract with the loop: ``schedule`` and ``update`` may be called in any sequence, but every plan is
executed and its result given to ``update`` exactly once, in order; one that the executor has lost
is given to ``lose`` instead, after all before it. ``masks`` of a plan is called
after the results it depends on were given. ``take_events`` returns the events that planning causes.
"""

from __future__ import annotations

from itertools import chain, takewhile

from setpoint.core.control import Operate, PauseMode
from setpoint.core.errors import RequestError, StepOutOfMemoryError
from setpoint.core.failures import failure_finish, log_failure, refusal_finish
from setpoint.core.handover import (
    Giver,
    HandoverCounts,
    PromptNews,
    Taker,
)
from setpoint.core.messages import Abort, Finish, PagesMoved, PrefixFound, Prepared, TokenEvent
from setpoint.core.operations import Operator
from setpoint.core.plan import PlanBuilder, StepPlan, TokenMasks
from setpoint.core.preparation import Need, Preparer
from setpoint.core.records import (
    Fallback,
    GrammarEnded,
    Observer,
    Outcome,
    RequestClipped,
    RequestDone,
)
from setpoint.core.request import Request
from setpoint.core.result import StepResult
from setpoint.core.settings import Settings
from setpoint.core.transfers import Mover
from setpoint.scheduler.arrival_checks import new_sequence, urgency_of
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.cadence import Cadence
from setpoint.scheduler.commit import Committer
from setpoint.scheduler.decode import DecodePlanner
from setpoint.scheduler.emit import GRAMMAR_ENDED
from setpoint.scheduler.handover import DecodeSide, Handover, PrefillSide
from setpoint.scheduler.lost_steps import LostSteps
from setpoint.scheduler.pause_controller import PauseController
from setpoint.scheduler.prefill import PrefillPlanner, match_limit
from setpoint.scheduler.scheduler_config import SchedulerConfig
from setpoint.scheduler.sequence import Sequence, Status
from setpoint.scheduler.state import State, StepDraft
from setpoint.scheduler.step_masks import token_masks

UNAVAILABLE = "ServiceUnavailableError"
TOO_MANY_PREPARING = "Too many requests wait for their grammar."
PREPARATION_TIMEOUT = "The grammar of the request was not ready in time."


class Scheduler:
    """See the module for the contract. ``state`` is public for invariant checks and tests."""

    def __init__(
        self,
        config: SchedulerConfig,
        settings: Settings,
        cache: KVCache,
        *,
        observer: Observer,
        preparer: Preparer | None = None,
        giver: Giver | None = None,
        taker: Taker | None = None,
        mover: Mover | None = None,
    ) -> None:
        """giver: moves pages to decode servers, if this is a prefill server; taker: moves them
        here, if it is a decode server. mover: moves pages to and from the cache tiers of
        ``config``."""
        self.config = config
        self.state = State(config, settings, cache, observer, preparer, mover)
        self._observer = observer
        self._prefill = PrefillPlanner(self.state, observer)
        self._decode = DecodePlanner(self.state, observer)
        self._committer = Committer(self.state, observer)
        self._lost_steps = LostSteps(self.state, observer)
        self._cadence = Cadence()
        self._pauses = PauseController(self.state, observer)
        self._handover: Handover | None = None
        if giver is not None:
            self._handover = PrefillSide(self.state, observer, giver)
            self._committer.keep_if(self._handover.is_kept)
        elif taker is not None:
            adopt = self._committer.adopt
            self._handover = DecodeSide(self.state, observer, taker, adopt, self._look_up)
        self._events: list[TokenEvent] = []
        self._ignored_priority = False
        self._next_step_id = 0

    def add(self, seq_id: int, request: Request) -> TokenEvent | None:
        """Accept a request: it joins the queue, or is prepared first. Returns an event if the
        request is refused or already complete.

        ``seq_id`` must be larger than all before it, because the ids are in the order of arrival.
        """
        try:
            seq = self._accept(seq_id, request)
            complete = bool(seq.outputs) and seq.remaining <= 0
            if not complete:
                self._join(seq)
        except RequestError as error:
            return self._refuse(seq_id, request, refusal_finish(error))
        except Exception as error:
            return self._refuse(seq_id, request, failure_finish(log_failure("taking it in", error)))
        wanted = request.sampling.max_new_tokens
        limit = seq.max_new_tokens
        if wanted is not None and limit < wanted and self.config.role != "prefill":
            self._observer.on(RequestClipped(request.rid, wanted, limit))
        if complete:
            seq.finish = Finish("length", length=len(seq.outputs))
            return self.state.last_event(seq)
        return None

    def _join(self, seq: Sequence) -> None:
        """Put the sequence in the queue, or let it wait for what it needs. Raises RequestError
        (503) if too many wait already."""
        state = self.state
        needs_grammar = state.preparing.needs_grammar(seq)
        if needs_grammar and len(state.preparing) >= self.config.max_preparing_requests:
            raise RequestError(TOO_MANY_PREPARING, status_code=503)
        self._make_room(seq)
        seq.accepted_at = state.now
        if self._handover is not None:
            self._handover.begin(seq)
        if needs_grammar:
            state.preparing.start_grammar(seq)
        if self._handover is None or not self._handover.brings_prompt(seq):
            self._look_up(seq)
        if seq.needs:
            state.reserve_place(seq)
        else:
            state.enqueue(seq)
        state.by_id[seq.seq_id] = seq

    def take_grammar(self, message: Prepared) -> TokenEvent | None:
        """Give a sequence its grammar. Returns its event if that ends it. Does nothing if the
        sequence has already ended."""
        state, seq_id, finish = self.state, message.seq_id, message.finish
        if seq_id not in state.preparing:
            return None
        if finish is not None:
            return state.end(
                state.by_id[seq_id], finish, outcome="refused", preparation_s=message.seconds
            )
        try:
            seq = state.preparing.take_grammar(message)
        except Exception as error:
            return self._committer.fail(state.by_id[seq_id], log_failure("preparing it", error))
        state.enqueue_if_ready(seq)
        if seq.grammar is not None and seq.outputs and seq.grammar.terminated:
            self._observer.on(
                GrammarEnded(seq_id, GRAMMAR_ENDED, False)
            )  # by the outputs that came with the request
            return state.end(seq, GRAMMAR_ENDED)
        return None if self._handover is None else self._handover.resume(seq)

    def _look_up(self, seq: Sequence) -> None:
        """Let the sequence wait for what stores have of its prompt, if there are any and the pool
        lacks much."""
        tiers = self.state.tiers
        if tiers is None:
            return
        ids = seq.known_ids()
        ids = ids[: match_limit(seq, len(ids))]
        if tiers.wants(seq, ids):
            tiers.start(seq, ids, self.state.now)

    def take_news(self, message: PrefixFound | PagesMoved) -> None:
        """Take what a mover has found or moved."""
        state = self.state
        if isinstance(message, PagesMoved):
            state.transfers.end(message)
            state.standing_refusal = None  # it may have held what a sequence needs
        elif state.tiers is not None:
            state.tiers.found(message)
        self._advance_tiers()

    def _advance_tiers(self) -> None:
        """Begin loads and saves that can begin, and queue the sequences that wait no longer.

        Nothing begins in a standstill: memory may be given back, or weights be about to change."""
        state, tiers = self.state, self.state.tiers
        if tiers is not None:
            if not state.stands_still:
                tiers.advance(state.now)
            ready, tiers.ready = tiers.ready, []
            for seq in ready:
                state.enqueue_if_ready(seq)

    def take_handover(self, message: PromptNews) -> TokenEvent | None:
        """Take what the mover of handovers has to say. Returns the event to send, if there is
        one."""
        assert self._handover is not None
        return self._handover.take(message)

    def handover_counts(self) -> HandoverCounts | None:
        return None if self._handover is None else self._handover.counts()

    def _refuse(self, seq_id: int, request: Request, finish: Finish) -> TokenEvent:
        """Record a request that does not become a sequence. Returns its only event."""
        num_prompt = len(request.prompt_ids) // 4
        self._observer.on(
            RequestDone(
                seq_id=seq_id,
                rid=request.rid,
                finish=finish,
                num_prompt=num_prompt,
                ended_at=self.state.now,
            )
        )
        return TokenEvent(seq_id, [], finish, num_prompt=num_prompt)

    def _accept(self, seq_id: int, request: Request) -> Sequence:
        state = self.state
        seq = new_sequence(
            request,
            self.config,
            state.settings,
            seq_id=seq_id,
            longest=state.longest,
            page_size=state.cache.page_size,
        )
        if (
            request.options.priority is not None
            and state.settings.priority is None
            and not self._ignored_priority
        ):
            self._ignored_priority = True
            why = "--enable-priority-scheduling is off"
            self._observer.on(Fallback("priorities do not order the queue", why))
        return seq

    def _make_room(self, seq: Sequence) -> None:
        """Raise RequestError (503) if the queue is full. If it holds a less urgent request that has
        not run yet, drop that one instead."""
        state, limit = self.state, self.state.settings.max_queued_requests
        if (
            limit is None
            or len(state.queue) + len(state.preparing) < limit
            or seq.request.was_accepted
        ):
            return
        fresh = (
            other for other in chain(state.queue, state.preparing) if other.num_retractions == 0
        )
        worst = max(fresh, key=lambda other: (-other.urgency, other.seq_id), default=seq)
        if worst.urgency >= seq.urgency:
            raise RequestError("The request queue is full.", status_code=503)
        self._drop(worst, "The request is aborted by a higher priority request.")

    def _drop(self, seq: Sequence, why: str, outcome: Outcome = "aborted") -> None:
        """End a request that was accepted; its event is among the next ``take_events``."""
        finish = Finish("abort", message=why, status_code=503, err_type=UNAVAILABLE)
        self._events.append(self.state.end(seq, finish, outcome=outcome))

    def _drop_late(self) -> None:
        """Drop requests whose time is up. All sets are in the order of ``since``, so the first
        request that is not late ends the search."""
        state, config = self.state, self.config
        for limit_s, seqs, why in (
            (config.waiting_timeout_s, state.queue, "Request waiting timeout reached."),
            (config.waiting_timeout_s, state.preparing, "Request waiting timeout reached."),
            (config.preparation_timeout_s, state.preparing, PREPARATION_TIMEOUT),
            (config.running_timeout_s, state.running.values(), "Request running timeout reached."),
        ):
            if limit_s is not None:
                earliest = state.now - limit_s
                for seq in list(takewhile(lambda seq: seq.since < earliest, seqs)):  # noqa: B023
                    if why is not PREPARATION_TIMEOUT or Need.GRAMMAR in seq.needs:
                        self._drop(seq, why, "timed_out")
        if self._handover is not None:
            self._events += self._handover.time_out(state.now - config.handover_timeout_s)

    def abort(self, message: Abort) -> None:
        """End the message's sequences that have not ended yet; their events are among the next
        ``take_events``."""
        by_id = self.state.by_id
        for seq in [by_id[seq_id] for seq_id in message.seq_ids if seq_id in by_id]:
            self._events.append(self.state.end(seq, _abort_finish(seq, message)))

    def stop(self, seq_id: int) -> None:
        """End a request without an event: the frontend needs no more of it."""
        seq = self.state.by_id.get(seq_id)
        if seq is not None:
            self.state.end(seq, Finish("stop"))

    def change(self, settings: Settings) -> None:
        """Plan under these settings from the next step on. Requests keep their places; their
        urgency follows the new rule."""
        state, before = self.state, self.state.settings
        assert settings.max_running_requests <= self.config.num_slots, "the frontend refuses more"
        urgencies = (
            {}
            if settings.priority == before.priority
            else {
                seq_id: urgency_of(seq.request, settings.priority)
                for seq_id, seq in state.by_id.items()
            }
        )
        state.ratio.rescale(before.conservativeness, settings.conservativeness)
        for seq_id, urgency in urgencies.items():
            state.by_id[seq_id].urgency = urgency
        state.settings = settings
        state.standing_refusal = None  # it may rest on a limit that has changed

    def pause(self, mode: PauseMode) -> None:
        """Plan nothing until ``resume``; no step may be in flight. The events of the requests that
        end are among the next ``take_events``."""
        self._pauses.pause(mode, self._events.append)

    def hold(self, *, flushes: bool) -> None:
        """Plan nothing until ``resume``; no step may be in flight. Raises RequestError if requests
        are open that no pause holds up; flushes: or if paused ones keep memory."""
        self._pauses.hold(flushes=flushes)

    def resume(self) -> None:
        """Plan again, after a pause."""
        self._pauses.resume()

    def operate(self, message: Operate, operator: Operator) -> str:
        """Have ``operator`` carry out an operation; no step may be in flight. Returns the path of
        the file that it writes, or "". Raises SetpointError."""
        return self._pauses.operate(message, operator)

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns None if nothing can run before a result comes back or a
        message arrives."""
        state, settings = self.state, self.state.settings
        if state.stands_still:
            return None
        self._drop_late()
        if self._handover is not None:
            self._handover.advance()
        if state.tiers is not None:
            could_run = not state.queue and state.num_free_slots > 0
            state.tiers.expire(state.now, could_run=could_run)
            state.tiers.save_ahead()
            self._advance_tiers()
        builder = PlanBuilder(self._next_step_id, state.cache.row.width)
        step = StepDraft(settings)
        step.num_running = state.num_decoding
        refusal = self._cadence.refusal(state.num_decoding, settings.cadence)
        if refusal is None:
            self._prefill.plan(builder, step)
        else:
            self._prefill.refuse(refusal, step)
        if not step.hold and (not step.seqs or settings.mixed_chunk):
            self._events += self._decode.plan(builder, step)
        if not step.seqs:
            self._when_nothing_runs(step)
            return None
        plan = step.plan = builder.build(tuple(state.releases))
        state.releases = []
        state.inflight.append(step)
        self._next_step_id += 1
        self._cadence.record_step(
            prefill=step.num_prefill_rows > 0,
            chunk_only=step.num_prefill_rows == 1 and step.seqs[0] is state.chunking,
            num_decoding=state.num_decoding,
            settings=settings.cadence,
        )
        step.num_queued, step.num_preparing = len(state.queue), len(state.preparing)
        step.num_pending_tokens = state.num_pending_tokens
        step.handover = self.handover_counts()
        return plan

    def _when_nothing_runs(self, step: StepDraft) -> None:
        """Reset the new-token ratio of an idle engine, and drop a request for which there will
        never be room."""
        state = self.state
        if state.is_idle:
            state.ratio.reset(step.settings.conservativeness)
        elif state.queue and not (
            state.running or state.draining or state.inflight or state.transfers
        ):
            head, why = next(iter(state.queue)), ", ".join(step.refusals)
            message = (
                f"Nothing else runs and this request still cannot be admitted ({why});"
                f" {state.available_tokens} of {state.cache.total_tokens} tokens of the KV cache"
                " are available."
            )
            self._events.append(
                state.end(
                    head,
                    Finish(
                        "abort", message=message, status_code=500, err_type="InternalServerError"
                    ),
                )
            )

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        """The masks of the plan's constrained rows after the tokens committed so far; None if no
        row is constrained."""
        step = next(step for step in reversed(self.state.inflight) if step.plan is plan)
        return token_masks(step, plan, self.config, self._observer)

    def take_events(self) -> list[TokenEvent]:
        """Remove and return the events that planning, aborts and pauses caused since the last
        call."""
        events, self._events = self._events, []
        return events

    def update(self, result: StepResult, finished_at: float) -> list[TokenEvent]:
        """Commit the oldest step in flight; returns the events to send."""
        events = self._committer.commit(result, finished_at)
        if self._handover is not None:
            self._handover.advance()  # ends may have made room
        return events

    def lose(self, error: StepOutOfMemoryError) -> None:
        """Give up the only step in flight, for which the device had too little memory. Raises
        OutOfMemoryError if steps will not fit."""
        self._lost_steps.take(error)

    def give_up(self, seq_id: int, why: str) -> TokenEvent:
        """End a sequence whose events cannot be sent, if it has not ended. Returns its last
        event."""
        seq = self.state.by_id.get(seq_id)
        return (
            TokenEvent(seq_id, [], failure_finish(why))
            if seq is None
            else self._committer.fail(seq, why)
        )


def _abort_finish(seq: Sequence, abort: Abort) -> Finish:
    if abort.message:
        return Finish("abort", message=abort.message, err_type=abort.err_type)
    waiting = seq.status in (Status.WAITING, Status.PREPARING)
    return Finish("abort", message="Abort in waiting queue" if waiting else "Aborted")
