"""The ranks of a model that exchange inside of graphs: on CPU tensors, with the exchanges of gloo as
parts of graphs that repeat what was captured (``setpoint_testing.fake_graphs``), as those of NCCL
are parts of a GPU's. Nothing here has run on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from setpoint.engine.executor import build_runner
from setpoint.engine.executor.build_runner import EngineConfig
from setpoint.engine.parallel.distributed_group import DistributedGroup
from setpoint.engine.quant.grouped import LoopedExperts
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.dense_attention import DenseAttention
from setpoint_testing.fake_graphs import FakeGraphs
from setpoint_testing.gloo_groups import gloo_groups
from setpoint_testing.graph_steps import (
    FAMILIES,
    SIZES,
    config_of,
    make_runner,
    pretend_graphs,
    steps,
)
from setpoint_testing.ranks import led

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL = 8
"""Slots."""
THREAD = threading.local()
"""Has the rank that a thread makes."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraphs]:
    return pretend_graphs(monkeypatch)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny(tmp_path, FAMILIES["llama"].config | HEADS)


def on_ranks(
    make: Callable[[DistributedGroup], Any], size: int = 2, *, sums: bool = True
) -> list[Any]:
    """What ``make`` returns for each rank, or raises; all ranks make at the same time."""

    def tried(group: DistributedGroup) -> Any:
        THREAD.rank = group.rank
        try:
            return make(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        groups = gloo_groups(size, sums=sums, is_capturable=True)
        return list(threads.map(tried, groups))


def same_as_one_rank(
    runners: list[ModelRunner], config: EngineConfig, one: ModelRunner, ways: set[str]
) -> list[str]:
    """Compare the logits of the same steps on these ranks and on one. -> the ways of the ranks'
    steps, which are these."""
    with led(runners, config) as (leading, _):
        found, ran = steps(runners[0], 1, SMALL, leading)
    expected, _ = steps(one, 1, SMALL)
    for on_ranks, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(on_ranks, alone, rtol=1e-9, atol=1e-11)
    assert set(ran) == ways
    return ran


@pytest.mark.cases(2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sums", [True, False])
def test_graphs_of_ranks_compute_what_one_rank_computes(
    size: int, sums: bool, llama: Path, graphs: list[FakeGraphs]
) -> None:
    runners = on_ranks(lambda group: make_runner(llama, capture=True, group=group), size, sums=sums)
    assert [runner.why_eager for runner in runners] == [""] * size
    config = config_of(llama, capture=True, dtype="float64")
    one = make_runner(llama, capture=False)
    ways = same_as_one_rank(runners, config, one, {"graph", "eager"})
    assert {each.num_replays for each in graphs} == {ways.count("graph")}
    assert {each.num_captured for each in graphs} == {len(SIZES.rows) + len(SIZES.tokens)}


def fail_on(
    rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch, *, after: int = 2
) -> None:
    """Let this rank fail when it captures, after it has captured some steps."""
    capture = FakeGraphs.capture

    def failing(graphs: FakeGraphs, launch: Callable[[], Any]) -> Any:
        captured = capture(graphs, launch)
        # Late, because a fake capture computes what it records, and so waits for the others.
        if THREAD.rank == rank and graphs.num_captured == after + 1:
            raise error
        return captured

    monkeypatch.setattr(FakeGraphs, "capture", failing)


@pytest.mark.parametrize("rank", [0, 1])
def test_if_a_rank_cannot_capture_all_run_eagerly(
    rank: int,
    llama: Path,
    graphs: list[FakeGraphs],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail_on(rank, RuntimeError("operation not permitted\nwhen capturing"), monkeypatch)
    runners = on_ranks(lambda group: make_runner(llama, capture=True, group=group))
    assert runners[rank].why_eager == "operation not permitted"
    assert runners[1 - rank].why_eager == f"rank {rank} could not, and its log says why"
    logged = [message for message in caplog.messages if "could not capture" in message]
    assert logged == ["This rank could not capture a step: operation not permitted"] * rank
    config = config_of(llama, capture=True, dtype="float64")
    same_as_one_rank(runners, config, make_runner(llama, capture=False), {"eager"})


def test_if_attention_of_one_rank_plans_on_the_host_all_run_eagerly(
    llama: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case of machines of which only one has a C compiler."""
    monkeypatch.setattr(
        DenseAttention, "is_capturable", property(lambda _: THREAD.rank == 0), raising=True
    )
    runners = on_ranks(lambda group: make_runner(llama, capture=True, group=group))
    assert runners[0].why_eager == "rank 1 could not, and its log says why"
    assert runners[1].why_eager == "its attention plans each step on the host"
    assert not graphs


def test_a_size_for_which_a_rank_has_no_memory_is_left_out_by_all(
    llama: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(1, torch.OutOfMemoryError("CUDA out of memory.\nTried"), monkeypatch)
    runners = on_ranks(lambda group: make_runner(llama, capture=True, group=group))
    left_out = SIZES.rows[-3]
    for runner, why in zip(
        runners, ("rank 1 could not, and its log says why", "CUDA out of memory"), strict=True
    ):
        assert f"decode steps with {left_out} requests ({why}). Lower" in runner.why_eager
    config = config_of(llama, capture=True, dtype="float64")
    same_as_one_rank(runners, config, make_runner(llama, capture=False), {"graph", "eager"})


def test_a_rank_that_fails_before_it_captures_ends(
    llama: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it; that it ends is what ends them."""
    warm_up = FakeGraphs.warm_up

    def failing(graphs: FakeGraphs, launch: Callable[[], Any]) -> None:
        warm_up(graphs, launch)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FakeGraphs, "warm_up", failing)
    errors = on_ranks(lambda group: make_runner(llama, capture=True, group=group))
    assert [type(error) for error in errors] == [MemoryError] * 2
    assert "no memory for a step that all run: CUDA out" in str(errors[0])


def by_all_experts(experts: LoopedExperts, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``layers.context.multiply_grouped`` that can be captured: each row by every expert."""
    rows = x.repeat_interleave(ids.numel() // len(x), 0)
    chosen = ids.view(-1, 1) - experts._first
    products = [torch.where(chosen == n, each(rows), 0) for n, each in enumerate(experts._weights)]
    return torch.stack(products).sum(0)


def test_whole_experts_are_exchanged_in_graphs(
    tmp_path: Path, graphs: list[FakeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, FAMILIES["mixtral"].config | HEADS)
    monkeypatch.setattr(build_runner, "multiply_grouped", by_all_experts)
    runners = on_ranks(lambda group: make_runner(folder, capture=True, group=group, ep_size=2))
    config = config_of(folder, capture=True, dtype="float64", ep_size=2)
    same_as_one_rank(runners, config, make_runner(folder, capture=False), {"graph", "eager"})
