"""What the runner holds: KV dtype apart from the model's, bytes as planned, and bounded memory for
prompt logprobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import OutOfMemoryError
from setpoint.core.plan import PlanBuilder
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.result import PositionLogprobs
from setpoint.engine.executor.build_runner import KV_DTYPES, EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.engine.sampling import logprobs
from setpoint_testing.plans import Driver
from setpoint_testing.tiny_models import write_tiny_llama

PROMPT = np.random.default_rng(1).integers(3, 131, 40).tolist()


def runner_of(folder: Path, dtype: str, kv_dtype: str, attention: str = "auto") -> ModelRunner:
    config = EngineConfig(
        str(folder),
        read_spec(folder),
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=4,
        attention_backend=attention,
        num_threads=1,
    )
    runner = build_runner(config)
    runner.allocate(num_pages=64, max_slots=4, context_len=64)
    return runner


@pytest.mark.parametrize("attention", ["torch_ref", "auto"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("float32", "fp8_e4m3"),
        ("bfloat16", "fp8_e5m2"),
    ],
)
def test_kv_dtype_may_differ_from_the_models(
    tmp_path: Path, dtype: str, kv_dtype: str, attention: str
) -> None:
    folder = write_tiny_llama(tmp_path)
    logits = []
    for kinds in (("float32", "float32", "torch_ref"), (dtype, kv_dtype, attention)):
        runner = runner_of(folder, *kinds)
        driver = Driver(InprocExecutor(runner), 4, 16)
        plan = driver.plan()
        driver.admit(plan, 0, PROMPT)
        plan.add_row(0, 0, 0, len(PROMPT), 1)
        logits.append(runner.forward(plan.build()).logits.clone())
    assert runner.pool.memory.dtype == KV_DTYPES[kv_dtype]
    bound = 1.0 if "fp8" in kv_dtype else 0.1
    assert 0 < (logits[0] - logits[1]).abs().max() < bound * logits[0].std()


def test_bytes_are_those_planned(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    runner = runner_of(folder, "float32", "bfloat16")
    assert runner.pool.num_bytes == (64 + 1) * 4 * read_spec(folder).kv_bytes_per_token(2)
    assert runner.slots.num_bytes == (4 + 1) * (65 + 16) * 4  # and the row of padding


def test_no_room_for_the_pool_is_one_clear_error(tmp_path: Path) -> None:
    runner = runner_of(write_tiny_llama(tmp_path), "float32", "float32")
    with pytest.raises(
        OutOfMemoryError, match="No memory on cpu for a KV pool of 1000000000000 pages"
    ):
        runner.allocate(num_pages=10**12, max_slots=4, context_len=64)


def test_plan_without_rows_delivers_its_admissions(tmp_path: Path) -> None:
    driver = Driver(
        InprocExecutor(runner_of(write_tiny_llama(tmp_path), "float32", "float32")), 4, 16
    )
    wanted = driver.generate({1: PROMPT}, 5)[1]
    plan = driver.plan()
    driver.admit(plan, 0, PROMPT)
    result = driver.run(plan)
    assert len(result.seq_ids) == len(result.token_ids) == 0
    plan = PlanBuilder(99)
    plan.add_row(0, 0, 0, len(PROMPT), 1)
    driver.run(plan)
    driver.decode([0], 4)
    assert driver.outputs[0] == wanted


@pytest.mark.parametrize("rows_per_block", [1, 7])
def test_prompt_logprobs_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_block: int
) -> None:
    folder = write_tiny_llama(tmp_path)

    def run() -> PositionLogprobs:
        driver = Driver(InprocExecutor(runner_of(folder, "float64", "float64")), 4, 16)
        plan = driver.plan()
        wants = RequestOptions(logprobs=LogprobOptions(top=2))
        driver.admit(plan, 0, PROMPT, options=wants, logprob_start=4)
        plan.add_row(0, 0, 0, len(PROMPT), 1)
        return driver.run(plan).prompt_logprobs[0]

    whole = run()
    monkeypatch.setattr(logprobs, "REPORT_BYTES", 4 * 131 * rows_per_block)
    pieces = run()
    assert whole.ids.tolist() == pieces.ids.tolist() == PROMPT[4:]
    np.testing.assert_allclose(pieces.values, whole.values, rtol=1e-6)
    assert pieces.top_ids.tolist() == whole.top_ids.tolist()
