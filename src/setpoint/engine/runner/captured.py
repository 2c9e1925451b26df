"""The forward pass of a step, captured once and replayed: the model's own code runs one time, its kernels then without it.

Works on any model and device: what can be recorded is the recorder's to say (``kernels.program``). Knows nothing of slots or sampling.

The tensors of the recording are permanent. A step copies its inputs into their first rows and finds the results in those of the
outputs, which the next step overwrites. One recording, at the largest step, serves all smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from setpoint.engine.attention.base import AttentionBatch
from setpoint.engine.kernels.program import NotCapturable, Program
from setpoint.engine.kernels.registry import make_recorder
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.runner.batch import ForwardBatch

MAX_TOKENS = 512
"""Of a step that is replayed. In larger ones the work outweighs the calls by far, and they would keep larger buffers."""


class CapturedForward:
    """Implements the model's part of a step for batches that ``takes`` accepts."""

    def __init__(
        self, model: nn.Module, context_of: Callable[[AttentionBatch], ForwardContext], page_table: torch.Tensor, *, with_head: bool
    ) -> None:
        """``with_head``: whether the model has logits. NotCapturable with the reason; KernelsUnavailable where nothing can be captured."""
        self._max_tokens = max_tokens = MAX_TOKENS
        self._page_table = page_table

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=page_table.device)

        host = np.zeros(max_tokens + 1, np.int32)
        self._ids, self._sample_index = zeros(max_tokens, torch.int32), zeros(max_tokens, torch.int32)
        self._batch = AttentionBatch(
            positions=zeros(max_tokens, torch.int64),
            kv_index=zeros(max_tokens, torch.int64),
            cu_q=zeros(max_tokens + 1, torch.int32),
            cu_q_host=host,
            kv_lens=zeros(max_tokens, torch.int32),
            kv_lens_host=host[:-1],
            slots=zeros(max_tokens, torch.int32),
            page_table=page_table,
        )
        self.program = self._record(model, context_of(self._batch), with_head)

    def _record(self, model: nn.Module, context: ForwardContext, with_head: bool) -> Program:
        recorder = make_recorder(self._page_table.device)
        with recorder.recording():
            self._hidden = model(self._ids, context)
        self._has_head, self.why_eager_head = with_head, ""
        if with_head:
            try:
                with recorder.recording("samples", "head"):
                    self._last = context.ops.embedding(self._sample_index, self._hidden, 1.0)
                    self._logits = model.logits(self._last)
            except NotCapturable as reason:
                self._has_head, self.why_eager_head = False, str(reason)
        return recorder.program({"tokens": self._max_tokens, "sequences": self._max_tokens, "samples": self._max_tokens})

    def takes(self, batch: ForwardBatch) -> bool:
        return len(batch.input_ids) <= self._max_tokens

    def is_for(self, page_table: torch.Tensor) -> bool:
        """False once the page table has grown into another tensor."""
        return page_table is self._page_table

    def run(self, batch: ForwardBatch, *, with_logits: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """-> hidden states [T, C]; of the sampling rows hidden states [S, C] and logits [S, V], or None, None without logits. All are
        overwritten by the next step."""
        num_tokens, num_rows, num_samples = len(batch.input_ids), len(batch.attention.slots), len(batch.sample_index)
        source, target = batch.attention, self._batch
        self._ids[:num_tokens] = batch.input_ids
        target.positions[:num_tokens] = source.positions
        target.kv_index[:num_tokens] = source.kv_index
        target.cu_q[: num_rows + 1] = source.cu_q
        target.kv_lens[:num_rows] = source.kv_lens
        target.slots[:num_rows] = source.slots
        with_logits = with_logits and self._has_head
        if with_logits:
            self._sample_index[:num_samples] = batch.sample_index
        self.program.run({"tokens": num_tokens, "sequences": num_rows, "samples": num_samples if with_logits else 0})
        hidden = self._hidden[:num_tokens]
        return (hidden, self._last[:num_samples], self._logits[:num_samples]) if with_logits else (hidden, None, None)
