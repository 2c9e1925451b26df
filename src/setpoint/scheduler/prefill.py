"""Planning of prompt tokens: the sequence in mid-prefill first, then admissions in policy order
(docs/sglang/scheduling.md#admission).

The scan ends at the first request that does not fit and never skips ahead, so no policy has a
second way to starve a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import replace

from setpoint.core.plan import Admit, PlanBuilder
from setpoint.core.records import AdmissionRefusal, Observer, Preemption, RequestAdmitted
from setpoint.core.settings import PrioritySettings, Settings
from setpoint.scheduler.budget import PrefillBudget, fits_until_finish
from setpoint.scheduler.delay import AdmissionDelay, DelayView
from setpoint.scheduler.ordering import WaitingOrder
from setpoint.scheduler.policy import POLICIES
from setpoint.scheduler.preemption import UrgencyView, preemption_order
from setpoint.scheduler.sequence import Sequence
from setpoint.scheduler.state import State, StepDraft


class PrefillPlanner:
    def __init__(self, state: State, observer: Observer) -> None:
        self._state = state
        self._observer = observer
        self._order = WaitingOrder(state, observer)
        self._delay = AdmissionDelay()

    def plan(self, builder: PlanBuilder, step: StepDraft) -> None:
        """Add prefill rows to the step, and count the reasons why the rest of the queue waits."""
        state, chunking, settings = self._state, self._state.chunking, step.settings
        if chunking is None:
            if not state.queue:
                return
            reason = self._no_pass(settings)
            if reason is not None:
                self.refuse(reason, step)
                return
        budget = self._budget(settings)
        shares = chunking is not None and POLICIES[settings.policy].shares_chunks
        waiting = self._order.take(settings) if shares else None
        if chunking is not None:
            self._continue(chunking, budget, builder, step, waiting or [])
        if waiting is not None or state.chunking is None:
            if waiting is None:
                waiting = self._order.take(settings)
            self._scan(waiting, budget, builder, step)
        if state.chunking is not None and not step.refusals:
            self.refuse(AdmissionRefusal.CHUNK_BUDGET, step)
        self._delay.record_admissions(step.num_new_seqs)

    def refuse(self, reason: AdmissionRefusal, step: StepDraft) -> None:
        """Count the refusals: the head of the queue waits for ``reason``, and all requests after it
        wait for the head."""
        num_waiting = len(self._state.queue)
        if num_waiting:
            step.refusals[reason] = 1
            self._state.head_refusal = reason
        if num_waiting > 1:
            step.refusals[AdmissionRefusal.BLOCKED] = num_waiting - 1

    def _no_pass(self, settings: Settings) -> AdmissionRefusal | None:
        """Why no sequence can be admitted this turn, if that is known without considering any of
        them."""
        state = self._state
        standing = state.standing_refusal
        if standing is not None and not self._preemption_is_possible(settings.priority):
            return standing
        view = DelayView(
            num_running=len(state.running),
            num_free_slots=state.num_free_slots,
            num_queued=len(state.queue),
            usage=state.cache.pool_stats().usage,
            now=state.now,
        )
        return AdmissionRefusal.DELAYED if self._delay.holds(view, settings.delay) else None

    def _scan(
        self, waiting: list[Sequence], budget: PrefillBudget, builder: PlanBuilder, step: StepDraft
    ) -> None:
        """Admit in order until one does not fit, or one is left in mid-prefill."""
        state = self._state
        for seq in waiting:
            refusal = self._admit(seq, budget, builder, step)
            if refusal in (AdmissionRefusal.NO_MEMORY, AdmissionRefusal.NO_SLOT) and self._preempt(
                seq, budget, step
            ):
                refusal = self._admit(seq, budget, builder, step)
                assert refusal is None, "preemption frees as much as the request needs"
            if refusal is not None:
                # NOTE: not if nothing ran before this pass. Newly admitted sequences reserve all
                # that they may generate until they run; the next pass counts them by the ratio and
                # may find room for more (in this case SGLang sets its flag on an empty batch, which
                # it drops).
                if (
                    refusal in (AdmissionRefusal.NO_MEMORY, AdmissionRefusal.NO_SLOT)
                    and step.num_running
                ):
                    state.standing_refusal = refusal
                self.refuse(refusal, step)
                return
            if state.chunking is seq:
                return

    def _budget(self, settings: Settings) -> PrefillBudget:
        state, config = self._state, self._state.config
        mixed = len(state.running) * config.max_tokens_per_row if settings.mixed_chunk else 0
        page, chunk = state.cache.page_size, state.chunk
        return PrefillBudget(
            costs=state.costs,
            clip_max_new_tokens=config.clip_max_new_tokens,
            # NOTE: one page always remains; otherwise a decode batch as large as the chunk would
            # block prefill for good.
            input_left=max(settings.max_prefill_tokens - mixed, page),
            chunk_left=None if chunk is None else max(chunk - mixed, page),
            requests_left=settings.prefill_max_requests,
            reserved=sum(
                self._reserve(seq) for seq in state.running.values() if seq is not state.chunking
            ),
        )

    def _reserve(self, seq: Sequence) -> float:
        """Pool tokens that a running sequence is still expected to need."""
        left = min(seq.remaining - seq.inflight_samples, self._state.config.clip_max_new_tokens)
        expected = left * (1.0 if seq.request.sampling.ignore_eos else self._state.ratio.current)
        costs = self._state.costs
        return costs.growth(expected, seq.num_scheduled, span=1) if costs.row.windows else expected

    def _continue(
        self,
        seq: Sequence,
        budget: PrefillBudget,
        builder: PlanBuilder,
        step: StepDraft,
        waiting: list[Sequence],
    ) -> None:
        """Add the next chunk of the sequence in mid-prefill. waiting: sequences for which to keep a
        part of the chunk budget if they are shorter."""
        state = self._state
        if seq.inflight_steps and not state.config.replan_inflight:
            return
        state.holdings.slide(seq)
        spare, left = (
            state.holdings.num_covered(seq) - seq.num_scheduled,
            len(seq.ids) - seq.num_scheduled,
        )
        kept = budget.kept_for_shorter(left, map(self._num_uncached, waiting))
        new_rows = state.available_tokens // (state.cache.page_size * state.cache.row.width)
        count = budget.chunk(left, new_rows * state.cache.page_size + spare, kept=kept)
        if count > 0:
            self._add_row(seq, count, budget, builder, step)

    def _num_uncached(self, seq: Sequence) -> int:
        ids = seq.known_ids()
        return len(ids) - self._state.cache.peek(
            ids[: match_limit(seq, len(ids))], seq.request.options.namespace
        )

    def _admit(
        self, seq: Sequence, budget: PrefillBudget, builder: PlanBuilder, step: StepDraft
    ) -> AdmissionRefusal | None:
        """Give a waiting sequence a slot, its cached prefix and its first row. Returns the reason,
        with nothing changed, if that is impossible."""
        state = self._state
        if state.num_free_slots <= 0:
            return AdmissionRefusal.NO_SLOT
        refusal = budget.exhausted(state.available_tokens)
        if refusal is not None:
            return refusal
        ids = seq.known_ids()
        handle = state.cache.match(ids[: match_limit(seq, len(ids))], seq.request.options.namespace)
        extend = len(ids) - handle.num_tokens
        verdict = self._judge(seq, len(ids), extend, budget, state.available_tokens)
        if (
            not isinstance(verdict, AdmissionRefusal)
            and verdict < extend
            and state.chunking is not None
        ):
            verdict = AdmissionRefusal.CHUNK_BUDGET  # only one prompt at a time is in mid-prefill
        if isinstance(verdict, AdmissionRefusal):
            handle.release()
            return verdict
        waited_s, cached = state.now - seq.since, handle.num_tokens
        self._observer.on(
            RequestAdmitted(seq.seq_id, seq.rid, cached, waited_s, seq.num_retractions)
        )
        state.start(seq)
        seq.ids = ids
        state.holdings.attach(seq, handle, builder)
        if seq.num_retractions == 0 and seq.first_token_at is None:
            seq.num_cached = cached
        builder.admits.append(_admission(seq))
        step.num_cached_tokens += cached
        step.num_new_seqs += 1
        budget.num_admitted += 1
        self._add_row(seq, verdict, budget, builder, step)
        return None

    def _judge(
        self,
        seq: Sequence,
        num_tokens: int,
        extend: int,
        budget: PrefillBudget,
        available: int,
        without: Collection[Sequence] = (),
    ) -> int | AdmissionRefusal:
        """The budget's verdict on a sequence of ``num_tokens``, ``extend`` of them uncached
        (``PrefillBudget.judge``), if ``available`` pool tokens can be allocated and the sequences
        in ``without`` no longer run."""
        state = self._state
        if seq.request.sampling.ignore_eos and not state.cache.enabled:
            others = [
                other
                for other in state.running.values()
                if other is not state.chunking and other not in without
            ]
            living = [(other.remaining, other.num_known) for other in [*others, seq]]
            costs, num_full = state.costs, state.cache.row.num_full
            # The growth of window pages is subtracted for all of them at once.
            rest = available - costs.growth(extend + seq.remaining, num_tokens - extend, span=1)
            for other in others:
                rest -= costs.growth(other.remaining, other.num_scheduled, span=1)
            rest += num_full * sum(left for left, _ in living)
            if not fits_until_finish(living, rest, num_full=num_full):
                return AdmissionRefusal.NO_MEMORY
        return budget.judge(extend, seq.remaining, available, cached=num_tokens - extend)

    def _preemption_is_possible(self, rule: PrioritySettings | None) -> bool:
        """Whether some waiting sequence is more urgent than some running one by more than the
        threshold."""
        state = self._state
        if rule is None or not rule.preempt or not state.running:
            return False
        return (
            max(seq.urgency for seq in state.queue)
            - min(seq.urgency for seq in state.running.values())
            > rule.threshold
        )

    def _preempt(self, seq: Sequence, budget: PrefillBudget, step: StepDraft) -> bool:
        """Send as few less urgent running sequences back to the queue as ``seq`` needs to fit; none
        if not even all of them suffice. Returns whether any was sent back.

        If one of them is in flight, none is sent back yet: the step is held, so that the next turn
        has its result and decides again.
        """
        state, rule = self._state, step.settings.priority
        if rule is None or not rule.preempt:
            return False
        assert state.chunking is None, "the scan ends where a prompt is left in mid-prefill"
        running = (UrgencyView(other.seq_id, other.urgency) for other in state.running.values())
        victims = self._victims(seq, preemption_order(seq.urgency, running, rule.threshold), budget)
        if any(victim.inflight_steps for victim in victims):
            step.hold = not step.seqs
            return False
        before = state.available_tokens
        for victim in victims:
            budget.reserved -= self._reserve(victim)
            state.send_back(victim)
        if victims:
            gained = state.available_tokens - before
            self._observer.on(Preemption(seq.rid, tuple(victim.rid for victim in victims), gained))
        return bool(victims)

    def _victims(self, seq: Sequence, order: list[int], budget: PrefillBudget) -> list[Sequence]:
        """The shortest prefix of ``order`` that makes enough room for ``seq``; empty if even all of
        ``order`` is too little."""
        state, ids = self._state, seq.known_ids()
        candidates = [state.running[seq_id] for seq_id in order]

        with state.cache.match(
            ids[: match_limit(seq, len(ids))], seq.request.options.namespace
        ) as handle:

            def suffice(count: int) -> bool:
                if state.num_free_slots + count <= 0:
                    return False
                gone = candidates[:count]
                available = state.available_tokens + state.holdings.num_returned_by(gone)
                trial = replace(budget, reserved=budget.reserved - sum(map(self._reserve, gone)))
                if trial.exhausted(available) is not None:
                    return False
                return isinstance(
                    self._judge(
                        seq, len(ids), len(ids) - handle.num_tokens, trial, available, gone
                    ),
                    int,
                )

            if not candidates or not suffice(len(candidates)):
                return []
            return candidates[: bisect_left(range(1, len(candidates)), True, key=suffice) + 1]

    def _add_row(
        self,
        seq: Sequence,
        count: int,
        budget: PrefillBudget,
        builder: PlanBuilder,
        step: StepDraft,
    ) -> None:
        """Plan the next ``count`` tokens of a sequence's prompt on new pages, which other requests
        can match from now on."""
        state, start = self._state, seq.num_scheduled
        grown = state.holdings.grow(seq, start + count, builder)
        assert grown, "the budget counted these pages as available"
        seq.num_scheduled += count
        last = seq.prefilled = seq.num_scheduled == len(seq.ids)
        samples = int(last and seq.remaining > 0)
        builder.add_row(seq.slot, seq.seq_id, start, count, samples)
        step.add(seq, computed=count, samples=samples)
        step.num_prefill_rows += 1
        step.num_new_tokens += count
        state.num_processed += count
        budget.charge(count, reserve=seq.remaining if last else 0, num_tokens=seq.num_scheduled)
        if not last:
            state.chunking = seq
        elif state.chunking is seq:
            state.chunking = None
        state.holdings.publish(seq, seq.ids[: seq.num_scheduled])


def match_limit(seq: Sequence, num_ids: int) -> int:
    """The number of tokens that may be matched in the cache. The last token is always computed, for
    its logits or hidden state; so is every position whose logprob or hidden state is still wanted,
    and the whole prompt if its mean is wanted."""
    if seq.request.options.pooling == "mean":
        return 0
    if seq.request.options.hidden_states:
        return min(num_ids - 1, seq.num_hidden_states)
    first = _first_prompt_logprob(seq)
    return num_ids - 1 if first < 0 else min(num_ids - 1, first)


def _first_prompt_logprob(seq: Sequence) -> int:
    """The first prompt position whose logprob is wanted and was not sent; -1: there is none."""
    logprobs = seq.request.options.logprobs
    if logprobs is None or logprobs.start < 0 or seq.num_sent > seq.num_prior:
        return -1
    return logprobs.start


def _admission(seq: Sequence) -> Admit:
    request, first = seq.request, _first_prompt_logprob(seq)
    return Admit(
        slot=seq.slot,
        seq_id=seq.seq_id,
        ids=seq.ids,
        num_prompt=len(seq.prompt),
        sampling=request.sampling,
        seed=request.seed,
        stop_ids=tuple(sorted(seq.stop_ids)) if request.sampling.min_new_tokens > 0 else (),
        options=request.options,
        # The logprob of a position needs the logits of the one before it.
        logprob_start=-1 if first < 0 else first + 1,
    )
