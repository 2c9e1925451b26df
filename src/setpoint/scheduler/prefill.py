"""Planning of prompt tokens: the sequence in mid-prefill first, then admissions in policy order (FACTS §2.4).

The scan ends at the first request that does not fit: no skipping ahead, so that no request starves.
"""

from __future__ import annotations

from setpoint.core.plan import Admit, PlanBuilder
from setpoint.core.stats import Refusal
from setpoint.scheduler.budget import PrefillBudget, fits_until_finish
from setpoint.scheduler.policy import POLICIES, Candidate, QueueView
from setpoint.scheduler.sequence import Sequence
from setpoint.scheduler.state import State, StepDraft

TOUCH_INTERVAL = 32
"""fcfs: passes between refreshes of the recency of waiting prompts' prefixes (FACTS §2.3)."""
TOUCH_REQUESTS = 128


class PrefillPlanner:
    def __init__(self, state: State) -> None:
        self._state = state
        self._policy = POLICIES[state.config.policy]
        self._num_passes = 0

    def plan(self, builder: PlanBuilder, step: StepDraft) -> None:
        """Add prefill rows to the step, and count why the rest of the queue waits."""
        state = self._state
        if state.chunking is None and state.full is not None:
            self._refuse(state.full, step)
            return
        if state.chunking is None and not state.queue:
            return
        budget = self._budget()
        if state.chunking is not None:
            self._continue(state.chunking, budget, builder, step)
        for seq in self._order() if state.chunking is None else ():
            refusal = self._admit(seq, budget, builder, step)
            if refusal is not None:
                # NOTE: not where nothing ran before this pass. Newcomers reserve all they may generate until they run; the next pass
                # counts them by the ratio and may find room for more (SGLang's flag is lost there with the empty batch it was set on).
                if refusal in (Refusal.NO_MEMORY, Refusal.NO_SLOT) and step.num_running:
                    state.full = refusal
                self._refuse(refusal, step)
                return
            if state.chunking is not None:
                break
        if state.chunking is not None:
            self._refuse(Refusal.CHUNK_BUDGET, step)

    def _refuse(self, reason: Refusal, step: StepDraft) -> None:
        """The head of the queue waits for ``reason``, everyone behind it for the head."""
        num_waiting = len(self._state.queue)
        if num_waiting:
            step.refusals[reason] = 1
        if num_waiting > 1:
            step.refusals[Refusal.BLOCKED] = num_waiting - 1

    def _budget(self) -> PrefillBudget:
        state, config = self._state, self._state.config
        reserved = 0.0
        for seq in state.running.values():
            if seq is not state.chunking:
                left = min(seq.remaining - seq.inflight_samples, config.clip_max_new_tokens)
                reserved += left * (1.0 if seq.request.sampling.ignore_eos else state.ratio.current)
        mixed = len(state.running) if config.mixed_chunk else 0
        page, chunk = state.cache.page_size, config.chunked_prefill_size
        return PrefillBudget(
            page_size=page,
            clip_max_new_tokens=config.clip_max_new_tokens,
            # NOTE: one page always remains, or a decode batch as large as the chunk would lock prefill out for good.
            input_left=max(config.max_prefill_tokens - mixed, page),
            chunk_left=None if chunk is None else max(chunk - mixed, page),
            requests_left=config.prefill_max_requests,
            reserved=reserved,
        )

    def _order(self) -> list[Sequence]:
        state, policy = self._state, self._policy
        self._num_passes += 1
        by_arrival = policy.order is None or not state.cache.enabled
        if by_arrival or (policy.queue_limit is not None and len(state.queue) > policy.queue_limit):
            waiting = list(state.queue)
            if state.cache.enabled and self._num_passes % TOUCH_INTERVAL == 0:
                for seq in reversed(waiting[:TOUCH_REQUESTS]):
                    state.cache.touch(seq.known_ids(), seq.request.namespace)
            return waiting
        assert policy.order is not None
        candidates = []
        for seq in state.queue:
            ids = seq.known_ids()
            matched = state.cache.peek(ids, seq.request.namespace)
            candidates.append(Candidate(seq.seq_id, ids, seq.request.namespace, matched))
        config = state.config
        view = QueueView(candidates, config.in_batch_check, config.in_batch_deprioritize)
        return [state.queue[seq_id] for seq_id in policy.order(view)]

    def _continue(self, seq: Sequence, budget: PrefillBudget, builder: PlanBuilder, step: StepDraft) -> None:
        state = self._state
        if seq.inflight_steps and not state.config.replan_inflight:
            return
        spare = len(seq.pages) * state.cache.page_size - seq.num_scheduled
        count = budget.chunk(len(seq.ids) - seq.num_scheduled, state.available_tokens + spare)
        if count > 0:
            self._add_row(seq, count, budget, builder, step)

    def _admit(self, seq: Sequence, budget: PrefillBudget, builder: PlanBuilder, step: StepDraft) -> Refusal | None:
        """Give a waiting sequence a slot, its cached prefix and its first row; or say why not, with nothing changed."""
        state = self._state
        if not state.slots:
            return Refusal.NO_SLOT
        refusal = budget.exhausted(state.available_tokens)
        if refusal is not None:
            return refusal
        ids = seq.known_ids()
        handle = state.cache.match(ids[: _match_limit(seq, len(ids))], seq.request.namespace)
        verdict = self._judge(seq, len(ids) - handle.num_tokens, budget)
        if isinstance(verdict, Refusal):
            handle.release()
            return verdict
        state.start(seq)
        seq.ids = ids
        state.holdings.attach(seq, handle, builder)
        if seq.num_retractions == 0:
            seq.num_cached = handle.num_tokens
        builder.admits.append(_admission(seq))
        step.num_cached_tokens += handle.num_tokens
        step.num_new_seqs += 1
        budget.num_admitted += 1
        self._add_row(seq, verdict, budget, builder, step)
        return None

    def _judge(self, seq: Sequence, extend: int, budget: PrefillBudget) -> int | Refusal:
        state = self._state
        if seq.request.sampling.ignore_eos and not state.cache.enabled:
            living = [(other.remaining, other.num_known) for other in state.running.values() if other is not state.chunking]
            if not fits_until_finish([*living, (seq.remaining, seq.num_known)], state.available_tokens - extend):
                return Refusal.NO_MEMORY
        return budget.judge(extend, seq.remaining, state.available_tokens)

    def _add_row(self, seq: Sequence, count: int, budget: PrefillBudget, builder: PlanBuilder, step: StepDraft) -> None:
        """Plan the next ``count`` tokens of a sequence's prompt, on fresh pages, matchable from now on."""
        state, start = self._state, seq.num_scheduled
        grown = state.holdings.grow(seq, start + count, builder)
        assert grown, "the budget counted these pages as available"
        seq.num_scheduled += count
        last = not seq.prefilling
        samples = last and seq.remaining > 0
        builder.add_row(seq.slot, seq.seq_id, start, count, samples)
        step.add(seq, samples=samples)
        step.num_prefill_rows += 1
        step.num_new_tokens += count
        budget.charge(count, reserve=seq.remaining if last else 0)
        state.chunking = None if last else seq
        state.holdings.publish(seq, seq.ids[: seq.num_scheduled])


def _match_limit(seq: Sequence, num_ids: int) -> int:
    """The last token is always computed, for its logits or hidden state; so is every prompt position whose logprob is wanted, and the
    whole prompt for a mean over it."""
    if seq.request.pooling == "mean":
        return 0
    if _wants_prompt_logprobs(seq):
        return min(num_ids - 1, seq.request.logprob_start_len)
    return num_ids - 1


def _wants_prompt_logprobs(seq: Sequence) -> bool:
    sent = seq.num_sent > len(seq.request.prior_output_ids) // 4
    return seq.request.return_logprob and seq.request.logprob_start_len >= 0 and not sent


def _admission(seq: Sequence) -> Admit:
    request = seq.request
    return Admit(
        slot=seq.slot,
        seq_id=seq.seq_id,
        ids=seq.ids,
        num_prompt=len(seq.prompt),
        sampling=request.sampling,
        seed=seq.seed,
        stop_ids=tuple(sorted(seq.stop_ids)) if request.sampling.min_new_tokens > 0 else (),
        return_logprob=request.return_logprob,
        logprob_start=request.logprob_start_len + 1 if _wants_prompt_logprobs(seq) else -1,
        top_logprobs_num=request.top_logprobs_num,
        token_ids_logprob=request.token_ids_logprob,
        pooling=request.pooling,
    )
