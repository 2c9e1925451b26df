"""Steps of mixtures of experts as graphs compute what eager steps compute. In float32, the widest type
of the kernel that multiplies experts; it is interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.core.graph_sizes import GraphSizes
from setpoint.engine.quant import grouped, linear_method
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.fake_graphs import FakeGraphs
from setpoint_testing.graph_steps import (
    FAMILIES,
    MIXTURES,
    compare,
    make_runner,
    pretend_graphs,
)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraphs]:
    return pretend_graphs(monkeypatch)


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
