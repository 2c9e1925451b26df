"""What a step brought back: sampled ids and, where asked for, their logprobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from setpoint.core.request import Ids

EAGER = "eager"
"""The way that every step can run, the slowest."""

Floats = npt.NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class PositionLogprobs:
    """Logprobs of consecutive positions of one sequence.

    For k positions: ``values`` [k]; ``ids`` [k], the tokens they belong to;
    ``top_values``/``top_ids`` [k, top_logprobs_num]; ``picked`` [k, len(token_ids_logprob)]
    (columns 0 wide where not asked for).
    """

    values: Floats
    ids: Ids
    top_values: Floats
    top_ids: Ids
    picked: Floats


@dataclass(slots=True, frozen=True)
class StepResult:
    """The sampling rows of a plan in the plan's row order, with what was sampled for them."""

    step_id: int
    seq_ids: npt.NDArray[np.int64]
    token_ids: Ids
    """A negative id means the logits of that row were not finite (NaN): the scheduler aborts the
    sequence."""
    output_logprobs: Mapping[int, PositionLogprobs] = field(default_factory=dict)
    """seq_id -> one position (the sampled token), for sequences admitted with return_logprob."""
    prompt_logprobs: Mapping[int, PositionLogprobs] = field(default_factory=dict)
    """seq_id -> the prompt positions that this step's chunk made known (position p needs the logits
    of p - 1)."""
    embeddings: Mapping[int, Floats] = field(default_factory=dict)
    """seq_id -> [hidden size], not normalised, for pooled sequences whose last prompt token this
    step computed."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """seq_id -> why, for sequences of the plan that failed alone: their ids and logprobs mean
    nothing."""
    forward_s: float = 0.0
    """Seconds the device was busy with the forward pass."""
    sample_s: float = 0.0
    way: str = EAGER
    """How the forward pass ran: "eager" (the model's own code, operation by operation), "replay"
    (from a recording) or "compiled" (by torch.compile)."""
