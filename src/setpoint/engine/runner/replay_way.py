"""Records a step and replays it, on devices that can: the model's own code runs once, and later
steps run only its kernels.

The recorder decides what can be recorded (``kernels.program``). The tensors of the recording are
permanent: a step copies its inputs into their first rows and finds its results in the first rows of
the outputs, which the next step overwrites. One recording, of the largest step, serves all smaller
ones.
"""

from __future__ import annotations

import numpy as np
import torch

from setpoint.core.limits import CAPTURED_TOKENS, LOGITS_ROWS
from setpoint.engine.kernels.device import SharedTensor
from setpoint.engine.kernels.kernel_registry import make_recorder
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.layers.context import Backends
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.forward_pass import ForwardPass, Inputs, StepLogits
from setpoint.engine.runner.way import Ran


class ReplayWay:
    """Implements ``runner.way.CapturedWay`` and ``TimedWay``."""

    name = "replay"

    def __init__(self, forward_pass: ForwardPass, backends: Backends, *, with_head: bool) -> None:
        """with_head: whether the model has logits. Raises NotCapturable with the reason, and
        KernelsUnavailable on a device where nothing can be captured."""
        self._pass = forward_pass
        self._backends = backends
        self._with_head = with_head
        self._is_timed = False
        size = self._max_tokens = CAPTURED_TOKENS
        self._max_samples = min(size, LOGITS_ROWS)
        self._slots, self._kv_lens, self._cu_q, self._index = (
            SharedTensor(torch.zeros(length, dtype=torch.int32, device=forward_pass.device))
            for length in (size, size, size + 1, self._max_samples)
        )
        self._record()

    def takes(self, batch: ForwardBatch) -> bool:
        gathered = self._backends.data.num_gathered(batch.num_tokens)
        return batch.num_tokens <= self._max_tokens and gathered <= self._max_gathered

    def run(self, batch: ForwardBatch, *, with_logits: bool) -> Ran:
        if self._pass.slots.pages is not self._table:
            self._record()
        answer = self._answer if with_logits else None
        num_samples = 0 if answer is None else len(batch.sample_index)
        self._slots.fill(batch.slots)
        self._cu_q.fill(batch.cu_q)
        self._kv_lens.fill(batch.kv_lens)
        if num_samples:
            self._index.fill(batch.sample_index)
        self._program.run(
            tokens=batch.num_tokens,
            sequences=len(batch.slots),
            samples=num_samples,
            gathered=self._backends.data.num_gathered(batch.num_tokens),
        )
        if with_logits and answer is None:
            index = self._pass.sample_index(batch)
            answer = self._pass.answer(self._hidden, index, self._backends)
        return Ran(self, self._hidden, answer)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._pass.logits(hidden, self._backends)

    def start_timing(self) -> None:
        self._is_timed = True
        self._program.start_timing()

    def take_times(self) -> dict[str, float]:
        return self._program.take_times()

    def _record(self) -> None:
        self._table = self._pass.slots.pages
        recorder, size = make_recorder(self._pass.device), self._max_tokens
        host = np.zeros(size + 1, np.int32)
        slots, cu_q, kv_lens = self._slots.tensor, self._cu_q.tensor, self._kv_lens.tensor
        inputs = Inputs(size, slots, cu_q, kv_lens, host, host[1:])
        with recorder.recording():
            self._max_gathered = self._backends.data.num_gathered(size)
            self._hidden = self._pass.hidden(inputs, self._backends)
        self._answer: StepLogits | None = None
        self.why_partly_eager = ""
        if self._with_head:
            try:
                with recorder.recording("samples", products="head"):
                    self._answer = self._pass.answer(
                        self._hidden, self._index.tensor, self._backends
                    )
            except NotCapturable as reason:
                self.why_partly_eager = str(reason)
        self._program = recorder.program(
            tokens=size, sequences=size, samples=self._max_samples, gathered=self._max_gathered
        )
        self.num_bytes = self._program.num_bytes
        if self._is_timed:
            self._program.start_timing()
