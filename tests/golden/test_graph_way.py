"""Steps as graphs compute what eager steps compute, whatever the size of the graph and of the step:
on CPU tensors, with graphs that repeat what was captured (``setpoint_testing.fake_graphs``).

In float64, because torch's products on a CPU round by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from setpoint.core.errors import OutOfMemoryError
from setpoint.core.graph_sizes import NO_GRAPHS
from setpoint.core.progress import reported_to
from setpoint.doctor.observations import Evidence, Facts
from setpoint.doctor.readers.log.startup import learn
from setpoint.engine.runner import step_footprint
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.dense_attention import DenseAttention
from setpoint_testing.fake_graphs import FakeGraphs
from setpoint_testing.graph_steps import (
    CONTEXT,
    FAMILIES,
    MIXTURES,
    PAGE,
    SIZES,
    SLOTS,
    compare,
    make_runner,
    pretend_graphs,
    steps,
)
from setpoint_testing.live_bytes import LiveBytes
from setpoint_testing.plans import allocate_rows


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraphs]:
    return pretend_graphs(monkeypatch)


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


def measure_peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the CPU's tensors be counted as an allocator of a GPU counts its own. -> the peaks"""
    peaks = []

    def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
        with LiveBytes() as live:
            run()
        peaks.append(live.peak)
        return live.peak

    monkeypatch.setattr(step_footprint, "peak_bytes", peak_bytes)
    return peaks


def test_the_log_says_what_was_captured(
    tmp_path: Path,
    graphs: list[FakeGraphs],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
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
    peaks = measure_peaks(monkeypatch)
    found = runner.footprint(step_tokens=8, context_len=CONTEXT)
    assert [found.activations] == peaks
    assert not caplog.messages, "graphs are captured once, when the pool has its size"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_largest_step_is_measured_by_running_it(
    family: str, tmp_path: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is proportional to the number of tokens, and writes no row's keys and values."""
    peaks = measure_peaks(monkeypatch)
    runner = make_runner(write_tiny(tmp_path, FAMILIES[family].config), capture=False)
    one, two = (
        runner.footprint(step_tokens=count, context_len=CONTEXT).activations for count in (64, 128)
    )
    assert [one, two] == peaks
    assert 1.9 * one < two < 2.1 * one
    runner.pool.memory.zero_()
    step_footprint.activation_bytes(runner.forward_pass, runner.backends, 64)
    assert runner.pool.memory.any()
    assert not any(cache[1:].any() for layer in runner.pool.layers for cache in layer)


def test_a_step_that_does_not_fit_at_the_start_is_told(
    tmp_path: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
        raise torch.OutOfMemoryError(TOLD)

    monkeypatch.setattr(step_footprint, "peak_bytes", peak_bytes)
    runner = make_runner(write_tiny(tmp_path, FAMILIES["llama"].config), capture=False)
    with pytest.raises(
        OutOfMemoryError, match=r"step of 64 tokens .*allocate 512.00 MiB"
    ) as raised:
        runner.footprint(step_tokens=64, context_len=CONTEXT)
    assert "Lower --chunked-prefill-size" in str(raised.value)


def test_ranks_do_not_run_a_step_that_the_others_do_not_run(
    tmp_path: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = measure_peaks(monkeypatch)
    runner = make_runner(write_tiny(tmp_path, FAMILIES["llama"].config), capture=False)
    group = SimpleNamespace(size=2, rank=0)
    runner.backends = replace(runner.backends, group=group)
    assert runner.footprint(step_tokens=64, context_len=CONTEXT).activations is None
    assert not peaks


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


TOLD = "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has 1 GiB. Including much"


def lack_memory(monkeypatch: pytest.MonkeyPatch, failing: set[int]) -> list[int]:
    """Let captures of some numbers fail. -> the number of the last one"""
    last = [0]
    capture = FakeGraphs.capture

    def captures(graphs: FakeGraphs, launch: Any) -> Any:
        last[0] += 1
        if last[0] in failing:
            raise torch.OutOfMemoryError(TOLD)
        return capture(graphs, launch)

    monkeypatch.setattr(FakeGraphs, "capture", captures)
    return last


def test_sizes_without_memory_are_left_out(
    tmp_path: Path,
    graphs: list[FakeGraphs],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The largest decode size, 8, and a prefill size in the middle."""
    caplog.set_level("INFO", "setpoint.engine.runner.graph_way")
    folder = write_tiny(tmp_path, FAMILIES["llama"].config)
    num_decode = len(SIZES.rows)
    lack_memory(monkeypatch, {1, num_decode + 2})
    replayed, eager = (make_runner(folder, capture=capture) for capture in (True, False))
    why, replayed.why_eager = replayed.why_eager, ""
    ways = compare(replayed, eager, SLOTS, rtol=1e-9, atol=1e-11)
    assert graphs[0].num_captured == num_decode + len(SIZES.tokens) - 2
    assert ways.count("eager") > 3, "decode steps of 5 to 8 rows"
    assert ways.count("graph") > 10
    decode, prefill = why.split("; ")
    assert decode == (
        "there is no memory for graphs of decode steps with 8 requests (CUDA out of memory. Tried to"
        " allocate 512.00 MiB. GPU 0 has 1 GiB). Lower --cuda-graph-max-bs-decode or"
        " --cuda-graph-max-bs, or start with a --mem-fraction-static that is 0.05 lower"
    )
    assert f"prefill steps with {sorted(SIZES.tokens)[-2]} tokens" in prefill
    assert "--cuda-graph-max-bs-prefill" in prefill
    assert any("CUDA graph end. bs=[1, 2, 4]," in line for line in caplog.messages)


def test_no_memory_for_any_graph_ends_the_start(
    tmp_path: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = lack_memory(monkeypatch, set(range(1, 99)))
    with pytest.raises(OutOfMemoryError, match="single one of decode steps: CUDA out of memory"):
        make_runner(write_tiny(tmp_path, FAMILIES["llama"].config), capture=True)
    assert last == [len(SIZES.rows)]
