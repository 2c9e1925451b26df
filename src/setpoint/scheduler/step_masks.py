"""The token masks of a step's constrained rows, made while its forward pass runs."""

from __future__ import annotations

import numpy as np

from setpoint.core.errors import RequestError
from setpoint.core.failures import failure_finish, log_failure, refusal_finish
from setpoint.core.grammar import EndOfOutput, NotReady
from setpoint.core.messages import Finish
from setpoint.core.plan import StepPlan, TokenMasks, forbid
from setpoint.core.records import GrammarLate, Observer
from setpoint.core.request import Ids
from setpoint.scheduler.emit import GRAMMAR_ENDED
from setpoint.scheduler.scheduler_config import SchedulerConfig
from setpoint.scheduler.sequence import Sequence
from setpoint.scheduler.state import StepDraft

NO_TOKEN = "The grammar allows no token of this model's vocabulary next."
NO_TOKEN_YET = (
    "min_new_tokens forbids every token that the grammar allows next. Lower it, or ask for fewer"
    " stop_token_ids."
)


def token_masks(
    step: StepDraft, plan: StepPlan, config: SchedulerConfig, observer: Observer
) -> TokenMasks | None:
    """The masks of the step's constrained rows, for the position after the tokens committed so far
    and the row's forced ones; None if no row is constrained. A sequence that has no allowed token,
    or whose grammar raises, ends with the step (``StepDraft.ends``). A sequence whose grammar is
    not ready leaves the batch with the step (``Sequence.is_late``)."""
    rows = plan.rows
    wanted = [
        (seq, num_forced)
        for seq, samples, num_forced in zip(
            step.seqs, rows.samples.tolist(), rows.num_forced.tolist(), strict=True
        )
        if samples and seq.grammar is not None and seq.finish is None and not seq.is_late
    ]
    if not wanted:
        return None
    words = np.zeros((len(wanted), -(-config.vocab_size // 32)), np.int32)
    for (seq, num_forced), row in zip(wanted, words, strict=True):
        try:
            end = _fill(seq, row, num_forced, config)
        except NotReady:
            end, seq.is_late = None, True
            observer.on(GrammarLate(seq.rid, seq.seq_id, True))
        if end is not None:
            step.ends[seq.seq_id] = end
        if end is not None or seq.is_late:
            row[:] = -1  # allow every token, because it will be discarded
    return TokenMasks(np.array([seq.slot for seq, _ in wanted], np.int32), words)


def _fill(seq: Sequence, row: Ids, num_forced: int, config: SchedulerConfig) -> Finish | None:
    """Write a sequence's mask. Returns how the sequence ends if no token may be sampled."""
    assert seq.grammar is not None
    try:
        seq.grammar.fill_mask(row, num_forced)
    except NotReady:
        raise
    except Exception as error:
        return grammar_failure(error)
    if not row.any():
        return refusal_finish(RequestError(NO_TOKEN))
    num_outputs = len(seq.outputs) + num_forced
    if not seq.stop_ids or num_outputs >= seq.request.sampling.min_new_tokens:
        return None
    # The executor masks the stop ids as well, and a row must have an allowed token. If only a stop
    # id is left, an output that may end here ends, although it is shorter than was asked for.
    is_complete = any(
        row.view(np.uint32)[token // 32] >> token % 32 & 1 for token in config.eos_token_ids
    )
    forbid(row, seq.stop_ids)
    if row.any():
        return None
    return GRAMMAR_ENDED if is_complete else refusal_finish(RequestError(NO_TOKEN_YET))


def grammar_failure(error: Exception) -> Finish:
    """How a sequence ends after its grammar raised ``error``."""
    if isinstance(error, EndOfOutput):
        return error.finish
    if isinstance(error, RequestError):
        return refusal_finish(error)
    return failure_finish(log_failure("its grammar", error))
