"""The forward pass of a step, operation by operation: the model and the tensors that it reads and
writes in every step.

Every way to run a step is built on it (``runner.way``). Knows nothing of plans or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from setpoint.core.graph_sizes import NO_GRAPHS, GraphSizes
from setpoint.core.request import Ids
from setpoint.engine.attention.attention_backend import AttentionBatch
from setpoint.engine.kernels.device import SharedTensor, to_device
from setpoint.engine.layers.context import Backends, ForwardContext
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.kv_pool import KVPool
from setpoint.engine.runner.rows import SlotTable
from setpoint.engine.runner.step_block import StepBlock


@dataclass(slots=True, frozen=True)
class Inputs:
    """The rows of a step as in ``AttentionBatch``, on the device and on the host."""

    num_tokens: int
    """T, the tokens of the step."""
    slots: torch.Tensor
    cu_q: torch.Tensor
    kv_lens: torch.Tensor
    cu_q_host: Ids
    kv_lens_host: Ids


@dataclass(slots=True, frozen=True)
class StepLogits:
    """Results for the S sampling rows. The content of rows after the first S is undefined. On
    another rank than 0 there are only that rank's logits, and no best tokens."""

    logits: torch.Tensor
    """[>= S, V]."""
    best: SharedTensor
    """[>= S] int64: ``Ops.best_tokens`` of these logits."""


@dataclass(slots=True, frozen=True)
class ForwardPass:
    """Written once by ``ModelRunner.allocate``."""

    model: Any
    slots: SlotTable
    """Holds new tensors after it has grown."""
    pool: KVPool
    cos_sin: tuple[torch.Tensor, ...]
    """The rotary tables, as in ForwardContext."""
    page_size: int
    no_tokens: torch.Tensor
    """[0, H]: hidden states of a step without tokens."""
    device: torch.device
    block: StepBlock | None = None
    """Sends steps to the device; None on the CPU."""
    graph_sizes: GraphSizes = NO_GRAPHS
    """The sizes of the graphs that may be captured, on a device that has graphs."""

    def inputs(self, batch: ForwardBatch) -> Inputs:
        """The batch's rows on the device; what else the step needs is sent there too."""
        arrays = (batch.slots, batch.cu_q, batch.kv_lens)
        if self.block is None:
            tensors = [to_device(array, self.device) for array in arrays]
        else:
            self.send(batch, len(batch.slots))
            rows = self.block.rows
            tensors = [
                tensor[: len(array)]
                for tensor, array in zip((rows.slots, rows.cu_q, rows.kv_lens), arrays, strict=True)
            ]
        return Inputs(batch.num_tokens, *tensors, batch.cu_q, batch.kv_lens)

    def send(self, batch: ForwardBatch, num_rows: int) -> None:
        """Send the batch, as a step of ``num_rows`` rows, to a device that is not the CPU."""
        sampling = self.slots.sampling_rows(batch.sample_slots)
        self.block.send(batch, sampling, num_rows=num_rows, padding_slot=self.slots.padding_slot)

    def sample_index(self, batch: ForwardBatch) -> torch.Tensor:
        """``ForwardBatch.sample_index`` [S] of the batch that was sent last, on the device."""
        if self.block is None:
            return to_device(batch.sample_index, self.device)
        return self.block.rows.sample_index[: len(batch.sample_index)]

    @torch.inference_mode()
    def begin(self, inputs: Inputs, backends: Backends) -> tuple[torch.Tensor, ForwardContext]:
        """The arguments of the model's call: the ids [T] and the context. Attention is prepared
        for the step's rows."""
        ids, positions, kv_index = self._place(inputs, self.slots.tables()[0], backends)
        first = AttentionBatch(
            positions=positions,
            kv_index=kv_index,
            cu_q=inputs.cu_q,
            cu_q_host=inputs.cu_q_host,
            kv_lens=inputs.kv_lens,
            kv_lens_host=inputs.kv_lens_host,
            slots=inputs.slots,
            page_table=self.slots.tables()[0],
        )
        batches = [first]
        for group, table in enumerate(self.slots.tables()[1:], 1):
            kv_index = self._place(inputs, table, backends)[2]
            batches.append(replace(first, kv_index=kv_index, page_table=table, group=group))
        if inputs.num_tokens:
            for batch in batches:
                backends.attention.prepare(batch)
        return ids, ForwardContext(
            backends.ops,
            backends.attention,
            backends.multiply,
            backends.multiply_grouped,
            backends.group,
            backends.data,
            tuple(batches[group] for group in self.pool.group_of),
            self.cos_sin,
            self.pool.layers,
        )

    def _place(
        self, inputs: Inputs, page_table: torch.Tensor, backends: Backends
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return backends.ops.place_tokens(
            inputs.slots,
            inputs.cu_q,
            inputs.kv_lens,
            self.slots.ids.tensor,
            page_table,
            self.page_size,
            inputs.num_tokens,
        )

    @torch.inference_mode()
    def hidden(self, inputs: Inputs, backends: Backends) -> torch.Tensor:
        """Hidden states of the step's tokens, [T, H]."""
        return self.model(*self.begin(inputs, backends))

    @torch.inference_mode()
    def accompany(self, inputs: Inputs, backends: Backends) -> torch.Tensor:
        """``hidden`` of a step without tokens: only layers of experts exchange anything."""
        _, ctx = self.begin(inputs, backends)
        for module in self.model.modules():
            if hasattr(module, "expert_slots"):
                module(self.no_tokens, ctx)
        return self.no_tokens

    @torch.inference_mode()
    def answer(
        self, hidden: torch.Tensor, sample_index: torch.Tensor, backends: Backends
    ) -> StepLogits:
        """Logits and best tokens of the sampling rows: hidden [>= T, H], sample_index [S] int32."""
        last = backends.ops.embedding(sample_index, hidden, 1.0)
        logits = self.model.logits(last, backends)
        if backends.group.rank:
            return StepLogits(logits, SharedTensor(torch.empty(1, dtype=torch.int64)))
        return StepLogits(logits, SharedTensor(backends.ops.best_tokens(logits)))

    def logits(self, hidden: torch.Tensor, backends: Backends) -> torch.Tensor:
        """Logits that are not part of a step: hidden [S, H] -> [S, V]."""
        backends.group.before_logits(hidden)
        return self.model.logits(hidden, backends)
