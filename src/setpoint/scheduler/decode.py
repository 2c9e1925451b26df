"""Planning of decode rows: one token for every prefilled sequence, and retraction when the pool
cannot hold them.

The rules are SGLang's (docs/sglang/scheduling.md#retraction).
"""

from __future__ import annotations

from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.plan import OWN_LENGTH, PlanBuilder
from setpoint.core.records import Observer, Retraction
from setpoint.scheduler.retraction import RunningView, retraction_order
from setpoint.scheduler.sequence import Sequence, Status
from setpoint.scheduler.state import State, StepDraft

LAST_REQUEST_OOM = (
    "Out of memory even after retracting all other requests in the decode batch. Aborting the last"
    " request."
)


class DecodePlanner:
    def __init__(self, state: State, observer: Observer) -> None:
        self._state = state
        self._observer = observer
        self._steps_since_test = 0

    def plan(self, builder: PlanBuilder, step: StepDraft) -> list[TokenEvent]:
        """Add a row for every sequence that wants a token, or none if memory must come back from
        steps in flight first.

        Returns the event of a sequence aborted because not even it alone fits.
        """
        state, planned = self._state, set(builder.seq_ids)
        rows = [
            seq
            for seq in state.running.values()
            if seq.wants_row and seq.seq_id not in planned and self._may_replan(seq)
        ]
        if not rows:
            return []
        events: list[TokenEvent] = []
        testing = self._test_is_due(len(rows))
        if testing or not self._fits(rows):
            # Retract only on a quiet pipeline: what is in flight may end sequences, and their
            # memory is only then free.
            if planned or state.inflight:
                return []
            events = self._retract(rows, testing=testing)
            rows = [seq for seq in rows if seq.status is Status.RUNNING]
        else:
            state.ratio.decay()
        self._add_rows(rows, builder, step)
        self._steps_since_test = 0 if testing else self._steps_since_test + 1
        return events

    def _may_replan(self, seq: Sequence) -> bool:
        if seq.inflight_steps == 0:
            return True
        if not self._state.config.replan_inflight:
            return False
        # The mask of this step needs every earlier token of the sequence: with one step in flight
        # the loop has it in time.
        return seq.grammar is None or self._state.config.depth < 2

    def _needs_page(self, seq: Sequence) -> bool:
        return seq.num_scheduled == len(seq.pages) * self._state.cache.page_size

    def _fits(self, rows: list[Sequence]) -> bool:
        needed = sum(map(self._needs_page, rows))
        return needed * self._state.cache.page_size <= self._state.available_tokens

    def _add_rows(self, rows: list[Sequence], builder: PlanBuilder, step: StepDraft) -> None:
        growing = [seq for seq in rows if self._needs_page(seq)]
        pages = self._state.cache.alloc(len(growing))
        assert pages is not None, "checked by _fits()"
        builder.map_one_page_each(
            [seq.slot for seq in growing], [len(seq.pages) for seq in growing], pages
        )
        for seq, page in zip(growing, pages.tolist(), strict=True):
            seq.pages.append(page)
        for seq in rows:
            builder.add_row(seq.slot, seq.seq_id, OWN_LENGTH, 1, True)
            seq.num_scheduled += 1
            step.add(seq, samples=True)
        step.num_decode_rows = len(rows)

    def _test_is_due(self, num_rows: int) -> bool:
        interval = self._state.config.test_retract_interval
        return interval > 0 and num_rows > 1 and self._steps_since_test >= interval

    def _retract(self, rows: list[Sequence], *, testing: bool) -> list[TokenEvent]:
        """Send sequences back to the queue until one decode step of the rest fits: at least one
        goes, the last is kept.

        If the last does not fit either, the sequence in mid-prefill goes; if there is none, the
        last is aborted.
        """
        state, before, ratio_before = (
            self._state,
            self._state.available_tokens,
            self._state.ratio.current,
        )
        living = {seq.seq_id: seq for seq in rows}
        num_retracted = 0
        by_rank = state.config.priority is not None and state.config.priority.retract_first
        views = [
            RunningView(seq.seq_id, len(seq.outputs), len(seq.prompt), seq.rank if by_rank else 0)
            for seq in rows
        ]
        for seq_id in retraction_order(views)[:-1]:
            state.send_back(living.pop(seq_id))
            num_retracted += 1
            if self._fits(list(living.values())):
                break
        if state.chunking is not None and not self._fits(list(living.values())):
            state.send_back(state.chunking)
            num_retracted += 1
        events = []
        if not self._fits(list(living.values())):
            (last,) = living.values()
            events.append(
                state.end(
                    last,
                    Finish(
                        "abort",
                        message=LAST_REQUEST_OOM,
                        status_code=500,
                        err_type="InternalServerError",
                    ),
                )
            )
        kept = [seq for seq in state.running.values() if seq is not state.chunking]
        state.ratio.retracted(
            sum(len(seq.outputs) for seq in kept),
            sum(seq.max_new_tokens for seq in kept),
            len(kept),
        )
        gained = state.available_tokens - before
        self._observer.on(
            Retraction(num_retracted, gained, ratio_before, state.ratio.current, testing)
        )
        return events
