"""Compares a model whose code comes from another library, run on this engine, with the library's
own result, so that an error is found at start and not later.

Runs steps like any other: admissions, pages, chunks, two rows in a step.
"""

from __future__ import annotations

import numpy as np
import torch

from setpoint.core.cachegroups import cache_layout
from setpoint.core.errors import SetpointError
from setpoint.core.plan import Admit, PlanBuilder
from setpoint.core.sampling import SamplingParams
from setpoint.engine.models.library_model import Undrivable
from setpoint.engine.models.transformers_model import refusal
from setpoint.engine.runner.model_runner import ModelRunner

TOLERANCE = {
    torch.float8_e5m2: 0.5,
    torch.float8_e4m3fn: 0.3,
    torch.bfloat16: 0.1,
    torch.float16: 0.03,
    torch.float32: 1e-3,
    torch.float64: 1e-3,
}
"""Limit of the difference between logits, relative to their norm. Rounding stays well below it; a
wrong mask, position or order gives nearly 1."""


def check_logits(runner: ModelRunner) -> None:
    """Compute the model's ``trial_ids`` twice: in two chunks, and as a whole in the same step as
    the second chunk. Raises CheckpointError unless both give the logits that the model expects. The
    runner's pool holds the trial's tokens afterwards: ``allocate`` it again."""
    ids, page = np.array(runner.model.trial_ids, np.int32), runner.page_size
    num_rows, num_groups = -(-len(ids) // page), len(cache_layout(runner.spec, len(ids)).groups)
    runner.allocate(num_pages=2 * num_rows * num_groups, max_slots=2, context_len=len(ids))
    first, second = PlanBuilder(0, num_groups), PlanBuilder(1, num_groups)
    for slot, plan in enumerate((first, second)):
        plan.admits.append(
            Admit(slot, slot, ids, len(ids), SamplingParams(temperature=0.0), seed=0)
        )
        plan.map_own_rows(slot, num_rows, first=slot * num_rows)
    half = len(ids) // 2
    first.add_row(0, 0, 0, half, 0)
    second.add_row(0, 0, half, len(ids) - half, 1)
    second.add_row(1, 1, 0, len(ids), 1)
    try:
        runner.forward(first.build())
        logits = runner.forward(second.build()).logits
        assert logits is not None, "two rows sample"
        _compare(
            logits.double(),
            runner.model.expected.double(),
            max(TOLERANCE[runner.dtype], TOLERANCE[runner.kv_dtype]),
        )
    except SetpointError:
        raise
    except Exception as error:  # another library's layers can raise anything
        raise refusal(runner.spec, error) from error


def _compare(logits: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Raise Undrivable if a row of ``logits`` [2, V] differs too much from ``expected`` [V]."""
    if logits.shape[1:] != expected.shape:
        raise Undrivable(f"its logits are {logits.shape[1]} wide, not {expected.shape[0]}")
    errors = ((logits - expected).norm(dim=1) / expected.norm()).tolist()
    if not max(errors) <= tolerance:
        chunked, whole = errors
        raise Undrivable(
            f"with this engine's attention its logits differ from the library's by {whole:.2g} of"
            f" their norm, and by {chunked:.2g} when a prompt is computed in chunks (allowed:"
            f" {tolerance:g})"
        )
