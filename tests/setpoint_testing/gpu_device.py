"""The GPU that tests of ``tests/gpu`` run on, and how they are rehearsed without one.

Without a GPU they are skipped. With REHEARSE_GPU_TESTS=1 in the environment they run on the CPU, with
Triton's interpreter and graphs that repeat what was recorded, which shows that the tests work, and
nothing about a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.graph_sizes import NO_GRAPHS, GraphSizes
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.plans import allocate_rows

REHEARSED = os.environ.get("REHEARSE_GPU_TESTS") == "1"
if REHEARSED:
    import setpoint_testing.interpreted_triton  # noqa: F401 - mends the interpreter
DEVICE = torch.device("cpu" if REHEARSED else "cuda")
HERE = REHEARSED or (torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0")
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs a GPU and TRITON_INTERPRET=0, as `make gpu` has"),
]
"""Marks of the files of tests/gpu."""
NOT_REHEARSED = pytest.mark.skipif(REHEARSED, reason="only a GPU can do this")
PAGE, CONTEXT, SLOTS = 4, 64, 9


def device_runner(
    folder: Path, *, dtype: str = "float32", sizes: GraphSizes = NO_GRAPHS, device: str = ""
) -> ModelRunner:
    """A runner with room for SLOTS sequences of CONTEXT tokens, on the GPU or another device, with
    graphs of these sizes."""
    runner = build_runner(
        EngineConfig(
            str(folder),
            read_spec(folder),
            dtype=dtype,
            kv_dtype=dtype,
            page_size=PAGE,
            device=device or DEVICE.type,
            capture=sizes != NO_GRAPHS,
            graph_sizes=sizes,
        )
    )
    allocate_rows(runner, num_rows=SLOTS * CONTEXT // PAGE, max_slots=SLOTS, context_len=CONTEXT)
    return runner
