"""A slower instruction set than the best runs, and the report says which and why: forced, or
because the processor has no better."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.records import Fallback
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels.cpu import build, library
from setpoint.engine.kernels.cpu.choices import summary
from setpoint.engine.runner.model_runner import LoadReport
from setpoint_testing.cpu_levels import LEVELS, each_level
from setpoint_testing.plans import Driver
from setpoint_testing.tiny_models import write_tiny_llama

AVX2_ONLY = {each for each in build._cpu_flags() if not each.startswith(("avx512", "amx"))}
"""This machine's flags as far as they go, so that the library is the one that all tests here use."""


@pytest.fixture(autouse=True)
def fresh_library() -> Iterator[None]:
    library._load.cache_clear()
    yield
    library._load.cache_clear()


def report_of(tmp_path: Path) -> LoadReport:
    """The report of a runner that has generated something."""
    folder = write_tiny_llama(tmp_path)
    runner = build_runner(EngineConfig(str(folder), read_spec(folder), num_threads=1))
    runner.allocate(num_pages=64, max_slots=1, context_len=32)
    prompt = np.random.default_rng(1).integers(3, 131, 9).tolist()
    assert len(Driver(InprocExecutor(runner), 1, 32).generate({0: prompt}, 4)[0]) == 4
    return runner.report


@each_level
def test_a_forced_level_runs_and_the_report_says_what_would(
    tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SETPOINT_CPU_ISA", level)
    report = report_of(tmp_path)
    assert (report.ops, report.linear, report.attention, report.level) == (
        "cpu",
        "cpu",
        "cpu",
        level,
    )
    fallback = Fallback(
        f"C++ kernels run at the level {level}",
        f"SETPOINT_CPU_ISA asks for it; this machine can run {LEVELS[0]}",
    )
    assert (fallback in report.fallbacks) == (level != LEVELS[0])
    kernels = library.load()
    measured = not report.emulated and any(len(n) > 1 for n in kernels.implementations.values())
    assert bool(report.choices) == measured
    assert report.choices == summary(kernels.choices)


@pytest.mark.skipif("avx2" not in LEVELS, reason="this machine has no AVX2")
@pytest.mark.parametrize(
    ("flags", "level", "words"),
    [
        pytest.param(
            AVX2_ONLY,
            "avx2",
            "this CPU has no avx512bw, avx512dq, avx512f, avx512vl, which avx512 needs",
            marks=pytest.mark.full,
        ),
        (set(), "scalar", "this CPU has no avx2, fma, which avx2 needs"),
    ],
)
def test_a_processor_without_the_best_level_runs_the_next_and_says_so(
    tmp_path: Path, flags: set[str], level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_cpu_flags", lambda: flags)
    report = report_of(tmp_path)
    assert (report.ops, report.linear, report.attention, report.level) == (
        "cpu",
        "cpu",
        "cpu",
        level,
    )
    assert Fallback(f"C++ kernels run at the level {level}", words) in report.fallbacks


def test_a_level_that_the_processor_lacks_is_refused_by_every_kernel_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_cpu_flags", lambda: AVX2_ONLY)
    monkeypatch.setenv("SETPOINT_CPU_ISA", "avx512")
    report = report_of(tmp_path)
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # asks the real processor
    assert (report.ops, report.linear, report.attention, report.level) == (
        "ref",
        "packed" if has_bf16 else "plain",
        "torch_ref",
        "",
    )
    assert (
        sum(
            "this machine cannot run the level 'avx512'; it can run avx2, scalar" in fallback.why
            for fallback in report.fallbacks
        )
        == 3
    )
