"""Hidden states in answers: whether a request may have them, and their shape as lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from setpoint.core.errors import RequestError
from setpoint.core.request import Request
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.jobs import SequenceOutput

MAX_NUMBERS = 1 << 20
"""Most numbers of hidden states that the answers to one client request may hold together: some 20
MB of JSON."""
NOT_ENABLED = (
    "The server is not configured to return the hidden states. Please set"
    " `--enable-return-hidden-states` to enable this feature."
)


def check_hidden_states(requests: Sequence[Request], config: FrontendConfig) -> None:
    """Raise RequestError (400) if hidden states are asked for and not enabled, or too many."""
    total = sum(_most_states(request, config) for request in requests)
    if not total:
        return
    if config.hidden_size is None:
        raise RequestError(NOT_ENABLED)
    total *= config.hidden_size
    if total > MAX_NUMBERS:
        raise RequestError(
            f"return_hidden_states: the answer could have {total} numbers ({config.hidden_size} for"
            f" each token); at most {MAX_NUMBERS} are allowed. Lower max_new_tokens, or send"
            " shorter prompts."
        )


def _most_states(request: Request, config: FrontendConfig) -> int:
    """The most hidden states that a request's answer may have."""
    if not request.options.hidden_states:
        return int(request.options.output_hidden_states)
    num_prompt, wanted = len(request.prompt_ids) // 4, request.sampling.max_new_tokens
    return config.context_len if wanted is None else num_prompt + wanted


def hidden_states(output: SequenceOutput, size: int) -> list[list[list[float]] | list[float]]:
    """One entry for each step of a finished output: first the list of the prompt's hidden states,
    then that of each output token but the last."""
    num_tokens = output.num_prompt + max(output.num_outputs - 1, 0)
    states = np.frombuffer(b"".join(output.hidden_states), "<f4").reshape(-1, size)[:num_tokens]
    return [states[: output.num_prompt].tolist(), *states[output.num_prompt :].tolist()]


def last_hidden_state(output: SequenceOutput) -> list[float]:
    """The hidden state that the last output token was sampled from; empty if that was the prompt's
    last, as in SGLang."""
    if output.num_outputs < 2 or not output.hidden_states:
        return []
    numbers: list[float] = np.frombuffer(output.hidden_states[-1], "<f4").tolist()
    return numbers
