"""Turns a request into a sequence, or refuses it on arrival: checks its priority and length."""

from __future__ import annotations

from array import array

import numpy as np

from setpoint.core.errors import RequestError
from setpoint.core.request import Request
from setpoint.core.settings import PrioritySettings, Settings
from setpoint.scheduler.scheduler_config import SchedulerConfig
from setpoint.scheduler.sequence import Sequence

UNLIMITED = 1 << 30
PRIORITY_DISABLED = (
    "Using priority is disabled for this server. Please send a new request without a priority."
)


def new_sequence(
    request: Request,
    config: SchedulerConfig,
    settings: Settings,
    *,
    seq_id: int,
    longest: int,
    page_size: int,
) -> Sequence:
    """Build the sequence of a request. Raises RequestError for one that can never be served.

    longest: tokens of the longest sequence that fits an otherwise empty pool. ``max_new_tokens`` is
    clipped so that this many tokens suffice for the prompt, the outputs, one spare page and one
    token, which is what admission demands (``PrefillBudget.judge``). So an admitted sequence can
    always finish, in the worst case after all others have given up their memory.
    """
    if (
        request.options.priority is not None
        and settings.priority is None
        and settings.refuse_priority
    ):
        raise RequestError(PRIORITY_DISABLED, status_code=503)
    prompt = request.prompt()
    num_input = len(prompt)
    if num_input == 0:
        raise RequestError("The prompt is empty.")
    outputs = array("i")
    outputs.frombytes(request.prior_output_ids)
    for ids in (prompt, request.prior_outputs()):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size):
            raise RequestError(f"A token id is outside the vocabulary of {config.vocab_size}.")
    if num_input + len(outputs) >= config.max_req_input_len:
        raise RequestError(
            f"Input length ({num_input + len(outputs)} tokens) exceeds the maximum allowed length"
            f" ({config.max_req_input_len - 1} tokens). Use a shorter input, or enable"
            " --allow-auto-truncate at the start."
        )
    wanted = (
        UNLIMITED if request.sampling.max_new_tokens is None else request.sampling.max_new_tokens
    )
    if config.role == "prefill":
        wanted = min(wanted, 1)
    limit = min(config.max_req_len, longest - page_size) - num_input - 1
    if limit < min(wanted, 1):
        raise RequestError(
            f"A prompt of {num_input} tokens leaves no room for output in a KV cache of"
            f" {longest} tokens."
        )
    stop_ids = config.eos_token_ids | frozenset(request.sampling.stop_token_ids)
    return Sequence(
        seq_id=seq_id,
        request=request,
        prompt=np.ascontiguousarray(prompt),
        max_new_tokens=min(wanted, limit),
        stop_ids=frozenset() if request.sampling.ignore_eos else stop_ids,
        urgency=urgency_of(request, settings.priority),
        outputs=outputs,
        num_prior=len(outputs),
        num_sent=len(outputs),
    )


def urgency_of(request: Request, rule: PrioritySettings | None) -> int:
    """The urgency of a request: larger is more urgent; always 0 without priority scheduling."""
    return 0 if rule is None else rule.urgency(request.options.priority)
