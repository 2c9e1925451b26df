"""Steps through torch.compile: the same tokens, nothing compiled while serving, and the reason
wherever it is not used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor import compiling
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.compiling import CompileReport, Duration, compile_steps
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.layers.opaque import TracedOps
from setpoint.engine.runner.compiled_way import CompiledWay
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.plans import Driver, allocate_rows
from setpoint_testing.tiny_models import write_tiny_llama

MAX_TOKENS = 8
PROMPTS = {
    slot: np.random.default_rng(slot).integers(3, 131, length).tolist()
    for slot, length in enumerate((5, 17, 40))
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without its slow half: what is traced runs operation by operation, and is used
    although that gains nothing."""
    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **how: compile_with(function, backend="eager", **how)
    )
    monkeypatch.setattr(compiling, "_worth_it", lambda durations: (durations[-1].num_tokens, ""))
    monkeypatch.setenv(compiling.CACHE_VARIABLE, "/not/used")


def runner_of(folder: Path, model_impl: str, dtype: str) -> ModelRunner:
    write_tiny_llama(folder)
    config = EngineConfig(
        str(folder),
        read_spec(folder),
        dtype=dtype,
        kv_dtype=dtype,
        page_size=4,
        model_impl=model_impl,
        num_threads=1,
    )
    runner = build_runner(config)
    allocate_rows(runner, num_rows=96, max_slots=3, context_len=128)
    return runner


def generate(runner: ModelRunner) -> dict[int, list[int]]:
    """Compute the prompts in chunks of 11 tokens, then decode three rows at a time, later fewer."""
    return Driver(InprocExecutor(runner), 4, 32, runner.num_groups).generate(PROMPTS, 16, chunk=11)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model_impl", "dtype"), [("setpoint", "float64"), ("transformers", "bfloat16")]
)
def test_compiled_steps_say_the_same(
    tmp_path: Path,
    model_impl: str,
    dtype: str,
    traced: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = runner_of(tmp_path, model_impl, dtype)
    wanted = generate(runner)
    report = compile_steps(runner, MAX_TOKENS)
    assert (report.max_tokens, report.why_not_more, report.num_graphs) == (MAX_TOKENS, "", 2)
    assert [duration.num_tokens for duration in report.durations] == [1, 4, 8]
    sizes = []
    hidden = CompiledWay._hidden
    monkeypatch.setattr(
        CompiledWay,
        "_hidden",
        lambda self, batch: sizes.append(batch.num_tokens) or hidden(self, batch),
    )
    assert generate(runner) == wanted
    assert {1, 3} <= set(sizes) <= set(range(1, MAX_TOKENS + 1))
    plans = [
        compiling._last_tokens(len(PROMPTS[0]) + 16, size) for size in (MAX_TOKENS, MAX_TOKENS + 1)
    ]
    assert [runner.forward(plan).way.name for plan in plans] == ["compiled", "eager"]
    runner.ways[0].max_tokens = MAX_TOKENS + 3
    assert runner.forward(plans[-1]).way.name == "eager", "the compiled code did not fit"
    assert runner.ways[0].max_tokens == 0
    assert generate(runner) == wanted
    assert "torch.compile is off from now on" in caplog.text


def test_where_only_own_kernels_run_there_is_nothing_to_compile(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "setpoint", "bfloat16")
    report = compile_steps(runner, MAX_TOKENS)
    assert report == CompileReport(
        why_not_more=(
            "a layer consists of the engine's own kernels (cpu) and has no torch operations to"
            " compile"
        )
    )
    assert [way.name for way in runner.ways] == ["replay", "eager"]


def check_unchanged(runner: ModelRunner, *, why: str) -> None:
    wanted = generate(runner)
    report = compile_steps(runner, MAX_TOKENS)
    assert report.max_tokens == 0
    assert why in report.why_not_more
    assert [way.name for way in runner.ways] == ["eager"]
    assert generate(runner) == wanted


def test_a_compiler_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no space left\non that device")

    monkeypatch.setattr(torch, "compile", lambda function, **how: fail)
    check_unchanged(runner_of(tmp_path, "setpoint", "float64"), why="OSError: no space left")


def test_another_answer_is_a_reason(
    tmp_path: Path, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TracedOps, "silu_mul", lambda self, gate_up: gate_up.chunk(2, dim=-1)[1])
    check_unchanged(runner_of(tmp_path, "setpoint", "float64"), why="its logits differ by")


def test_compiled_code_is_used_as_far_as_it_is_faster() -> None:
    durations = [
        Duration(1, 1.0, 2.0),
        Duration(4, 1.0, 1.5),
        Duration(16, 2.0, 2.0),
        Duration(32, 3.0, 4.0),
    ]
    assert compiling._worth_it(durations) == (4, "compiled code is not faster at 16 tokens")
    assert compiling._worth_it(durations[:2]) == (4, "")
    assert compiling._worth_it(durations[2:]) == (0, "compiled code is not faster at 16 tokens")


REPORT = """
import json, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_torch_compile import generate, runner_of
from setpoint.engine.executor import compiling
compiling._worth_it = lambda durations: (durations[-1].num_tokens, "")
runner = runner_of(Path(sys.argv[2]), sys.argv[3], "float32" if sys.argv[3] == "transformers" else "float64")
before = generate(runner)
report = compiling.compile_steps(runner, 8)
print(json.dumps({**asdict(report), "same": generate(runner) == before}))
"""


def report_of_a_process(tmp_path: Path, model_impl: str, **environment: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-c",
        REPORT,
        str(Path(__file__).parent),
        str(tmp_path / "model"),
        model_impl,
    ]
    environment = {**os.environ, compiling.CACHE_VARIABLE: str(tmp_path / "cache"), **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.full
@pytest.mark.parametrize("model_impl", ["setpoint", "transformers"])
def test_a_second_process_finds_everything_in_the_cache(tmp_path: Path, model_impl: str) -> None:
    for num_reused in (0, 2):
        report = report_of_a_process(tmp_path, model_impl)
        assert report["why_not_more"] == ""
        assert (report["max_tokens"], report["num_graphs"], report["num_reused"]) == (
            8,
            2,
            num_reused,
        )
        assert report["same"]


@pytest.mark.full
def test_without_a_compiler_or_a_folder_to_write_to_steps_run_as_before(tmp_path: Path) -> None:
    report = report_of_a_process(tmp_path, "transformers", CXX="no-such-compiler")
    assert report["same"]
    assert report["max_tokens"] == 0
    assert "compiler" in report["why_not_more"].lower()
    (tmp_path / "file").write_text("a file where a folder should be")
    no_folder = {compiling.CACHE_VARIABLE: str(tmp_path / "file")}
    report = report_of_a_process(tmp_path, "setpoint", **no_folder)
    assert report["same"]
    assert report["max_tokens"] == 0
    assert "FileExistsError" in report["why_not_more"]
    with pytest.raises(
        subprocess.CalledProcessError
    ) as failed:  # transformers loads torch's compiler itself
        report_of_a_process(tmp_path, "transformers", **no_folder)
    assert "cannot be served through transformers: FileExistsError" in failed.value.stderr
