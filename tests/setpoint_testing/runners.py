"""Runners of small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.plans import Driver


def runner_of(folder: Path, *, dtype: str = "bfloat16", **fields: Any) -> ModelRunner:
    """A runner with a pool for four rows of 64 tokens. ``fields``: of EngineConfig."""
    config = EngineConfig(
        str(folder), read_spec(folder), dtype=dtype, kv_dtype=dtype, page_size=4, **fields
    )
    runner = build_runner(config)
    runner.allocate(num_pages=128, max_slots=4, context_len=64)
    return runner


def logits_of(runner: ModelRunner, num_tokens: int) -> torch.Tensor:
    ids = np.random.default_rng(0).integers(3, 100, num_tokens).tolist()
    driver = Driver(InprocExecutor(runner), 4, 16, len(runner.pool.layout.groups))
    plan = driver.plan()
    driver.admit(plan, 0, ids)
    plan.add_row(0, 0, 0, len(ids), 1)
    return runner.forward(plan.build()).logits


def distance(logits: torch.Tensor, others: torch.Tensor) -> float:
    """The root mean square difference of two sets of logits, as a share of their spread."""
    return float((logits - others).float().square().mean().sqrt() / others.float().std())
