"""Steps of small models that are captured as graphs on CPU tensors, and the same steps computed at
once, for tests of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.graph_sizes import GraphSizes
from setpoint.core.plan import OWN_LENGTH
from setpoint.engine.attention.attention_backend import AttentionBackend, AttentionShape
from setpoint.engine.executor.build_runner import DTYPES, EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels import ref
from setpoint.engine.parallel.group import ALONE, Group
from setpoint.engine.runner import graph_way, model_runner, way
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.dense_attention import DenseAttention
from setpoint_testing.fake_graphs import FakeGraphs
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.plans import Driver, allocate_rows

CONTEXT, PAGE, SLOTS = 64, 4, 9
SIZES = GraphSizes((1, 2, 4, 8), (4, 8, 16))
FAMILIES = {golden.config["model_type"]: golden for golden in GOLDENS}
MIXTURES = {
    name
    for name, golden in FAMILIES.items()
    if {"num_experts", "num_local_experts", "n_routed_experts"} & golden.config.keys()
}


def pretend_graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraphs]:
    """The graphs that runners make from now on: the CPU is taken for a device that has them."""
    made: list[FakeGraphs] = []

    def make(device: torch.device) -> FakeGraphs:
        made.append(FakeGraphs())
        return made[-1]

    monkeypatch.setattr(graph_way, "make_graphs", make)
    monkeypatch.setitem(way.CAPTURED, "cpu", way.CAPTURED["cuda"])
    monkeypatch.setattr(model_runner, "reading_is_free", lambda device: False)
    return made


def config_of(folder: Path, *, capture: bool, dtype: str, **more: object) -> EngineConfig:
    options = {"dtype": dtype, "kv_dtype": dtype, "page_size": PAGE, "capture": capture}
    return EngineConfig(str(folder), read_spec(folder), **options | more)


def make_runner(
    folder: Path,
    *,
    capture: bool,
    dtype: str = "float64",
    sizes: GraphSizes = SIZES,
    group: Group = ALONE,
    attention: Callable[[AttentionShape], AttentionBackend] = DenseAttention,
    **more: object,
) -> ModelRunner:
    """group: the ranks of the model. more: of ``EngineConfig``."""
    runner = build_runner(config_of(folder, capture=capture, dtype=dtype, **more), group)
    spec = runner.spec
    shape = AttentionShape(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        PAGE,
        DTYPES[dtype],
        DTYPES[dtype],
        torch.device("cpu"),
        spec.value_dim,
    )
    runner.backends = replace(runner.backends, ops=ref.RefOps(), attention=attention(shape))
    runner.graph_sizes = sizes
    allocate_rows(runner, num_rows=SLOTS * CONTEXT // PAGE, max_slots=SLOTS, context_len=CONTEXT)
    for layer in runner.pool.layers:
        for cache in layer:
            cache[0] = torch.nan
    return runner


def steps(
    runner: ModelRunner,
    seed: int,
    num_slots: int = SLOTS,
    executor: InprocExecutor | None = None,
) -> tuple[list[list[torch.Tensor]], list[str]]:
    """Logits of each step's sampling rows, and the way of each step: steps of 1 to ``num_slots``
    decode rows, of chunks, and of both. executor: of the runner, if others follow it."""
    rng = np.random.default_rng(seed)
    driver = Driver(executor or InprocExecutor(runner), PAGE, CONTEXT // PAGE, runner.num_groups)
    logits: list[torch.Tensor] = []
    forward = runner.forward

    def watched(plan, ways):
        done = forward(plan, ways)
        logits.append(None if done.logits is None else done.logits.clone())
        return done

    runner.forward = watched
    prompts = {
        slot: rng.integers(3, 120, rng.integers(1, 24)).tolist() for slot in range(num_slots)
    }
    ran = []
    for slot, prompt in prompts.items():
        done = 0
        while done < len(prompt):
            plan = driver.plan()
            if not done:
                driver.admit(plan, slot, prompt)
            count = min(len(prompt) - done, int(rng.integers(1, 20)))
            plan.add_row(slot, slot, done, count, int(done + count == len(prompt)))
            for other in range(slot):
                if rng.random() < 0.5:
                    plan.add_row(other, other, OWN_LENGTH, 1, 1)
            ran.append(driver.run(plan).way)
            done += count
    for count in range(1, num_slots + 1):
        plan = driver.plan()
        for slot in rng.permutation(num_slots)[:count].tolist():
            plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
        ran.append(driver.run(plan).way)
    runner.forward = forward
    return logits, ran


def compare(
    replayed: ModelRunner, eager: ModelRunner, num_slots: int, *, rtol: float, atol: float
) -> list[str]:
    """Compare the logits of the same steps on both. -> the ways of the first"""
    assert not replayed.why_eager
    (first, ways), (second, _) = (steps(runner, 1, num_slots) for runner in (replayed, eager))
    assert set(ways) == {"graph", "eager"}
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if one is None or other is None:
            assert one is other, (number, ways[number])
        else:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    return ways
