"""What ranks exchange in a step, on torch.distributed's fake backend: every rank of groups of several
sizes makes the same calls, with the shapes that the other ranks expect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.parallel.distributed_group import DistributedGroup
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.goldens import tiny_config
from setpoint_testing.plans import Driver, allocate_rows

HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB, LAYERS = 16, 8, 64, 288, 300, 2
CONFIG = tiny_config("LlamaForCausalLM", "llama") | {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HEAD_DIM,
}
TOKENS = 5
BYTES = 2  # bfloat16


@dataclass
class Watched:
    """A process group that notes its calls."""

    processes: dist.ProcessGroup
    calls: list[tuple[str, torch.dtype, tuple[int, ...]]] = field(default_factory=list)

    def rank(self) -> int:
        return self.processes.rank()

    def size(self) -> int:
        return self.processes.size()

    def _note(self, name: str, sent: torch.Tensor) -> None:
        self.calls.append((name, sent.dtype, tuple(sent.shape)))

    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work:
        self._note("sum", tensors[0])
        return self.processes.allreduce(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> dist.Work:
        assert {each.shape for each in outputs[0]} == {inputs[0].shape}
        assert len(outputs[0]) == self.size()
        self._note("gather", inputs[0])
        return self.processes.allgather(outputs, inputs)

    def gather(self, outputs, inputs, options) -> dist.Work:
        assert [len(each) for each in outputs] == [self.size()] * (self.rank() == 0)
        self._note("logits", inputs[0])
        return self.processes.gather(outputs, inputs, options)


@contextmanager
def fake_group(rank: int, size: int) -> Iterator[Watched]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Watched(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def calls(folder: Path, rank: int, size: int, *, sums: bool) -> list[tuple]:
    """The exchanges of one step of TOKENS tokens, of which one samples."""
    config = EngineConfig(str(folder), read_spec(folder), num_threads=1, capture=False)
    with fake_group(rank, size) as processes:
        runner = build_runner(config, DistributedGroup(processes, sums=sums, is_capturable=False))
        allocate_rows(runner, num_rows=16, max_slots=2, context_len=16)
        driver = Driver(InprocExecutor(runner), 1, 16)
        plan = driver.plan()
        driver.admit(plan, 0, list(range(3, 3 + TOKENS)))
        plan.add_row(0, 0, 0, TOKENS, 1)
        if rank == 0:
            driver.run(plan)
        else:
            runner.follow(plan.build())
        return processes.calls


def widest(length: int, size: int, unit: int) -> int:
    """Most columns of a rank, in bytes."""
    units = -(-length // unit)
    ends = [min(length, units * rank // size * unit) for rank in range(size + 1)]
    return BYTES * max(end - begin for begin, end in pairwise(ends))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_two_sums_per_layer(size: int, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, CONFIG)
    head = ("logits", torch.uint8, (1, widest(VOCAB, size, 32)))
    expected = [
        ("sum", torch.uint8, (TOKENS, HIDDEN * BYTES)),  # the embedding's rows
        *[("sum", torch.bfloat16, (TOKENS, HIDDEN))] * (2 * LAYERS),
        head,
    ]
    for rank in range(size):
        assert calls(folder, rank, size, sums=True) == expected


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_four_gathers_per_layer(size: int, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, CONFIG)
    hidden = ("gather", torch.uint8, (TOKENS, widest(HIDDEN, size, 32 if size == 2 else 1)))
    attended = ("gather", torch.uint8, (TOKENS, widest(HEADS * HEAD_DIM, size, 2 * HEAD_DIM)))
    inner = ("gather", torch.uint8, (TOKENS, widest(INNER, size, 32)))
    expected = [
        ("sum", torch.uint8, (TOKENS, HIDDEN * BYTES)),
        *[attended, hidden, inner, hidden] * LAYERS,
        ("logits", torch.uint8, (1, widest(VOCAB, size, 32))),
    ]
    for rank in range(size):
        assert calls(folder, rank, size, sums=False) == expected
