"""Turns the results of steps into outputs and events. Every token is appended, passed to the
grammar and tested for the end of its sequence; tokens after the end are discarded.

A sequence whose grammar is late leaves the batch here, when no step in flight contains it any more.

A row may bring back fewer tokens than it has room for (``Rows.samples``). The missing ones are then
subtracted from the counts; their pages stay with the sequence, whose next row writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile

import msgspec
import numpy as np

from setpoint.core.failures import failure_finish, log_failure
from setpoint.core.grammar import Grammar, NotReady
from setpoint.core.handover import HandoverState
from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.records import GrammarEnded, GrammarLate, Observer, StepDone, TokensForced
from setpoint.core.result import StepResult
from setpoint.scheduler.emit import (
    GRAMMAR_ENDED,
    NOT_FINITE,
    finish_after,
    is_due,
    logprob_block,
    token_event,
)
from setpoint.scheduler.sequence import MAX_FORCED, Sequence
from setpoint.scheduler.state import State, StepDraft
from setpoint.scheduler.step_masks import grammar_failure


class Committer:
    """Commits the steps in flight, oldest first, to the sequences in them."""

    def __init__(self, state: State, observer: Observer) -> None:
        self._state = state
        self._observer = observer
        self._is_kept: Callable[[Sequence, Finish], bool] = lambda seq, finish: False

    def keep_if(self, is_kept: Callable[[Sequence, Finish], bool]) -> None:
        """Do not end sequences for which ``is_kept`` returns True: it has seen to them."""
        self._is_kept = is_kept

    def commit(self, result: StepResult, finished_at: float) -> list[TokenEvent]:
        """Commit the result of the oldest step in flight; returns the events to send. Rows of
        sequences that have ended meanwhile are discarded."""
        self._state.now = finished_at
        step = self._state.inflight.popleft()
        assert step.plan is not None
        assert step.plan.step_id == result.step_id
        ids, ends = result.token_ids.tolist(), iter(result.offsets.tolist())
        end, num_sampled = next(ends), len(ids)
        events: list[TokenEvent] = []
        for seq, samples in zip(step.seqs, step.plan.rows.samples.tolist(), strict=True):
            seq.inflight_steps -= 1
            begin = end
            if samples:
                end = next(ends)
                seq.inflight_samples -= samples
                if end - begin != samples:
                    _subtract_missing(seq, samples, end - begin)
            if seq.finish is not None:
                num_sampled -= end - begin
                self._state.release_if_idle(seq)
                continue
            if seq.is_late and seq.seq_id not in result.failures:
                num_sampled -= end - begin
                self._leave_if_idle(seq)
                continue
            try:
                event = self._event_after(seq, ids, begin, end, result, step.ends)
            except Exception as error:
                event = self.fail(seq, log_failure("taking in its result", error))
            if event is not None:
                events.append(event)
            if seq.is_late and seq.finish is None:
                self._leave_if_idle(seq)
        if self._state.tiers is not None:
            self._state.tiers.note_step(result.step_id)
            if not step.num_decode_rows:
                self._state.tiers.note_prefill(step.num_new_tokens, result.forward_s)
        self._observer.on(self._done(step, result, num_sampled))
        return events

    def _leave_if_idle(self, seq: Sequence) -> None:
        """Let a sequence whose grammar is late wait for it, unless a step in flight contains it."""
        if seq.inflight_steps == 0:
            self._state.put_off(seq)

    def fail(self, seq: Sequence, why: str) -> TokenEvent:
        """End a sequence whose processing raised an exception, if it has not ended yet. Its unsent
        outputs are dropped."""
        seq.num_sent = len(seq.outputs)
        seq.output_logprobs, seq.prompt_logprobs, seq.embedding = [], [], b""
        seq.hidden_states = []
        if seq.finish is None:
            return self._state.end(seq, failure_finish(why))
        seq.finish = failure_finish(why)
        return self._state.last_event(seq)

    def _event_after(
        self,
        seq: Sequence,
        ids: list[int],
        begin: int,
        end: int,
        result: StepResult,
        ends: Mapping[int, Finish],
    ) -> TokenEvent | None:
        """Commit ``ids[begin:end]``, the tokens that a step brought back for one sequence. Returns
        the event to send, if one is due. ends: see ``StepDraft``."""
        if result.failures and seq.seq_id in result.failures:
            return self.fail(seq, result.failures[seq.seq_id])
        before = len(seq.outputs)
        try:
            if ends and seq.seq_id in ends:
                _append(seq, ids, begin, end - 1)  # forced tokens, which never end a sequence
                return self._end_by_grammar(seq, ends[seq.seq_id], discards=True)
            finish = _append(seq, ids, begin, end) if begin < end else _end_of_prompt(seq, result)
        except _GrammarRaised as raised:
            return self._end_by_grammar(seq, raised.finish, discards=True)
        if seq.first_token_at is None and len(seq.outputs) > before:
            seq.first_token_at = self._state.now
        if seq.request.options.logprobs is not None:
            _keep_logprobs(seq, result, len(seq.outputs) - before)
        if seq.request.options.hidden_states:
            _keep_hidden_states(seq, result)
        if seq.request.options.output_hidden_states and len(seq.outputs) > before:
            _keep_output_hidden_state(seq, result)
        if seq.request.options.token_facts and len(seq.outputs) > before:
            for name, numbers in result.token_facts.get(seq.seq_id, {}).items():
                seq.token_facts.setdefault(name, []).append(numbers)
        if finish is not None and self._is_kept(seq, finish):
            return None
        return self._after_tokens(seq, finish)

    def adopt(self, seq: Sequence, handed: HandoverState) -> TokenEvent | None:
        """Commit the tokens that a prefill server has sampled for a sequence in preparation, as if
        a step had brought them. Returns the event to send, if one is due."""
        seq.request = msgspec.structs.replace(seq.request, seed=handed.seed)
        seq.num_handed, seq.num_cached = handed.num_prompt, handed.num_cached
        seq.num_loaded, seq.num_from_host = handed.num_loaded, handed.num_from_host
        try:
            finish = _append(seq, handed.ids, 0, len(handed.ids))
        except _GrammarRaised as raised:
            return self._end_by_grammar(seq, raised.finish, discards=True)
        if not handed.ids:
            finish = Finish("length", length=0)
        seq.first_token_at = self._state.now
        if handed.logprobs is not None and seq.request.options.logprobs is not None:
            seq.output_logprobs.append(handed.logprobs)
        seq.token_facts = {name: list(found) for name, found in handed.token_facts.items()}
        event = self._after_tokens(seq, finish)
        if seq.is_late and seq.finish is None:
            self._state.preparing.resume(seq)
        return event

    def _after_tokens(self, seq: Sequence, finish: Finish | None) -> TokenEvent | None:
        """End a sequence that has got its last token; look ahead for another. Returns the event to
        send, if one is due."""
        if finish is GRAMMAR_ENDED:
            return self._end_by_grammar(seq, finish, discards=False)
        if finish is not None:
            return self._state.end(seq, finish)
        self._look_ahead(seq)
        if seq.is_late:
            self._observer.on(GrammarLate(seq.rid, seq.seq_id, False))
        if not is_due(seq, self._state.settings.stream_interval):
            return None
        return token_event(seq, self._state.now)

    def _look_ahead(self, seq: Sequence) -> None:
        """Ask the grammar which tokens it forces next; not if every token needs a step of its own
        (``RequestOptions.takes_every_step``)."""
        if seq.grammar is None or seq.request.options.takes_every_step:
            return
        if seq.forced or seq.remaining < 2 or seq.is_late:
            return
        try:
            forced = seq.grammar.forced(min(MAX_FORCED, seq.remaining - 1))
        except NotReady:
            seq.is_late = True
            return
        seq.forced = list(takewhile(lambda token: token not in seq.stop_ids, forced))
        if seq.forced:
            self._observer.on(TokensForced(seq.seq_id, len(seq.forced)))

    def _end_by_grammar(self, seq: Sequence, finish: Finish, *, discards: bool) -> TokenEvent:
        """End a sequence whose grammar allows no further token, or has raised an exception."""
        self._observer.on(GrammarEnded(seq.seq_id, finish, discards))
        return self._state.end(seq, finish)

    def _done(self, step: StepDraft, result: StepResult, num_sampled: int) -> StepDone:
        return StepDone(
            step_id=result.step_id,
            finished_at=self._state.now,
            num_prefill_rows=step.num_prefill_rows,
            num_decode_rows=step.num_decode_rows,
            num_new_tokens=step.num_new_tokens,
            num_cached_tokens=step.num_cached_tokens,
            num_new_seqs=step.num_new_seqs,
            num_running=step.num_running,
            num_queued=step.num_queued,
            num_preparing=step.num_preparing,
            num_pending_tokens=step.num_pending_tokens,
            num_sampled=num_sampled,
            pool=self._state.cache.pool_stats(),
            new_token_ratio=self._state.ratio.current,
            refusals=step.refusals,
            forward_s=result.forward_s,
            sample_s=result.sample_s,
            way=result.way,
            num_forced=step.num_forced,
            num_pairs=step.num_pairs,
            num_behind=step.num_behind,
            handover=step.handover,
        )


def _subtract_missing(seq: Sequence, samples: int, num_tokens: int) -> None:
    """Correct the counts of a sequence whose row brought back ``num_tokens`` of the ``samples`` it
    had room for. A sequence that has ended needs this too: what it leaves in the cache must have
    been computed."""
    assert num_tokens < samples, "a row brought back more tokens than its plan allows"
    assert not seq.forced, "a row with a grammar brought back fewer tokens than planned"
    seq.num_scheduled -= samples - num_tokens


class _GrammarRaised(Exception):
    def __init__(self, finish: Finish) -> None:
        self.finish = finish


def _is_last(grammar: Grammar, token: int) -> bool:
    """Pass a token to the grammar, before it is appended. Returns whether none may follow. Raises
    _GrammarRaised, and NotReady if the grammar has accepted the token but cannot answer yet."""
    try:
        grammar.accept(token)
        return grammar.terminated
    except NotReady:
        raise
    except Exception as error:
        raise _GrammarRaised(grammar_failure(error)) from error


def _append(seq: Sequence, ids: list[int], begin: int, end: int) -> Finish | None:
    """Commit ``ids[begin:end]`` up to the first token that ends the sequence. Returns how it ends,
    or None if it does not."""
    while begin < end:
        token, begin = ids[begin], begin + 1
        if token < 0:
            return NOT_FINITE
        grammar_ended = False
        if seq.grammar is not None:
            try:
                grammar_ended = _is_last(seq.grammar, token)
            except NotReady:
                seq.is_late = True
        seq.outputs.append(token)
        if seq.forced:
            del seq.forced[0]
        finish = finish_after(seq, token, grammar_ended=grammar_ended)
        if finish is not None:
            return finish
    return None


def _keep_logprobs(seq: Sequence, result: StepResult, num_committed: int) -> None:
    """Keep the logprobs of the prompt and of the committed output tokens until the next event."""
    if seq.seq_id in result.prompt_logprobs:
        seq.prompt_logprobs.append(logprob_block(result.prompt_logprobs[seq.seq_id]))
    if seq.seq_id in result.output_logprobs and num_committed:
        positions = result.output_logprobs[seq.seq_id].first(num_committed)
        seq.output_logprobs.append(logprob_block(positions))


def _keep_hidden_states(seq: Sequence, result: StepResult) -> None:
    """Keep the hidden states of new positions until the next event. A retracted sequence is
    computed again and brings back positions that it already had."""
    found = result.hidden_states.get(seq.seq_id)
    if found is None:
        return
    new = found.values[max(seq.num_hidden_states - found.start, 0) :]
    if len(new):
        seq.hidden_states.append(new.astype("<f4", copy=False).tobytes())
        seq.num_hidden_states += len(new)


def _keep_output_hidden_state(seq: Sequence, result: StepResult) -> None:
    """Keep the hidden state that the step's output token was sampled from."""
    found = result.hidden_states.get(seq.seq_id)
    if found is not None:
        seq.hidden_states.append(found.values[-1].astype("<f4", copy=False).tobytes())


def _end_of_prompt(seq: Sequence, result: StepResult) -> Finish | None:
    """How a sequence with max_new_tokens = 0 ends, once its last chunk is computed; None before."""
    if not seq.prefilled or seq.inflight_steps or seq.remaining > 0:
        return None
    if seq.request.options.pooling is not None:
        vector = result.embeddings[seq.seq_id]
        if not np.isfinite(vector).all():
            return NOT_FINITE
        seq.embedding = vector.astype("<f4", copy=False).tobytes()
    return Finish("length", length=0)
