"""A way with fixed sizes and input buffers of its own, as CUDA graphs need them, fits the seam: decode
batches are padded up to a captured size, and every architecture has the bits of the eager way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_captured_steps import make_runner, of_architecture, said, same

from setpoint.core.plan import StepPlan
from setpoint.engine.kernels.device import SharedTensor
from setpoint.engine.kernels.kernel_registry import make_recorder
from setpoint.engine.kernels.program import Program
from setpoint.engine.layers.context import Backends
from setpoint.engine.models.model_registry import MODELS
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.forward_pass import ForwardPass, Inputs, StepLogits
from setpoint.engine.runner.model_runner import Forward
from setpoint.engine.runner.way import Ran
from setpoint_testing.against_transformers import write_tiny

SIZES = (1, 3, 6, 8)


class Graph:
    """One program for one size, with the tensors that it was captured with."""

    def __init__(self, forward_pass: ForwardPass, backends: Backends, size: int) -> None:
        self.slots, self.kv_lens, self.index, self.cu_q = (
            SharedTensor(torch.zeros(length, dtype=torch.int32))
            for length in (size, size, size, size + 1)
        )
        self.cu_q.fill(np.arange(size + 1, dtype=np.int32))
        host = np.arange(size + 1, dtype=np.int32)
        inputs = Inputs(
            size, self.slots.tensor, self.cu_q.tensor, self.kv_lens.tensor, host, host[1:]
        )
        recorder = make_recorder(forward_pass.device)
        with recorder.recording():
            self.hidden: torch.Tensor = forward_pass.hidden(inputs, backends)
        with recorder.recording("samples"):
            self.answer: StepLogits = forward_pass.answer(self.hidden, self.index.tensor, backends)
        self.program: Program = recorder.program(
            tokens=size, sequences=size, samples=size, gathered=size
        )


class FixedSizes:
    """Implements ``runner.way.Way`` for decode batches. A program runs at its size and no other."""

    name = "fixed"

    def __init__(self, forward_pass: ForwardPass, backends: Backends) -> None:
        self._pass = forward_pass
        self._backends = backends
        self.padded: Counter[int] = Counter()
        """Runs by the number of rows that were filled up."""
        self._capture()

    def takes(self, batch: ForwardBatch) -> bool:
        return batch.num_tokens == len(batch.slots) <= SIZES[-1]

    def run(self, batch: ForwardBatch, *, with_logits: bool) -> Ran:
        if self._pass.slots.pages is not self._table:
            self._capture()
        size = next(size for size in SIZES if size >= len(batch.slots))
        graph, padding = self._graphs[size], size - len(batch.slots)
        self.padded[padding] += 1
        graph.slots.fill(np.pad(batch.slots, (0, padding), constant_values=self._padding_slot))
        graph.kv_lens.fill(np.pad(batch.kv_lens, (0, padding), constant_values=1))
        graph.index.fill(np.pad(batch.sample_index, (0, size - len(batch.sample_index))))
        graph.program.run(tokens=size, sequences=size, samples=size, gathered=size)
        return Ran(self, graph.hidden, graph.answer if with_logits else None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._pass.logits(hidden, self._backends)

    def _capture(self) -> None:
        self._table, self._padding_slot = self._pass.slots.pages, self._pass.slots.padding_slot
        self._graphs = {size: Graph(self._pass, self._backends, size) for size in SIZES}
        self.num_bytes = sum(graph.program.num_bytes for graph in self._graphs.values())


@pytest.mark.cases(8)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_padded_step_has_the_bits_of_the_eager_one(architecture: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, of_architecture(architecture))
    fixed, eager = (make_runner(folder, capture=False) for _ in range(2))
    for runner in (fixed, eager):
        runner.pool.memory.zero_()
    way = FixedSizes(fixed.forward_pass, fixed.backends)
    fixed.prefer(way)
    names: Counter[str] = Counter()
    forward = fixed.forward

    def named(plan: StepPlan, ways: object) -> Forward:
        done = forward(plan, ways)
        names[done.way.name] += 1
        return done

    fixed.forward = named
    wanted, found = said(eager), said(fixed)
    assert found[0] == wanted[0]
    assert same(found[1], wanted[1])
    assert names["fixed"] > 5 < names["eager"] + 5
    assert len(way.padded) > 1, "some steps were filled up"
    for slabs in zip(fixed.pool.slabs, eager.pool.slabs, strict=True):
        for parts in zip(*slabs, strict=True):
            pages = (part[1:] for part in parts)
            assert torch.equal(*pages), "what filled up wrote to the dummy page alone"
