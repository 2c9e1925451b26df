"""Planning of decode rows: the next tokens of every prefilled sequence, and retraction when the
pool cannot hold them.

The rules are SGLang's (docs/sglang/scheduling.md#retraction).
"""

from __future__ import annotations

from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.plan import OWN_LENGTH, PlanBuilder
from setpoint.core.records import Observer, Retraction
from setpoint.core.settings import PrioritySettings
from setpoint.scheduler.retraction import RunningView, retraction_order
from setpoint.scheduler.sequence import Sequence, Status
from setpoint.scheduler.state import State, StepDraft

OUT_OF_MEMORY = Finish(
    "abort",
    message=(
        "Out of memory even after retracting all other requests in the decode batch. Aborting the"
        " last request."
    ),
    status_code=500,
    err_type="InternalServerError",
)
"""How the last sequence ends if even it alone does not fit."""


class DecodePlanner:
    def __init__(self, state: State, observer: Observer) -> None:
        self._state = state
        self._observer = observer
        self._steps_since_test = 0

    def plan(self, builder: PlanBuilder, step: StepDraft) -> list[TokenEvent]:
        """Add a row for every sequence that wants tokens, or none if steps in flight must free
        memory first. Returns the event of a sequence that is aborted because it does not fit even
        alone.

        Rows may bring back ``max_tokens_per_row`` tokens if the pool has room for all of them, and
        one token otherwise: no sequence is retracted so that others can bring back more.
        """
        state, planned = self._state, set(builder.seq_ids)
        rows = [
            seq
            for seq in state.running.values()
            if seq.wants_row and seq.seq_id not in planned and self._may_replan(seq)
        ]
        if not rows:
            return []
        if state.cache.row.windows:
            for seq in rows:
                state.holdings.slide(seq)
        events: list[TokenEvent] = []
        testing = self._test_is_due(len(rows))
        samples = _samples(rows, state.config.max_tokens_per_row)
        growth = self._growth(rows, samples)
        if max(samples) > 1 and not self._fits(growth):
            samples = [1] * len(rows)
            growth = self._growth(rows, samples)
        if testing or not self._fits(growth):
            # Retract only with nothing in flight: the results in flight may end sequences, which
            # frees their memory.
            if planned or state.inflight:
                return []
            events = self._retract(rows, step.settings.priority, testing=testing)
            rows = [seq for seq in rows if seq.status is Status.RUNNING]
            samples = [1] * len(rows)
            growth = self._growth(rows, samples)
        else:
            state.ratio.decay(step.settings.conservativeness)
        state.holdings.grow_each(growth, builder)
        for seq, count in zip(rows, samples, strict=True):
            forced = seq.forced_next[: count - 1] if seq.forced else ()
            builder.add_row(seq.slot, seq.seq_id, OWN_LENGTH, 1 + len(forced), count, forced)
            seq.num_scheduled += count
            step.num_forced += len(forced)
            step.add(seq, computed=1 + len(forced), samples=count)
        step.num_decode_rows = len(rows)
        self._steps_since_test = 0 if testing else self._steps_since_test + 1
        return events

    def _may_replan(self, seq: Sequence) -> bool:
        if seq.inflight_steps == 0:
            return True
        if not self._state.config.replan_inflight:
            return False
        # The mask of this step needs every earlier token of the sequence. With one step in flight
        # the loop has them in time.
        return seq.grammar is None or self._state.config.depth < 2

    def _growth(self, rows: list[Sequence], samples: list[int]) -> list[tuple[Sequence, int]]:
        """(sequence, number of page rows) of the sequences that need further page rows to bring
        back ``samples`` tokens each."""
        page_size, width = self._state.cache.page_size, self._state.cache.row.width
        found = []
        for seq, count in zip(rows, samples, strict=True):
            short = (seq.num_scheduled + count) * width - len(seq.pages) * page_size
            if short > 0:
                found.append((seq, -(-short // (page_size * width))))
        return found

    def _fits(self, growth: list[tuple[Sequence, int]]) -> bool:
        cache = self._state.cache
        num_pages = sum(count for _, count in growth) * cache.row.width
        return num_pages * cache.page_size <= self._state.available_tokens

    def _test_is_due(self, num_rows: int) -> bool:
        interval = self._state.config.test_retract_interval
        return interval > 0 and num_rows > 1 and self._steps_since_test >= interval

    def _retract(
        self, rows: list[Sequence], rule: PrioritySettings | None, *, testing: bool
    ) -> list[TokenEvent]:
        """Send sequences back to the queue until one decode step of the rest fits: at least one is
        sent back, and one is kept.

        If that one does not fit either, the sequence in mid-prefill is sent back; if that does not
        suffice or there is none, the last one is aborted, or sent back, too, if transfers hold
        pages. Returns its event.
        """
        state = self._state
        before, ratio_before = state.available_tokens, state.ratio.current
        living = {seq.seq_id: seq for seq in rows}

        def fits() -> bool:
            left = list(living.values())
            return self._fits(self._growth(left, [1] * len(left)))

        retracted: list[Sequence] = []
        for seq_id in _order(rows, rule)[:-1]:
            retracted.append(living.pop(seq_id))
            state.send_back(retracted[-1])
            if fits():
                break
        if state.chunking is not None and not fits():
            retracted.append(state.chunking)
            state.send_back(retracted[-1])
        events = []
        if not fits():
            (last,) = living.values()
            if state.transfers:  # they will give their pages back
                retracted.append(last)
                state.send_back(last)
            else:
                events.append(state.end(last, OUT_OF_MEMORY))
        kept = [seq for seq in state.running.values() if seq is not state.chunking]
        state.ratio.set_after_retraction(
            sum(len(seq.outputs) for seq in kept),
            sum(seq.max_new_tokens for seq in kept),
            len(kept),
        )
        gained = state.available_tokens - before
        self._observer.on(
            Retraction(
                len(retracted),
                gained,
                ratio_before,
                state.ratio.current,
                testing,
                num_input_tokens=sum(len(seq.prompt) for seq in retracted),
                num_output_tokens=sum(len(seq.outputs) for seq in retracted),
            )
        )
        return events


def _order(rows: list[Sequence], rule: PrioritySettings | None) -> list[int]:
    by_urgency = rule is not None and rule.retract_first
    return retraction_order(
        RunningView(seq.seq_id, len(seq.outputs), len(seq.prompt), seq.urgency if by_urgency else 0)
        for seq in rows
    )


def _samples(rows: list[Sequence], most: int) -> list[int]:
    """The most tokens that the next row of each of these sequences may bring back: never more than
    may still be committed, and with a grammar the forced ones and one more, because a mask covers
    one position."""
    return [
        1 + len(seq.forced_next)
        if seq.forced
        else min(1 if seq.grammar is not None else most, seq.remaining - seq.inflight_samples)
        for seq in rows
    ]
