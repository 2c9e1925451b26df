"""Graphs of a GPU: each size, with every number of rows that it serves, has bit for bit the results of the
same launches without a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.gpu_device import GPU, NOT_REHEARSED, REHEARSED, SLOTS, device_runner
from setpoint_testing.graph_steps import (
    FAMILIES,
    MIXTURES,
    SIZES,
    make_runner,
    pretend_graphs,
    steps,
)

pytestmark = GPU


def graph_runner(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    if not REHEARSED:
        return device_runner(folder, dtype=dtype, sizes=SIZES)
    pretend_graphs(monkeypatch)
    return make_runner(folder, capture=True)


def compare_each_step(runner: ModelRunner) -> set[tuple[int, int]]:
    """Compare every step of the runner that is replayed from now on with the same launches. -> (tokens
    of the graph, rows of the step) of those steps, filled as they run"""
    way: Any = runner.ways[0]
    assert way.name == "graph", runner.why_eager
    replay, seen = way.run, set()

    @torch.inference_mode()
    def run(batch: Any, *, with_logits: bool) -> Any:
        ran = replay(batch, with_logits=with_logits)
        captured = way._fitting(batch)
        hidden = ran.hidden.clone()
        again = way._pass.hidden(captured.inputs, way._backends)
        tokens, samples = batch.num_tokens, len(batch.sample_slots)
        assert torch.equal(again[:tokens], hidden[:tokens])
        if captured.logits is not None and with_logits:
            index = way._pass.block.rows.sample_index[: len(captured.inputs.slots)]
            answer = way._pass.answer(again, index, way._backends)
            assert torch.equal(answer.logits[:samples], ran.answer.logits[:samples])
            best = ran.answer.best.tensor[:samples]
            assert torch.equal(answer.best.tensor[:samples], best)
        seen.add((captured.inputs.num_tokens, len(batch.slots)))
        return ran

    way.run = run
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_have_the_bits_of_their_launches(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if REHEARSED and (family in MIXTURES or dtype == "bfloat16"):
        pytest.skip("only a GPU can do this")
    folder = write_tiny(tmp_path, FAMILIES[family].config)
    runner = graph_runner(folder, dtype, monkeypatch)
    seen = compare_each_step(runner)
    _, ways = steps(runner, 1, SLOTS)
    assert set(ways) == {"graph", "eager"}
    decoded = {(next(size for size in SIZES.rows if size >= rows), rows) for rows in range(1, 9)}
    assert decoded <= seen
    assert {tokens for tokens, _ in seen} >= set(SIZES.tokens)


@NOT_REHEARSED
def test_graphs_take_memory_that_is_counted(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    runner = device_runner(write_tiny(tmp_path, FAMILIES["llama"].config), sizes=SIZES)
    assert 0 <= runner.ways[0].num_bytes <= free - torch.cuda.mem_get_info()[0]
