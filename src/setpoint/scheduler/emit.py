"""Turns committed tokens into the events that leave the scheduler: decides when a sequence ends,
and when its tokens are sent."""

from __future__ import annotations

from setpoint.core.logprobs import LogprobBlock
from setpoint.core.messages import Finish, Timing, TokenEvent
from setpoint.core.records import RequestDone
from setpoint.core.result import PositionLogprobs
from setpoint.scheduler.sequence import Sequence

NON_STREAM_INTERVAL = 50
"""Tokens between emissions of a request that does not stream (SGLANG_FORCE_STREAM_INTERVAL's
default)."""

NOT_FINITE = Finish(
    "abort", message="NaN happened", status_code=500, err_type="InternalServerError"
)
"""How a sequence with logits that are not finite ends."""

GRAMMAR_ENDED = Finish("stop")


def finish_after(seq: Sequence, token: int, *, grammar_ended: bool) -> Finish | None:
    """How the sequence ends with the token just committed, or None; the tests are in SGLang's order
    (docs/sglang/scheduling.md#finish-tests).

    The frontend tests for stop strings.
    """
    if token in seq.stop_ids:
        return Finish("stop", matched=token)
    if seq.remaining <= 0:
        return Finish("length", length=len(seq.outputs))
    if grammar_ended:
        return GRAMMAR_ENDED
    return None


def is_due(seq: Sequence, stream_interval: int) -> bool:
    """Whether unsent outputs should be sent now: the first at once, then at every interval, and the
    rest at the end.

    Requests with stop strings or expressions are sent as if they streamed, because only the
    frontend can find them.
    """
    unsent = len(seq.outputs) - seq.num_sent
    if seq.finish is not None or (unsent > 0 and seq.num_sent == seq.num_prior):
        return True
    if not seq.request.options.stream and not seq.request.sampling.has_text_stops:
        return unsent >= NON_STREAM_INTERVAL
    return unsent >= (seq.request.sampling.stream_interval or stream_interval)


def token_event(seq: Sequence, now: float) -> TokenEvent:
    """An event with all unsent outputs, which count as sent from now on."""
    ids = seq.outputs[seq.num_sent :].tolist()
    is_first = seq.num_sent == seq.num_prior
    seq.num_sent = len(seq.outputs)
    event = TokenEvent(
        seq_id=seq.seq_id,
        ids=ids,
        finish=seq.finish,
        num_prompt=len(seq.prompt),
        num_outputs=len(seq.outputs),
        num_cached=seq.num_cached,
        num_retractions=seq.num_retractions,
        num_loaded=min(seq.num_loaded, seq.num_cached),
        num_from_host=min(seq.num_from_host, seq.num_cached),
        output_logprobs=joined_logprobs(seq),
        prompt_logprobs=_concatenate(seq.prompt_logprobs) if seq.prompt_logprobs else None,
        embedding=seq.embedding,
        hidden_states=b"".join(seq.hidden_states) if seq.hidden_states else b"",
        token_facts=seq.token_facts,
        timing=_timing(seq, now) if is_first else None,
    )
    if seq.request.options.logprobs is not None:
        seq.output_logprobs, seq.prompt_logprobs = [], []
    if seq.hidden_states:
        seq.hidden_states = []
    if seq.token_facts:
        seq.token_facts = {}
    return event


def joined_logprobs(seq: Sequence) -> LogprobBlock | None:
    """The logprobs of the outputs that were not sent yet."""
    return _concatenate(seq.output_logprobs) if seq.output_logprobs else None


def _timing(seq: Sequence, now: float) -> Timing | None:
    if seq.accepted_at is None or seq.admitted_at is None:
        return None
    began = now if seq.first_token_at is None else seq.first_token_at
    return Timing(seq.admitted_at - seq.accepted_at, began - seq.admitted_at)


def request_done(seq: Sequence, ended_at: float) -> RequestDone:
    """The RequestDone of a sequence whose ``finish`` is set."""
    assert seq.finish is not None
    return RequestDone(
        seq_id=seq.seq_id,
        rid=seq.rid,
        finish=seq.finish,
        num_prompt=len(seq.prompt),
        num_cached=seq.num_cached,
        num_outputs=len(seq.outputs) - seq.num_prior,
        num_retractions=seq.num_retractions,
        accepted_at=seq.accepted_at,
        admitted_at=seq.admitted_at,
        first_token_at=seq.first_token_at,
        ended_at=ended_at,
    )


def logprob_block(positions: PositionLogprobs) -> LogprobBlock:
    return LogprobBlock(
        positions.values.tolist(),
        positions.ids.tolist(),
        positions.top_values.tolist(),
        positions.top_ids.tolist(),
        positions.picked.tolist(),
    )


def _concatenate(blocks: list[LogprobBlock]) -> LogprobBlock:
    if len(blocks) == 1:
        return blocks[0]
    return LogprobBlock(
        [value for block in blocks for value in block.values],
        [token for block in blocks for token in block.ids],
        [row for block in blocks for row in block.top_values],
        [row for block in blocks for row in block.top_ids],
        [row for block in blocks for row in block.picked],
    )
