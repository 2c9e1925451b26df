"""Runs plans on one device: applies them to the slots, runs the model, samples. Enqueues work and
never waits for the device.

Knows nothing of executors, results on the host or timings; ``engine.executor`` adds those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from setpoint.core.failures import failure
from setpoint.core.model import ModelSpec
from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.request import Ids
from setpoint.core.result import EAGER, one_each
from setpoint.engine.attention.base import AttentionBackend, AttentionBatch
from setpoint.engine.kernels.device import Shared, reading_is_free, to_device
from setpoint.engine.kernels.ops import KernelsUnavailable, Ops
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.runner.batch import ForwardBatch, build_batch
from setpoint.engine.runner.captured import Answer, CapturedForward
from setpoint.engine.runner.claim_ahead import ClaimAhead
from setpoint.engine.runner.compiled import CompiledModel
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
    level: str
    """The instruction set that the C++ kernels are compiled for; empty if none of them runs."""
    fallbacks: tuple[str, ...]
    """One sentence per better implementation that was passed over, with the reason."""


@dataclass(slots=True, frozen=True)
class Forward:
    """A forward pass on its way; the tensors are still on the device, those of a replayed step only
    until the next one."""

    plan: StepPlan
    batch: ForwardBatch | None
    """None for a plan without rows."""
    answer: Answer | None = None
    """None when no row samples, or when they are so many that ``sample`` computes logits block by
    block."""
    hidden: torch.Tensor | None = None
    """[S, H] of the sampling rows where it does."""
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """By row index."""
    pooled: Pooled | None = None
    way: str = EAGER
    """As in StepResult."""
    failures: dict[int, str] = field(default_factory=dict)
    """As in StepResult; ``sample`` adds to it."""

    @property
    def logits(self) -> torch.Tensor | None:
        """[S, V], where there is an answer."""
        return None if self.answer is None else self.answer.logits[: len(self.batch.sample_slots)]


class ModelRunner:
    """Contract: ``allocate`` once, then per step ``forward`` and, before the next step's
    ``forward``, ``sample``."""

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
        """Why steps, or only their logits, are not replayed; empty if they are. Written by
        ``allocate``."""

    def allocate(self, *, num_pages: int, max_slots: int, context_len: int) -> None:
        """Claim the KV pool and the slot table. OutOfMemoryError if there is no room."""
        self.pool = KVPool(
            self.spec,
            num_pages=num_pages,
            page_size=self.page_size,
            dtype=self.kv_dtype,
            device=self.device,
        )
        self.claim_ahead = ClaimAhead(self.pool)
        self.slots = SlotTable(
            context_len=context_len,
            page_size=self.page_size,
            max_slots=max_slots,
            device=self.device,
        )
        self.pooler = Pooler()
        wide = torch.promote_types(self.dtype, torch.float32)
        self.cos_sin = tuple(
            rotary.table(context_len, wide, self.device) for rotary in self.model.rotaries
        )
        self._capture()

    @property
    def longest_row(self) -> int:
        """Tokens that a sequence can have, alone in the pool."""
        return min(self.slots.context_len, self.pool.num_tokens)

    def forward(self, plan: StepPlan) -> Forward:
        self.slots.release(plan.releases)
        failures = self.slots.admit(plan.admits)
        self.pooler.release(plan.releases)
        self.pooler.admit(plan.admits)
        self.slots.map_pages(plan.pages)
        self.claim_ahead.hand_out(plan.pages.pages)
        if not len(plan.rows):
            return Forward(plan, None, failures=failures)
        batch = build_batch(plan.rows, self.slots)
        num_sampling = len(batch.sample_slots)
        hidden, answer, way = self._compute(batch, with_logits=0 < num_sampling <= LOGITS_ROWS)
        pooled = self.pooler.pool(plan.rows, batch, hidden, self.slots.columns)
        prompt = (
            self._prompt_logprobs(plan, batch, hidden, failures)
            if self.slots.any_special(batch.slots)
            else {}
        )
        sampling = (
            hidden[to_device(batch.sample_index, self.device)]
            if num_sampling and answer is None
            else None
        )
        return Forward(plan, batch, answer, sampling, prompt, pooled, way, failures)

    def _compute(
        self, batch: ForwardBatch, *, with_logits: bool
    ) -> tuple[torch.Tensor, Answer | None, str]:
        """-> hidden states [>= T, H]; with logits, what the sampling rows come to;
        ``Forward.way``."""
        way = EAGER
        if self.captured is not None and self.captured.takes(batch):
            way = "replay"
            if self.slots.pages is not self._captured_table:
                self._capture()
            hidden, answer = self.captured.run(batch, with_logits=with_logits)
        else:
            tensors = (
                to_device(array, self.device) for array in (batch.slots, batch.cu_q, batch.kv_lens)
            )
            hidden, answer = (
                self.hidden_of(batch.num_tokens, *tensors, batch.cu_q, batch.kv_lens),
                None,
            )
            if isinstance(self.model, CompiledModel) and self.model.takes(batch.num_tokens):
                way = "compiled"
        if with_logits and answer is None:
            answer = self.answer_of(hidden, to_device(batch.sample_index, self.device))
        return hidden, answer, way

    @torch.inference_mode()
    def hidden_of(
        self,
        num_tokens: int,
        slots: torch.Tensor,
        cu_q: torch.Tensor,
        kv_lens: torch.Tensor,
        cu_q_host: Ids,
        kv_lens_host: Ids,
    ) -> torch.Tensor:
        """Part of ``captured.Forwarding``."""
        table = self.slots
        ids, positions, kv_index = self.ops.place_tokens(
            slots, cu_q, kv_lens, table.ids.tensor, table.pages.tensor, self.page_size, num_tokens
        )
        batch = AttentionBatch(
            positions=positions,
            kv_index=kv_index,
            cu_q=cu_q,
            cu_q_host=cu_q_host,
            kv_lens=kv_lens,
            kv_lens_host=kv_lens_host,
            slots=slots,
            page_table=table.pages.tensor,
        )
        return self.model(
            ids, ForwardContext(self.ops, self.attention, batch, self.cos_sin, self.pool.layers)
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] -> [S, V]."""
        return self.model.logits(hidden, self.ops)

    @torch.inference_mode()
    def answer_of(self, hidden: torch.Tensor, sample_index: torch.Tensor) -> Answer:
        """Part of ``captured.Forwarding``."""
        last = self.ops.embedding(sample_index, hidden, 1.0)
        logits = self.logits(last)
        return Answer(logits, Shared(self.ops.best_tokens(logits)))

    def _capture(self) -> None:
        """So that small steps are replayed from now on, as long as the slot table does not grow;
        ``why_eager`` says what is not."""
        self.captured, self._captured_table = None, self.slots.pages
        if not self.capture:
            return
        try:
            self.captured = CapturedForward(self, self.device, with_head=self.spec.pooling is None)
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
        """Seconds per kind of kernel (``kernels.program.KINDS``) in replayed steps since the last
        look; empty if none are replayed.

        Measurements end when the slot table grows, and begin anew.
        """
        return {} if self.captured is None else self.captured.program.take_times()

    def sample(self, forward: Forward, masks: TokenMasks | None) -> Sampled | None:
        """Sample the plan's sampling rows and append the tokens to their slots; None when there are
        none."""
        if forward.batch is None or not len(forward.batch.sample_slots):
            return None
        slots, answer = forward.batch.sample_slots, forward.answer
        if answer is None or masks is not None or self.slots.any_special(slots):
            sampled = self._choose(forward, slots, masks)
        else:
            sampled = Sampled(answer.best, None)
        self.slots.append(slots, sampled.ids, one_each(len(slots)))
        return sampled

    @torch.inference_mode()
    def _choose(self, forward: Forward, slots: Ids, masks: TokenMasks | None) -> Sampled:
        """The sampler's choice. If it raises, each row is tried alone; those that raise then fail,
        and the others are sampled without."""
        try:
            return self._sample(forward, slots, masks)
        except Exception:
            if not self._fail_culprits(forward, slots, masks):
                raise
            seq_ids = forward.plan.rows.seq_ids[forward.plan.rows.sampling]
            healthy = ~np.isin(seq_ids, list(forward.failures))
            return self._sample(forward, slots, masks_of(masks, slots[healthy]))

    def _sample(self, forward: Forward, slots: Ids, masks: TokenMasks | None) -> Sampled:
        """All rows, in blocks whose logits fit in memory."""
        ends = range(0, len(slots), LOGITS_ROWS)
        return joined(
            [
                self._sample_rows(forward, slots, slice(begin, begin + LOGITS_ROWS), masks)
                for begin in ends
            ]
        )

    def _sample_rows(
        self, forward: Forward, slots: Ids, block: slice, masks: TokenMasks | None
    ) -> Sampled:
        whole = forward.logits
        logits = self.logits(forward.hidden[block]) if whole is None else whole[block]
        best = None if forward.answer is None else forward.answer.best.tensor[: len(slots)][block]
        rows, peek = self.slots.sampling_rows(slots[block]), reading_is_free(self.device)
        return sample(logits, rows, masks_of(masks, slots[block]), self.ops, peek=peek, best=best)

    def _fail_culprits(self, forward: Forward, slots: Ids, masks: TokenMasks | None) -> bool:
        """Make the rows plain that cannot be sampled alone; whether there are any."""
        seq_ids = forward.plan.rows.seq_ids[forward.plan.rows.sampling].tolist()
        found = False
        for row, (slot, seq_id) in enumerate(zip(slots.tolist(), seq_ids, strict=True)):
            try:
                self._sample_rows(forward, slots, slice(row, row + 1), masks)
            except Exception as error:
                forward.failures[seq_id] = failure("sampling", error)
                self.slots.make_plain(slot)
                found = True
        return found

    @torch.inference_mode()
    def _prompt_logprobs(
        self, plan: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, failures: dict[int, str]
    ) -> dict[int, Logprobs]:
        """Of the rows whose chunk makes wanted prompt positions known: position p needs the hidden
        state of p - 1."""
        found = {}
        columns = self.slots.columns[plan.rows.slots]
        for row in np.flatnonzero(columns["logprob_start"] >= 0).tolist():
            start, slot = int(batch.starts[row]), int(plan.rows.slots[row])
            begin = max(start + 1, int(columns["logprob_start"][row]))
            end = min(start + int(plan.rows.counts[row]) + 1, int(columns["num_prompt"][row]))
            if begin >= end:
                continue
            first = int(batch.cu_q[row]) - start - 1
            lists = self.slots.lists.get(slot)
            try:
                found[row] = prompt_logprobs(
                    hidden[first + begin : first + end],
                    self.slots.ids.tensor[slot, begin:end],
                    self.logits,
                    num_top=int(columns["num_top"][row]),
                    picked=np.zeros(0, np.int64) if lists is None else lists.picked,
                )
            except Exception as error:
                failures[int(plan.rows.seq_ids[row])] = failure(
                    "taking the logprobs of its prompt", error
                )
        return found
