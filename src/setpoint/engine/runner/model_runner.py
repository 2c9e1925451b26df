"""Runs plans on one device: applies them to the slots, runs the model, samples. Enqueues work and never waits for the device.

Knows nothing of executors, results on the host or timings; ``engine.executor`` adds those.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from setpoint.core.model import ModelSpec
from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.engine.attention.base import AttentionBackend, AttentionBatch
from setpoint.engine.kernels.device import reading_is_free
from setpoint.engine.kernels.ops import KernelsUnavailable, Ops
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.runner.batch import ForwardBatch, build_batch
from setpoint.engine.runner.captured import CapturedForward
from setpoint.engine.runner.kv_pool import KVPool
from setpoint.engine.runner.pooling import Pooled, Pooler
from setpoint.engine.runner.rows import SlotTable
from setpoint.engine.sampling.logprobs import Logprobs, prompt_logprobs
from setpoint.engine.sampling.sampler import Sampled, joined, masks_of, sample
from setpoint.planning.memory import LOGITS_ROWS


@dataclass(slots=True, frozen=True)
class LoadReport:
    """What start-up tells about the engine; written once by ``executor.build``."""

    load_seconds: float
    weight_bytes: int
    weights: str
    """Their dtype; where a GGUF's blocks are kept, how many matrices of which kind."""
    model_impl: str
    """"setpoint" or "transformers": whose model code runs."""
    ops: str
    linear: str
    attention: str
    fallbacks: tuple[str, ...]
    """One sentence per better implementation that was passed over, with the reason."""


@dataclass(slots=True, frozen=True)
class Forward:
    """A forward pass on its way; the tensors are still on the device, those of a replayed step only until the next one."""

    plan: StepPlan
    batch: ForwardBatch | None
    """None for a plan without rows."""
    hidden: torch.Tensor | None
    """[S, H] of the sampling rows; None when no row samples."""
    logits: torch.Tensor | None
    """[S, V]; None when no row samples, or when they are so many that ``sample`` computes them block by block."""
    prompt_logprobs: dict[int, Logprobs]
    """By row index."""
    pooled: Pooled | None = None


class ModelRunner:
    """Contract: ``allocate`` once, then per step ``forward`` and, before the next step's ``forward``, ``sample``."""

    def __init__(
        self,
        *,
        model: nn.Module,
        spec: ModelSpec,
        ops: Ops,
        attention: AttentionBackend,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        report: LoadReport,
        capture: bool = True,
    ) -> None:
        self.model = model
        self.spec = spec
        self.ops = ops
        self.attention = attention
        self.page_size = page_size
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.device = device
        self.report = report
        self.capture = capture
        self._timing = False
        self.why_eager = "" if capture else "it is switched off"
        """Why steps, or only their logits, are not replayed; empty if they are. Written by ``allocate``."""

    def allocate(self, *, num_pages: int, max_slots: int, context_len: int) -> None:
        """Claim the KV pool and the slot table. OutOfMemoryError if there is no room."""
        self.pool = KVPool(self.spec, num_pages=num_pages, page_size=self.page_size, dtype=self.kv_dtype, device=self.device)
        self.slots = SlotTable(context_len=context_len, page_size=self.page_size, max_slots=max_slots, device=self.device)
        self.pooler = Pooler()
        wide = torch.promote_types(self.dtype, torch.float32)
        self.cos_sin = tuple(rotary.table(context_len, wide, self.device) for rotary in self.model.rotaries)
        self._capture()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forward:
        self.slots.release(plan.releases)
        self.slots.admit(plan.admits)
        self.pooler.release(plan.releases)
        self.pooler.admit(plan.admits)
        self.slots.map_pages(plan.pages)
        if not len(plan.rows):
            return Forward(plan, None, None, None, {})
        batch = build_batch(plan.rows, self.slots, self.page_size)
        hidden, last, logits = self._compute(batch)
        pooled = self.pooler.pool(plan.rows, batch, hidden, self.slots.columns)
        return Forward(plan, batch, last, logits, self._prompt_logprobs(plan, batch, hidden), pooled)

    def _compute(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """-> hidden states [T, C]; then ``Forward.hidden`` and ``Forward.logits``."""
        num_sampling = len(batch.sample_slots)
        with_logits = 0 < num_sampling <= LOGITS_ROWS
        last = logits = None
        if self.captured is not None and self.captured.takes(batch):
            if not self.captured.is_for(self.slots.pages):
                self._capture()
            hidden, last, logits = self.captured.run(batch, with_logits=with_logits)
        else:
            hidden = self.model(batch.input_ids, self._context(batch.attention))
        if num_sampling and last is None:
            last = hidden[batch.sample_index]
        if with_logits and logits is None:
            logits = self.model.logits(last)
        return hidden, last, logits

    def _context(self, batch: AttentionBatch) -> ForwardContext:
        return ForwardContext(self.ops, self.attention, batch, self.cos_sin, self.pool.layers)

    @torch.inference_mode()
    def _capture(self) -> None:
        """So that small steps are replayed from now on; ``why_eager`` says what is not."""
        self.captured = None
        if not self.capture:
            return
        try:
            self.captured = CapturedForward(self.model, self._context, self.slots.pages, with_head=self.spec.pooling is None)
        except (NotCapturable, KernelsUnavailable) as reason:
            self.why_eager = str(reason)
        else:
            self.why_eager = self.captured.why_eager_head
            if self._timing:
                self.captured.program.start_timing()

    def start_timing(self) -> None:
        """Measure the kernels of replayed steps from now on."""
        self._timing = True
        if self.captured is not None:
            self.captured.program.start_timing()

    def take_times(self) -> dict[str, float]:
        """Seconds per kind of kernel (``kernels.program.KINDS``) in replayed steps since the last look; empty if none are replayed.

        Measurements end when the slot table grows, and begin anew.
        """
        return {} if self.captured is None else self.captured.program.take_times()

    @torch.inference_mode()
    def sample(self, forward: Forward, masks: TokenMasks | None) -> Sampled | None:
        """Sample the plan's sampling rows and append the tokens to their slots; None when there are none."""
        if forward.hidden is None:
            return None
        slots = forward.batch.sample_slots
        blocks = []
        for begin in range(0, len(slots), LOGITS_ROWS):
            block = slice(begin, begin + LOGITS_ROWS)
            logits = self.model.logits(forward.hidden[block]) if forward.logits is None else forward.logits
            rows = self.slots.sampling_rows(slots[block])
            blocks.append(sample(logits, rows, masks_of(masks, slots[block]), peek=reading_is_free(self.device)))
        sampled = joined(blocks)
        self.slots.append(slots, sampled.ids)
        return sampled

    def _prompt_logprobs(self, plan: StepPlan, batch: ForwardBatch, hidden: torch.Tensor) -> dict[int, Logprobs]:
        """Of the rows whose chunk makes wanted prompt positions known: position p needs the hidden state of p - 1."""
        found = {}
        columns = self.slots.columns[plan.rows.slots]
        for row in np.flatnonzero(columns["logprob_start"] >= 0).tolist():
            start, slot = int(batch.starts[row]), int(plan.rows.slots[row])
            begin = max(start + 1, int(columns["logprob_start"][row]))
            end = min(start + int(plan.rows.counts[row]) + 1, int(columns["num_prompt"][row]))
            if begin >= end:
                continue
            first = int(batch.attention.cu_q_host[row]) - start - 1
            lists = self.slots.lists.get(slot)
            found[row] = prompt_logprobs(
                hidden[first + begin : first + end],
                self.slots.ids[slot, begin:end],
                self.model.logits,
                num_top=int(columns["num_top"][row]),
                picked=np.zeros(0, np.int64) if lists is None else lists.picked,
            )
        return found
