"""The forward pass of a step, captured once and replayed: the model's own code runs one time, its
kernels then without it.

Works on any model and device: what can be recorded is the recorder's to say (``kernels.program``).
Knows nothing of slots or sampling.

The tensors of the recording are permanent. A step copies its inputs into their first rows and finds
the results in those of the outputs, which the next step overwrites. One recording, at the largest
step, serves all smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from setpoint.core.request import Ids
from setpoint.engine.kernels.device import Shared
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.kernels.registry import make_recorder
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.planning.memory import CAPTURED_TOKENS, LOGITS_ROWS


@dataclass(slots=True, frozen=True)
class Answer:
    """What the S sampling rows come to; in a replayed step with the rows of an earlier one behind
    them."""

    logits: torch.Tensor
    """[>= S, V]."""
    best: Shared
    """[>= S] int64: ``Ops.best_tokens`` of the logits."""


class Forwarding(Protocol):
    """A runner's forward pass, of which both ways to run it are made."""

    def hidden_of(
        self,
        num_tokens: int,
        slots: torch.Tensor,
        cu_q: torch.Tensor,
        kv_lens: torch.Tensor,
        *hosts: Ids,
    ) -> torch.Tensor:
        """Rows as in ``AttentionBatch``, then cu_q and kv_lens on the host -> hidden states [T,
        H]."""
        ...

    def answer_of(self, hidden: torch.Tensor, sample_index: torch.Tensor) -> Answer:
        """hidden [>= T, H], sample_index [S] int32."""
        ...


class CapturedForward:
    """Runs the batches that ``takes`` accepts."""

    def __init__(self, forwarding: Forwarding, device: torch.device, *, with_head: bool) -> None:
        """``with_head``: whether the model has logits. NotCapturable with the reason;
        KernelsUnavailable where nothing can be captured."""
        self._max_tokens = size = CAPTURED_TOKENS
        samples = min(size, LOGITS_ROWS)
        inputs = (
            Shared(torch.zeros(length, dtype=torch.int32, device=device))
            for length in (size, size, size + 1, samples)
        )
        self._slots, self._kv_lens, self._cu_q, self._index = inputs
        recorder = make_recorder(device)
        host = np.zeros(size + 1, np.int32)
        with recorder.recording():
            self._hidden = forwarding.hidden_of(
                size, self._slots.tensor, self._cu_q.tensor, self._kv_lens.tensor, host, host[1:]
            )
        self._answer: Answer | None = None
        self.why_eager_head = ""
        """Why logits are not part of it; empty if they are, or if there are none."""
        if with_head:
            try:
                with recorder.recording("samples", products="head"):
                    self._answer = forwarding.answer_of(self._hidden, self._index.tensor)
            except NotCapturable as reason:
                self.why_eager_head = str(reason)
        self.program = recorder.program(tokens=size, sequences=size, samples=samples)

    def takes(self, batch: ForwardBatch) -> bool:
        return batch.num_tokens <= self._max_tokens

    def run(self, batch: ForwardBatch, *, with_logits: bool) -> tuple[torch.Tensor, Answer | None]:
        """-> hidden states [>= T, H], and the answer, of at most LOGITS_ROWS rows, if it is wanted
        and part of this. The next step overwrites them."""
        num_samples = 0 if self._answer is None or not with_logits else len(batch.sample_index)
        self._slots.fill(batch.slots)
        self._cu_q.fill(batch.cu_q)
        self._kv_lens.fill(batch.kv_lens)
        if num_samples:
            self._index.fill(batch.sample_index)
        self.program.run(tokens=batch.num_tokens, sequences=len(batch.slots), samples=num_samples)
        return self._hidden, self._answer if num_samples else None
