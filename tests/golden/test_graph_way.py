"""Steps as graphs compute what eager steps compute, whatever the size of the graph and of the step:
on CPU tensors, with graphs that repeat what was captured (``setpoint_testing.fake_graphs``).

In float64, because torch's products on a CPU round by the number of rows; mixtures in float32, the
widest type of the kernel in Triton that multiplies experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.graph_sizes import NO_GRAPHS, GraphSizes
from setpoint.core.plan import OWN_LENGTH
from setpoint.core.progress import reported_to
from setpoint.doctor.observations import Evidence, Facts
from setpoint.doctor.readers.log.startup import learn
from setpoint.engine.attention.attention_backend import AttentionShape
from setpoint.engine.executor.build_runner import DTYPES, EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels import ref
from setpoint.engine.quant import grouped, linear_method
from setpoint.engine.runner import graph_way, model_runner, way
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.against_transformers import write_tiny
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


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraphs]:
    """The graphs that runners make from now on: the CPU is taken for a device that has them."""
    made: list[FakeGraphs] = []

    def make(device: torch.device) -> FakeGraphs:
        made.append(FakeGraphs())
        return made[-1]

    monkeypatch.setattr(graph_way, "make_graphs", make)
    monkeypatch.setitem(way.CAPTURED, "cpu", way.CAPTURED["cuda"])
    monkeypatch.setattr(model_runner, "reading_is_free", lambda device: False)
    return made


def make_runner(
    folder: Path, *, capture: bool, dtype: str = "float64", sizes: GraphSizes = SIZES
) -> ModelRunner:
    spec = read_spec(folder)
    config = EngineConfig(
        str(folder), spec, dtype=dtype, kv_dtype=dtype, page_size=PAGE, capture=capture
    )
    runner = build_runner(config)
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
    runner.backends = replace(runner.backends, ops=ref.RefOps(), attention=DenseAttention(shape))
    runner.graph_sizes = sizes
    allocate_rows(runner, num_rows=SLOTS * CONTEXT // PAGE, max_slots=SLOTS, context_len=CONTEXT)
    for layer in runner.pool.layers:
        for cache in layer:
            cache[0] = torch.nan
    return runner


def steps(
    runner: ModelRunner, seed: int, num_slots: int = SLOTS
) -> tuple[list[list[torch.Tensor]], list[str]]:
    """Logits of each step's sampling rows, and the way of each step: steps of 1 to ``num_slots``
    decode rows, of chunks, and of both."""
    rng = np.random.default_rng(seed)
    driver = Driver(InprocExecutor(runner), PAGE, CONTEXT // PAGE, runner.num_groups)
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


@pytest.mark.cases(4)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in MIXTURES])
def test_graphs_compute_what_eager_steps_compute(
    family: str, tmp_path: Path, graphs: list[FakeGraphs]
) -> None:
    folder = write_tiny(tmp_path, FAMILIES[family].config)
    replayed, eager = (make_runner(folder, capture=capture) for capture in (True, False))
    ways = compare(replayed, eager, SLOTS, rtol=1e-9, atol=1e-11)
    assert graphs[0].num_captured == len(SIZES.rows) + len(SIZES.tokens)
    assert graphs[0].num_replays == ways.count("graph") > 10


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_graphs_of_mixtures_compute_what_eager_steps_compute(
    family: str, tmp_path: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grouped.PLAIN, "cpu", grouped.TritonExperts)
    monkeypatch.setitem(linear_method.PREFERENCE, ("cpu", "unquant"), ("plain",))
    folder = write_tiny(tmp_path, FAMILIES[family].config)
    sizes = GraphSizes((2,), (8,))
    replayed, eager = (
        make_runner(folder, capture=capture, dtype="float32", sizes=sizes)
        for capture in (True, False)
    )
    ways = compare(replayed, eager, 2, rtol=1e-3, atol=1e-4)
    assert graphs[0].num_captured == 2
    assert graphs[0].num_replays == ways.count("graph") >= 3


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


def test_the_log_says_what_was_captured(
    tmp_path: Path, graphs: list[FakeGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    """The words are those of SGLang, which the doctor reads."""
    caplog.set_level("INFO", "setpoint.engine.runner.graph_way")
    doings: list[str] = []
    with reported_to(doings.append):
        runner = make_runner(write_tiny(tmp_path, FAMILIES["llama"].config), capture=True)
    begin, end, *others = caplog.messages
    assert begin == (
        "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=1.00"
        " GB"
    )
    assert end.startswith("Capture target decode CUDA graph end. bs=[1, 2, 4, 8], elapsed=")
    assert end.endswith(" s, mem usage=0.00 GB, avail mem=1.00 GB.")
    assert len(others) == 2
    assert "capturing decode steps, 1 of 4: 8 requests" in doings
    assert "capturing prefill steps, 3 of 3: 4 tokens" in doings
    facts = Facts()
    learn(facts, end, Evidence(1, end))
    assert (facts.graph_batch_sizes, facts.available_gb) == ([1, 2, 4, 8], 1.0)
    caplog.clear()
    runner.footprint(step_tokens=8, context_len=CONTEXT)
    assert not caplog.messages, "graphs are captured once, when the pool has its size"


def test_without_sizes_nothing_is_captured(tmp_path: Path, graphs: list[FakeGraphs]) -> None:
    runner = make_runner(write_tiny(tmp_path, FAMILIES["llama"].config), capture=True)
    runner.graph_sizes = NO_GRAPHS
    allocate_rows(runner, num_rows=SLOTS * CONTEXT // PAGE, max_slots=SLOTS, context_len=CONTEXT)
    assert runner.why_eager == "it is switched off"


def test_attention_that_needs_the_host_is_not_captured(
    tmp_path: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DenseAttention, "is_capturable", False)
    runner = make_runner(write_tiny(tmp_path, FAMILIES["llama"].config), capture=True)
    assert runner.why_eager == "its attention plans each step on the host"
    assert [each.name for each in runner.ways] == ["eager"]


def test_a_step_that_waits_is_not_captured(tmp_path: Path, graphs: list[FakeGraphs]) -> None:
    """The reference of products with experts looks at which experts were chosen."""
    runner = make_runner(write_tiny(tmp_path, FAMILIES["mixtral"].config), capture=True)
    assert "aten.nonzero.default waits for the device" in runner.why_eager
    assert [each.name for each in runner.ways] == ["eager"]
    assert set(steps(runner, 2)[1]) == {"eager"}
