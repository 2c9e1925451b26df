"""Weights in a mapped file: the same answers, before and after they were away; no memory meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import OutOfMemoryError
from setpoint.core.operations import MemoryPart, ReleaseMemory, RestoreMemory
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.engine_operations import EngineOperator
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint_testing.conversion import converted_under
from setpoint_testing.gguf_families import CONFIGS, mixed, write_model
from setpoint_testing.plans import Driver, allocate_rows
from setpoint_testing.tiny_models import write_tiny_llama

PARTS = list(MemoryPart)
PROMPTS = {0: [5, 17, 99, 3], 1: [20, 21]}
BIG = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048, "num_hidden_layers": 4}


def make(
    folder: Path, weights_folder: str, dtype: str, quantization: str | None = None
) -> tuple[Driver, EngineOperator]:
    spec = read_spec(folder)
    config = EngineConfig(
        model_folder=str(folder),
        spec=spec,
        dtype=dtype,
        quantization=quantization,
        weights_folder=weights_folder,
    )
    runner = build_runner(config)
    num_groups = allocate_rows(runner, num_rows=192, max_slots=4, context_len=64)
    executor = InprocExecutor(runner)
    operator = EngineOperator(
        runner, executor.profiler, config, available_bytes=lambda: 1 << 40, heartbeat=lambda: None
    )
    return Driver(executor, 1, 48, num_groups), operator


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_the_same_after_the_weights_were_away(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny_llama(tmp_path / "model", **BIG)
    alone, _ = make(folder, "", dtype)
    wanted = alone.generate(PROMPTS, 8)
    driver, operator = make(folder, str(tmp_path / "weights"), dtype)
    assert driver.generate(PROMPTS, 8) == wanted
    for call in range(3):
        operator.operate(call, ReleaseMemory(PARTS))
        assert operator.released == set(PARTS)
        operator.operate(call, RestoreMemory(PARTS))
        assert operator.released == frozenset()
        assert driver.generate(PROMPTS, 8) == wanted
    assert os.listdir(tmp_path / "weights") == [], "the file has no name"


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "w8a8_int8")]
)
def test_no_memory_is_kept_for_weights_that_are_away(
    tmp_path: Path, dtype: str, quantization: str | None
) -> None:
    folder = write_tiny_llama(tmp_path / "model", **{**BIG, "vocab_size": 40_000})
    driver, operator = make(folder, str(tmp_path / "weights"), dtype, quantization)
    driver.generate(PROMPTS, 2)
    size = operator._runner.report.weight_bytes
    away = []
    for call in range(2):
        operator.operate(call, ReleaseMemory(PARTS))
        away.append(resident())
        operator.operate(call, RestoreMemory(PARTS))
        assert resident() - away[-1] > 0.9 * size
    assert away[1] < away[0] + 0.1 * size


def test_a_disk_without_room_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemoryError, match=r"cannot be written to .*No space left on device"):
        make(write_tiny_llama(tmp_path / "model"), str(tmp_path), "float32")


@pytest.mark.cases(5)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_family_has_the_same_logits_from_a_file(tmp_path: Path, architecture: str) -> None:
    """With blocks in panels and with matrices in bfloat16; biases and experts among them."""
    path, checkpoint = write_model(tmp_path, architecture, mixed)
    converted = converted_under(tmp_path / "cache", path)
    for folder in (converted, checkpoint):
        alone, _ = make(folder, "", "bfloat16")
        driver, operator = make(folder, str(tmp_path / "weights"), "bfloat16")
        wanted = logits_of(alone)
        assert torch.equal(logits_of(driver), wanted)
        operator.operate(0, ReleaseMemory(PARTS))
        operator.operate(0, RestoreMemory(PARTS))
        assert torch.equal(logits_of(driver), wanted)


def logits_of(driver: Driver) -> torch.Tensor:
    plan = driver.plan()
    driver.admit(plan, 0, list(range(5, 42)))
    plan.add_row(0, 0, 0, 37, 1)
    return driver.executor.runner.forward(plan.build()).logits.clone()
