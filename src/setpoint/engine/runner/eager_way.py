"""The way that takes every step: the model's own code, operation by operation."""

from __future__ import annotations

import torch

from setpoint.core.result import EAGER
from setpoint.engine.layers.context import Backends
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.forward_pass import ForwardPass
from setpoint.engine.runner.way import Ran


class EagerWay:
    """Implements ``runner.way.Way``."""

    name = EAGER
    num_bytes = 0

    def __init__(
        self, forward_pass: ForwardPass, backends: Backends, head: Backends | None = None
    ) -> None:
        """head: the backends that compute the logits, if the head is measured separately."""
        self._pass = forward_pass
        self._backends = backends
        self._head = backends if head is None else head

    def takes(self, batch: ForwardBatch) -> bool:
        return True

    def run(self, batch: ForwardBatch, *, with_logits: bool) -> Ran:
        inputs = self._pass.inputs(batch)
        if not batch.num_tokens:
            return Ran(self, self._pass.accompany(inputs, self._backends), None)
        hidden = self._pass.hidden(inputs, self._backends)
        index = self._pass.sample_index(batch) if with_logits else None
        answer = None if index is None else self._pass.answer(hidden, index, self._head)
        return Ran(self, hidden, answer)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._pass.logits(hidden, self._head)
