"""Runs plans on one device: applies them to the slots, runs the model, samples. Enqueues work and
never waits for the device.

Knows nothing of executors, results on the host or timings; ``engine.executor`` adds those.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from setpoint.core.cachegroups import cache_layout
from setpoint.core.failures import log_failure
from setpoint.core.footprint import Footprint
from setpoint.core.graph_sizes import NO_GRAPHS, GraphSizes
from setpoint.core.limits import logits_rows
from setpoint.core.model import ModelSpec
from setpoint.core.operations import MemoryPart
from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.records import Fallback
from setpoint.core.request import Ids
from setpoint.core.result import one_each
from setpoint.engine.kernels.device import give_back, reading_is_free
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.kernels.weight_file import WeightFile
from setpoint.engine.layers.context import Backends
from setpoint.engine.runner.batch import NO_ROWS, ForwardBatch, build_batch
from setpoint.engine.runner.claim_ahead import ClaimAhead
from setpoint.engine.runner.eager_way import EagerWay
from setpoint.engine.runner.forward_pass import ForwardPass, StepLogits
from setpoint.engine.runner.hidden_state_rows import HiddenStateCollector
from setpoint.engine.runner.kv_pool import KVPool
from setpoint.engine.runner.pooled_rows import Pooled, Pooler
from setpoint.engine.runner.rows import SlotTable
from setpoint.engine.runner.step_block import StepBlock
from setpoint.engine.runner.step_footprint import activation_bytes
from setpoint.engine.runner.way import Ran, Way, captured_way
from setpoint.engine.sampling.device_sampler import sample_on_device
from setpoint.engine.sampling.logprobs import Logprobs, prompt_logprobs
from setpoint.engine.sampling.sampler import Sampled, concatenate, masks_of, sample


@dataclass(slots=True, frozen=True)
class LoadReport:
    """What start-up reports about the engine; written once by ``executor.build_runner``."""

    load_seconds: float
    weight_bytes: int
    weights: str
    """Dtype of the weights; if a GGUF file's blocks are kept, also the number of matrices of each
    kind."""
    cache_scales: str
    """The scales of a KV cache in fp8, or which ones of the checkpoint are not used; "" for a cache
    that needs none of a checkpoint that has none."""
    experts: str
    """How many experts a mixture has, and which are here; "" for other models."""
    model_impl: str
    """Whose model code runs: "setpoint" or "transformers"."""
    ops: str
    linear: str
    attention: str
    level: str
    """The instruction set that the C++ kernels were compiled for; empty if none of them runs."""
    choices: str
    """Which of several bit-identical implementations the products use, as measured on this
    machine; empty if the level has one of each."""
    emulated: bool
    """Whether ``level`` is for tests only, so that its speed says nothing about any machine."""
    fallbacks: tuple[Fallback, ...]
    """The better implementations that cannot run here, with the reasons."""


@dataclass(slots=True, frozen=True)
class Forward:
    """A forward pass that has been started. Its tensors are still on the device; those of a
    replayed step stay valid only until the next step."""

    plan: StepPlan
    batch: ForwardBatch | None
    """None for a plan without rows."""
    answer: StepLogits | None = None
    """None if no row samples, or if so many do that ``sample`` computes the logits in blocks."""
    hidden: torch.Tensor | None = None
    """[S, H]: hidden states of the sampling rows, if ``sample`` computes the logits."""
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """Keyed by row index."""
    pooled: Pooled | None = None
    hidden_states: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """See ``HiddenStateCollector.take``."""
    way: Way | None = None
    """The way that ran; None for a plan without rows."""
    failures: dict[int, str] = field(default_factory=dict)
    """The failures that ``StepResult.failures`` will have; ``sample`` adds to them."""

    @property
    def logits(self) -> torch.Tensor | None:
        """[S, V]; None if ``answer`` is."""
        return None if self.answer is None else self.answer.logits[: len(self.batch.sample_slots)]


class ModelRunner:
    """Contract: call ``allocate`` once; then for each step ``forward`` and, before the next step's
    ``forward``, ``sample``."""

    def __init__(
        self,
        *,
        model: nn.Module,
        spec: ModelSpec,
        backends: Backends,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        report: LoadReport,
        capture: bool = True,
        weight_file: WeightFile | None = None,
        graph_sizes: GraphSizes = NO_GRAPHS,
    ) -> None:
        """weight_file: keeps the model's weights; None: they are in memory of their own, and are
        loaded again after they have been released. graph_sizes: those of the steps that are
        captured on a device with graphs."""
        self.model = model
        self.spec = spec
        self.backends = backends
        self.page_size = page_size
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.device = device
        self.report = report
        self.capture = capture
        self.graph_sizes = graph_sizes
        self.logits_rows = logits_rows(device.type)
        self.weight_file = weight_file
        self.why_eager = "" if capture else "it is switched off"
        """Why steps, or some of them, or only their logits, are not replayed; empty if all are.
        Written by ``allocate``."""

    def allocate(
        self, *, num_pages: int, max_slots: int, context_len: int, with_ways: bool = True
    ) -> None:
        """Allocate the KV pool and the slot table. Raises OutOfMemoryError if there is no room.

        num_pages: number of pages; each holds ``page_size`` tokens of one of the model's cache
        groups (``core.cachegroups``). with_ways: False captures no step.
        """
        begin = time.perf_counter()
        layout = cache_layout(self.spec, context_len)
        self.pool = KVPool(
            layout,
            num_pages=num_pages,
            page_size=self.page_size,
            dtype=self.kv_dtype,
            device=self.device,
        )
        self.claim_ahead = ClaimAhead(self.pool)
        on_host = reading_is_free(self.device)
        self.step_block = None if on_host else StepBlock(self.device, max_slots)
        self.slots = SlotTable(
            context_len=context_len,
            page_size=self.page_size,
            max_slots=max_slots,
            device=self.device,
            num_groups=len(layout.groups),
            block=self.step_block,
        )
        self.pooler = Pooler()
        self.hidden_states = HiddenStateCollector()
        self._assemble(with_ways=with_ways)
        self.allocate_seconds = time.perf_counter() - begin
        """How long that took, captures of steps included."""

    def _assemble(self, *, with_ways: bool = True) -> None:
        """Build the forward pass and the ways to run it from model, slots and pool."""
        wide = torch.promote_types(self.dtype, torch.float32)
        cos_sin = tuple(
            rotary.table(self.slots.context_len, wide, self.device)
            for rotary in self.model.rotaries
        )
        self.forward_pass = ForwardPass(
            self.model,
            self.slots,
            self.pool,
            cos_sin,
            self.page_size,
            torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device),
            self.device,
            self.step_block,
            self.graph_sizes,
        )
        self._make_ways(capture=self.capture and with_ways)

    @property
    def can_be_taken_apart(self) -> bool:
        """Whether ``release`` and ``replace`` may be called. They would lose a way that was added
        later (compiled code)."""
        return not self._has_preferred

    @property
    def is_assembled(self) -> bool:
        """Whether a step can run."""
        return self.forward_pass is not None

    def release(self, parts: Collection[MemoryPart]) -> None:
        """Give these parts of the memory back. No step may run until ``restore``, or ``take_again``
        if there is a ``weight_file``."""
        if self.weight_file is not None:
            self._let_go(parts, self.weight_file)
            return
        # Captured steps and the forward pass hold the memory of all parts.
        self.ways, self.forward_pass = [], None
        if MemoryPart.KV_CACHE in parts:
            self.pool.release()
            self.claim_ahead = None
        if MemoryPart.WEIGHTS in parts:
            self.model = None
        self.give_back()

    def _let_go(self, parts: Collection[MemoryPart], weights: WeightFile) -> None:
        """Give memory back that keeps its addresses, so that captured steps stay as they are."""
        if MemoryPart.KV_CACHE in parts:
            self.pool.let_go()
            self.claim_ahead = ClaimAhead(self.pool)
        if MemoryPart.WEIGHTS in parts:
            weights.let_go()

    def take_again(self, parts: Collection[MemoryPart]) -> None:
        """Have these parts in memory again that ``release`` has given back. The pool's memory is
        claimed as it is written."""
        if MemoryPart.WEIGHTS in parts:
            self.weight_file.take()

    def restore(self, *, pool: bool, model: nn.Module | None, complete: bool) -> None:
        """Allocate the pool's memory again, or use this model. complete: nothing is missing any
        more, so that steps can run again. Raises OutOfMemoryError with nothing restored."""
        if pool:
            self.pool.take()
            self.claim_ahead = ClaimAhead(self.pool)
        if model is not None:
            self.model = model
        if complete:
            self._assemble()

    def replace(self, model: nn.Module) -> None:
        """Use this model, of the same shapes, from the next step on, and give the old one's memory
        back. The slots and the pool keep their content. If the new model cannot be put to use, the
        old one stays and the exception is raised."""
        before = self.model
        try:
            self._use(model)
        except BaseException:
            self._use(before)
            raise
        del before
        self.give_back()

    def _use(self, model: nn.Module) -> None:
        self.ways, self.forward_pass, self.model = [], None, model
        self.give_back()
        self._assemble()

    def give_back(self) -> None:
        """Give the memory back that nothing uses and torch or the C library keeps."""
        # The start freezes its objects, so that garbage collections are short. Some of them are in
        # reference cycles, which have to be collected now.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        give_back(self.device)

    def footprint(self, *, step_tokens: int, context_len: int) -> Footprint:
        """Measure the engine's memory with a pool of one page, so that the pool's size can be
        computed from it; call ``allocate`` again afterwards. step_tokens: size of the step whose
        temporaries are counted. Graphs of a device are not captured here, because that takes long
        and one slot has only the smallest. Raises OutOfMemoryError."""
        recorded = reading_is_free(self.device)
        self.allocate(num_pages=1, max_slots=1, context_len=context_len, with_ways=recorded)
        return Footprint(
            weights=self.report.weight_bytes,
            rotations=sum(table.nbytes for table in self.forward_pass.cos_sin),
            captured=sum(way.num_bytes for way in self.ways) if recorded else None,
            step_tokens=step_tokens,
            activations=activation_bytes(self.forward_pass, self.backends, step_tokens),
        )

    @property
    def longest_row(self) -> int:
        """Most tokens of a sequence that has the pool to itself."""
        return min(self.slots.context_len, self.pool.num_tokens // self.num_groups)

    @property
    def num_groups(self) -> int:
        """Number of the model's cache groups, and of pages in a page row."""
        return len(self.pool.layout.groups)

    def forward(self, plan: StepPlan, ways: Sequence[Way] | None = None) -> Forward:
        """Apply the plan to the slots and start its forward pass. ways: the ways to choose from
        instead of the runner's own; one of them must take the batch."""
        failures = self._apply(plan)
        for collector in (self.pooler, self.hidden_states):
            collector.release(plan.releases)
            collector.admit(plan.admits)
        if not len(plan.rows):
            return Forward(plan, None, failures=failures)
        batch, ran = self._compute(plan, self.ways if ways is None else ways)
        num_sampling = len(batch.sample_slots)
        hidden, answer = ran.hidden, ran.answer
        pooled = self.pooler.pool(plan.rows, batch, hidden, self.slots.columns)
        prompt = (
            self._prompt_logprobs(plan, batch, ran, failures)
            if self.slots.any_special(batch.slots)
            else {}
        )
        sampling = (
            hidden[self.forward_pass.sample_index(batch)]
            if num_sampling and answer is None
            else None
        )
        taken = self.hidden_states.take(plan.rows, batch, hidden)
        return Forward(plan, batch, answer, sampling, prompt, pooled, taken, ran.way, failures)

    def follow(self, plan: StepPlan) -> None:
        """Take part in a plan that another rank leads: apply it to the slots and run its forward
        pass. That rank samples."""
        self._apply(plan)
        if len(plan.rows):
            self._compute(plan, self.ways)

    def accompany(self) -> bool:
        """Take part, without tokens, in a step that other engines have begun
        (``parallel.data_ranks``). Returns whether there was one."""
        if not self.backends.data.is_awaited:
            return False
        self._run(NO_ROWS, self.ways, with_logits=False)
        return True

    @torch.inference_mode()
    def follow_logits(self, hidden: torch.Tensor) -> None:
        """Take part in logits that another rank computes of hidden [S, H]."""
        self.model.logits(hidden, self.backends)

    def _apply(self, plan: StepPlan) -> dict[int, str]:
        """Returns the failures of admissions."""
        self.slots.release(plan.releases)
        failures = self.slots.admit(plan.admits)
        self.slots.map_pages(plan.pages)
        self.claim_ahead.hand_out(plan.pages.pages)
        return failures

    def _compute(self, plan: StepPlan, ways: Sequence[Way]) -> tuple[ForwardBatch, Ran]:
        if len(plan.forced_ids):
            self.slots.append_known(plan.rows.slots, plan.rows.num_forced, plan.forced_ids)
        batch = build_batch(plan.rows, self.slots.columns["length"])
        with_logits = 0 < len(batch.sample_slots) <= self.logits_rows
        return batch, self._run(batch, ways, with_logits=with_logits)

    def _run(self, batch: ForwardBatch, ways: Sequence[Way], *, with_logits: bool) -> Ran:
        self.backends.data.begin(batch.num_tokens)
        way = next(way for way in ways if way.takes(batch))
        return way.run(batch, with_logits=with_logits)

    def prefer(self, way: Way) -> None:
        """Try this way first from now on, until ``allocate`` is called again."""
        self.ways.insert(0, way)
        self._has_preferred = True

    def _make_ways(self, *, capture: bool) -> None:
        self._has_preferred = False
        self.ways: list[Way] = [EagerWay(self.forward_pass, self.backends)]
        """The ways that exist here, best first; the last one takes every batch."""
        if not capture:
            return
        try:
            captured = captured_way(
                self.forward_pass, self.backends, with_head=self.spec.pooling is None
            )
        except (NotCapturable, KernelsUnavailable) as reason:
            self.why_eager = str(reason)
        else:
            self.why_eager = captured.why_partly_eager
            self.ways.insert(0, captured)

    @property
    def _has_kernels(self) -> bool:
        """Whether the device has kernels that sample, and knows the sampling rows."""
        return self.step_block is not None and self.backends.ops.sampling is not None

    def sample(self, forward: Forward, masks: TokenMasks | None) -> Sampled | None:
        """Sample the plan's sampling rows and append the tokens to their slots. Returns None if no
        row samples."""
        if forward.batch is None or not len(forward.batch.sample_slots):
            return None
        slots, answer = forward.batch.sample_slots, forward.answer
        if answer is None or masks is not None or self.slots.any_special(slots):
            sampled = self._choose(forward, slots, masks)
        else:
            sampled = Sampled(answer.best, None)
            if self._has_kernels:
                best = answer.best.tensor[: len(slots)]
                self.backends.ops.sampling.place(best, self.step_block.sampling)
        if self.step_block is not None and not self._has_kernels:
            self.step_block.append(self.slots.ids.tensor, sampled.ids.tensor[: len(slots)])
        self.slots.append(slots, sampled.ids, one_each(len(slots)))
        return sampled

    @torch.inference_mode()
    def _choose(self, forward: Forward, slots: Ids, masks: TokenMasks | None) -> Sampled:
        """Sample all rows. If that raises, try each row alone. The rows that raise fail; then all
        rows are sampled, the failed ones with default parameters."""
        try:
            return self._sample(forward, slots, masks)
        except torch.OutOfMemoryError:
            raise  # it concerns the step: a row alone would have had room
        except Exception:
            if not self._fail_culprits(forward, slots, masks):
                raise
            seq_ids = forward.plan.rows.seq_ids[forward.plan.rows.sampling]
            healthy = ~np.isin(seq_ids, list(forward.failures))
            return self._sample(forward, slots, masks_of(masks, slots[healthy]))

    def _sample(self, forward: Forward, slots: Ids, masks: TokenMasks | None) -> Sampled:
        """Sample all rows, in blocks whose logits fit in memory."""
        ends = range(0, len(slots), self.logits_rows)
        return concatenate(
            [
                self._sample_rows(forward, slots, slice(begin, begin + self.logits_rows), masks)
                for begin in ends
            ]
        )

    def _sample_rows(
        self, forward: Forward, slots: Ids, block: slice, masks: TokenMasks | None
    ) -> Sampled:
        whole = forward.logits
        logits = forward.way.logits(forward.hidden[block]) if whole is None else whole[block]
        best = None if forward.answer is None else forward.answer.best.tensor[: len(slots)][block]
        rows, ops = self.slots.sampling_rows(slots[block]), self.backends.ops
        masks = masks_of(masks, slots[block])
        if self._has_kernels:
            rows = replace(rows, on_device=self.step_block.sampling.rows(block))
            return sample_on_device(logits, rows, masks, ops, best=best)
        peek = reading_is_free(self.device)
        return sample(logits, rows, masks, ops, peek=peek, best=best)

    def _fail_culprits(self, forward: Forward, slots: Ids, masks: TokenMasks | None) -> bool:
        """Find the rows that cannot be sampled even alone, record their failures and reset their
        sampling parameters. Returns whether there are any."""
        seq_ids = forward.plan.rows.seq_ids[forward.plan.rows.sampling].tolist()
        found = False
        for row, (slot, seq_id) in enumerate(zip(slots.tolist(), seq_ids, strict=True)):
            try:
                self._sample_rows(forward, slots, slice(row, row + 1), masks)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                forward.failures[seq_id] = log_failure("sampling", error)
                self.slots.reset_sampling(slot)
                found = True
        if found and self._has_kernels:
            self.step_block.send_sampling(self.slots.sampling_rows(slots))
        return found

    @torch.inference_mode()
    def _prompt_logprobs(
        self, plan: StepPlan, batch: ForwardBatch, ran: Ran, failures: dict[int, str]
    ) -> dict[int, Logprobs]:
        """Row -> logprobs of the wanted prompt positions that this step makes known: position p
        needs the hidden state of p - 1."""
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
                    ran.hidden[first + begin : first + end],
                    self.slots.ids.tensor[slot, begin:end],
                    ran.way.logits,
                    num_top=int(columns["num_top"][row]),
                    picked=np.zeros(0, np.int64) if lists is None else lists.picked,
                    ops=self.backends.ops,
                )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failures[int(plan.rows.seq_ids[row])] = log_failure(
                    "taking the logprobs of its prompt", error
                )
        return found
