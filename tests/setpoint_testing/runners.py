"""Runners of small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.runner.model_runner import ModelRunner


def runner_of(folder: Path, *, dtype: str = "bfloat16", **fields: Any) -> ModelRunner:
    """A runner with a pool for four rows of 64 tokens. ``fields``: of EngineConfig."""
    config = EngineConfig(
        str(folder), read_spec(folder), dtype=dtype, kv_dtype=dtype, page_size=4, **fields
    )
    runner = build_runner(config)
    runner.allocate(num_pages=128, max_slots=4, context_len=64)
    return runner
