"""The lines of a start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from setpoint.core.footprint import Footprint
from setpoint.core.graph_sizes import GraphSizes
from setpoint.launch.child.loading import cache_sizes, log_planned
from setpoint.planning.memory import GIB, MIB, activation_bytes
from setpoint_testing.specs import memory_of, tiny_spec


def test_latent_attention_has_no_k_and_v() -> None:
    assert cache_sizes(1 << 30, is_latent=False) == "K size: 0.50 GB, V size: 0.50 GB"
    assert cache_sizes(1 << 30, is_latent=True) == "KV size: 1.00 GB"


def test_what_memory_takes_stands_beside_what_was_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A part that takes much more than planned is a warning."""
    caplog.set_level("INFO")
    spec = replace(tiny_spec(num_parameters=8 * GIB), hidden_size=1 << 16)
    model = replace(
        memory_of(spec, dtype_bytes=2, kv_element_bytes=2, context_len=512, step_tokens=4096),
        device="cuda",
        head_copied=False,
        graph_sizes=GraphSizes((1, 256), (4, 8)),
    )
    plan = model.plan(80 * GIB)
    assert plan.graphs_bytes == 528 * MIB
    planned = activation_bytes(spec, num_tokens=4096, dtype_bytes=2)
    footprint = Footprint(16 * GIB, 0, None, 4096, int(1.2 * planned))
    log_planned(model, plan, footprint, pool_bytes=plan.kv_bytes, graph_bytes=GIB // 2)
    gib = f"{planned / GIB:.2f}", f"{1.2 * planned / GIB:.2f}"
    kv = f"{plan.kv_bytes / GIB:.2f}"
    assert caplog.messages == [
        "The weights take 16.00 GB of memory; 16.00 GB were planned.",
        f"Activations of a step of 4096 tokens take {gib[1]} GB of memory; {gib[0]} GB were planned.",
        f"The KV cache takes {kv} GB of memory; {kv} GB were planned.",
        "Graphs take 0.50 GB of memory; 0.52 GB were planned.",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO", "INFO"]
    caplog.clear()
    none = replace(footprint, activations=None)
    log_planned(model, replace(plan, graphs_bytes=0), none, pool_bytes=1, graph_bytes=0)
    assert len(caplog.messages) == 2, "what was not measured or is not there is not told"
