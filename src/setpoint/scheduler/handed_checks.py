"""What a decode server checks of what came with a prompt's pages, before it adopts it. The prefill
server has proved that it may send, but not that its numbers make sense."""

from __future__ import annotations

from collections.abc import Sequence as Numbers

from setpoint.core.handover import HandoverState
from setpoint.core.logprobs import LogprobBlock
from setpoint.core.request import MAX_SAMPLING_MASK, LogprobOptions, unpack_ids
from setpoint.scheduler.sequence import Sequence

OTHER_PROMPT = "the prefill server has handed over another prompt's tokens"
FORBIDDEN = "the prefill server has sampled a token that the request's grammar does not allow"
MOST_ROUNDING = 1e-3
"""A logprob may be above 0 by so much."""


def what_is_wrong(seq: Sequence, handed: HandoverState, vocab_size: int) -> str:
    """Why this cannot belong to the sequence; "" if it can."""
    ids, options = handed.ids, seq.request.options
    if handed.num_prompt != len(seq.prompt) or len(ids) != min(1, seq.max_new_tokens):
        return OTHER_PROMPT
    if any(token >= vocab_size for token in ids):
        return "the prefill server has sampled a token that the model does not have"
    if seq.request.sampling.min_new_tokens and any(token in seq.stop_ids for token in ids):
        return "the prefill server has ended the answer before min_new_tokens"
    given = seq.request.sampling.sampling_seed is not None
    if given and handed.seed != seq.request.seed:
        return "the prefill server has used another seed"
    if not handed.num_from_host <= handed.num_loaded <= handed.num_cached <= handed.num_prompt:
        return "the prefill server counts more cached tokens than the prompt has"
    if not _fits(handed.logprobs, options.logprobs, ids, vocab_size):
        return "the prefill server has sent impossible logprobs"
    if not all(
        name in options.token_facts and _are_facts(facts, len(ids), vocab_size)
        for name, facts in handed.token_facts.items()
    ):
        return "the prefill server has sent impossible facts about its token"
    return ""


def is_forbidden(seq: Sequence, handed: HandoverState) -> bool:
    """Whether the sequence's grammar, which is ready, does not allow a token."""
    if seq.grammar is None:
        return False
    try:
        return not all(map(seq.grammar.allows, handed.ids))
    except Exception:  # it ends the sequence with its reason when it gets the token
        return False


def _fits(
    block: LogprobBlock | None, asked: LogprobOptions | None, ids: list[int], vocab_size: int
) -> bool:
    """Whether these are logprobs of the tokens, as they were asked for."""
    if asked is None or not ids:
        return block is None
    if block is None or block.ids != ids:
        return False
    num = len(ids)
    columns = block.values, block.top_values, block.top_ids, block.picked
    return (
        all(len(each) == num for each in columns)
        and _are_logprobs(block.values)
        and all(len(row) <= asked.top and _are_logprobs(row) for row in block.top_values)
        and all(
            len(row) == len(values) and all(0 <= token < vocab_size for token in row)
            for row, values in zip(block.top_ids, block.top_values, strict=True)
        )
        and all(len(row) == len(asked.ids) and _are_logprobs(row) for row in block.picked)
    )


def _are_logprobs(values: Numbers[float]) -> bool:
    return all(value <= MOST_ROUNDING for value in values)  # False for NaN


def _are_facts(facts: list[bytes], num_tokens: int, vocab_size: int) -> bool:
    """Whether these are ids of the vocabulary about each token."""
    if len(facts) != num_tokens:
        return False
    for data in facts:
        if len(data) % 4 or len(data) > 4 * MAX_SAMPLING_MASK:
            return False
        ids = unpack_ids(data)
        if not ((ids >= 0) & (ids < vocab_size)).all():
            return False
    return True
