"""The result of a step: the sampled ids, any number per row, and what else was asked for about
them, such as logprobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from setpoint.core.request import Ids

EAGER = "eager"
"""The way in which every step can run: the model's own code, operation by operation. It is the
slowest."""

Floats = npt.NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class PositionLogprobs:
    """Logprobs of consecutive positions of one sequence.

    For k positions: ``values`` [k]; ``ids`` [k], the tokens they belong to;
    ``top_values``/``top_ids`` [k, top_logprobs_num]; ``picked`` [k, len(token_ids_logprob)]. A
    field that was not asked for has 0 columns.
    """

    values: Floats
    ids: Ids
    top_values: Floats
    top_ids: Ids
    picked: Floats

    def first(self, num_positions: int) -> PositionLogprobs:
        """The logprobs of the first ``num_positions`` of these positions."""
        if num_positions == len(self.ids):
            return self
        cut = slice(num_positions)
        return PositionLogprobs(
            self.values[cut],
            self.ids[cut],
            self.top_values[cut],
            self.top_ids[cut],
            self.picked[cut],
        )


@dataclass(slots=True, frozen=True)
class HiddenStates:
    """Hidden states of consecutive positions of one sequence, after the last norm."""

    start: int
    """The first position."""
    values: Floats
    """[positions, hidden size]."""


@dataclass(slots=True, frozen=True)
class StepResult:
    """The sampling rows of a plan, in the plan's row order, with the tokens sampled for them.

    The tokens of row i are ``token_ids[offsets[i] : offsets[i + 1]]``: none, or up to
    ``Rows.samples`` of them, its forced tokens first.
    """

    step_id: int
    seq_ids: npt.NDArray[np.int64]
    token_ids: Ids
    """Sampled and forced token ids. A negative id means that the logits of its position were not
    finite (NaN): the scheduler aborts the sequence."""
    offsets: Ids
    """[sampling rows + 1], beginning with 0; :func:`one_each` if every row brings back one
    token."""
    output_logprobs: Mapping[int, PositionLogprobs] = field(default_factory=dict)
    """seq_id -> one position for each token of its row; for sequences admitted with
    return_logprob."""
    prompt_logprobs: Mapping[int, PositionLogprobs] = field(default_factory=dict)
    """seq_id -> the prompt positions whose logprobs this step's chunk made known (position p needs
    the logits of p - 1)."""
    embeddings: Mapping[int, Floats] = field(default_factory=dict)
    """seq_id -> [hidden size], not normalised, for pooled sequences whose last prompt token this
    step computed."""
    hidden_states: Mapping[int, HiddenStates] = field(default_factory=dict)
    """seq_id -> hidden states of its row's tokens, for sequences that asked for them."""
    token_facts: Mapping[int, Mapping[str, bytes]] = field(default_factory=dict)
    """seq_id -> name -> the numbers about its row's sampled token, little-endian int32."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """seq_id -> the reason, for sequences that failed while the rest of the plan succeeded. Their
    ids and logprobs are meaningless."""
    forward_s: float = 0.0
    """Seconds that the device spent on the forward pass."""
    sample_s: float = 0.0
    way: str = EAGER
    """How the forward pass ran: "eager" (the model's own code, operation by operation), "replay"
    (from a recording of its operations) or "compiled" (by torch.compile)."""


def one_each(num_rows: int) -> Ids:
    """``StepResult.offsets`` for rows that bring back one token each: [num_rows + 1]."""
    return np.arange(num_rows + 1, dtype=np.int32)
