"""A measured executor changes no token and counts the work that is done; the machine's limits are
measured at every level."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.core.work import Work
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.executor.measured import MeasuredExecutor, num_visible
from setpoint.engine.kernels.cpu import build, peak_rates
from setpoint.engine.kernels.cpu.library import Kernels, load
from setpoint.engine.layers.linear import Linear, TiedHead
from setpoint.engine.models.library_model import PackedLinear
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.cpu_levels import each_level
from setpoint_testing.plans import Driver
from setpoint_testing.tiny_models import TINY, write_tiny_llama

VNNI = ("avx512_vnni", "avx512_bf16")
TILES = ("amx", "amx_emulated")
"""Levels that multiply bytes four at a time."""

PROMPTS = {0: [*range(3, 40)], 1: [*range(50, 61)]}


def runner_of(folder: Path, **more: object) -> ModelRunner:
    runner = build_runner(
        EngineConfig(str(folder), read_spec(folder), dtype="bfloat16", num_threads=1, **more)
    )
    runner.allocate(num_pages=2 * 64, max_slots=2, context_len=64)
    return runner


@pytest.mark.parametrize(("model_impl", "products"), [("setpoint", 4), ("transformers", 7)])
def test_what_is_counted_is_what_the_model_has_to_do(
    model_impl: str, products: int, tmp_path: Path
) -> None:
    """products: per layer; the library's code stacks none."""
    runner = runner_of(write_tiny_llama(tmp_path), model_impl=model_impl)
    expected = Driver(InprocExecutor(runner), 1, 64).generate(PROMPTS, 5)
    works = []

    class Stepwise(MeasuredExecutor):
        def submit(self, plan):
            if works:
                works[-1] = self.take()
            works.append({})
            return super().submit(plan)

    measured = Stepwise(runner, eager=True)
    assert Driver(measured, 1, 64).generate(PROMPTS, 5) == expected
    measured.take()
    assert Driver(InprocExecutor(runner), 1, 64).generate(PROMPTS, 5) == expected
    assert not measured.take(), "other executors' steps do not count"

    hidden, inner, layers, vocab = (
        TINY["hidden_size"],
        TINY["intermediate_size"],
        TINY["num_hidden_layers"],
        TINY["vocab_size"],
    )
    heads, kv_heads, dim = (
        TINY["num_attention_heads"],
        TINY["num_key_value_heads"],
        TINY["head_dim"],
    )
    weights = layers * hidden * (dim * (2 * heads + 2 * kv_heads) + 3 * inner)
    held = sum(
        module.packed.num_bytes
        for module in runner.model.modules()
        if isinstance(module, Linear | TiedHead | PackedLinear)
    )
    step = next(
        each for each in works[1:] if each and each["linear"].flops == 2 * 2 * weights
    )  # a decode step of both
    assert step["linear"].num_bytes + step["head"].num_bytes == held
    assert step["linear"].num_calls == products * layers
    assert step["head"].flops == 2 * 2 * hidden * vocab
    assert (step["linear"].product, step["elementwise"].product) == ("bfloat16", "")
    keys = step["attention"].num_bytes // (2 * layers * 2 * kv_heads * dim)
    assert 38 + 12 <= keys <= 42 + 16
    assert step["attention"].flops == layers * 4 * heads * dim * keys
    assert step["sampling"].num_bytes == 2 * vocab * 2
    assert 4 * 2 * hidden * 2 < step["elementwise"].num_bytes / step["elementwise"].num_calls * 4
    assert all(isinstance(work, Work) and work.seconds > 0 for work in step.values())


def test_replayed_steps_have_the_times_of_their_program(tmp_path: Path) -> None:
    runner = runner_of(write_tiny_llama(tmp_path))
    assert not runner.why_eager
    expected = Driver(InprocExecutor(runner), 1, 64).generate(PROMPTS, 3)
    measured = MeasuredExecutor(runner, eager=False)
    began = time.perf_counter()
    assert Driver(measured, 1, 64).generate(PROMPTS, 3) == expected
    total = time.perf_counter() - began
    works = measured.take()
    assert {"linear", "attention", "elementwise", "sampling"} <= works.keys()
    assert all(work.seconds > 0 for work in works.values())
    assert sum(work.seconds for work in works.values()) < total
    assert (works["linear"].num_calls, works["linear"].num_bytes) == (0, 0)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_visible_pairs(window: int | None) -> None:
    counts, kv_lens = np.array([1, 5, 4, 9]), np.array([6, 5, 8, 12])
    seen = [
        set(range(max(0, at - (window or 1000) + 1), at + 1))
        for count, kv_len in zip(counts, kv_lens, strict=True)
        for at in range(kv_len - count, kv_len)
    ]
    rows = np.split(np.array(seen, dtype=object), np.cumsum(counts)[:-1])
    assert num_visible(counts, kv_lens, window) == (
        sum(map(len, seen)),
        sum(len(set().union(*row)) for row in rows),
    )


class Timed:
    """The kernels, whose runs take these seconds and then limits.SECONDS each, and the clock that
    says so."""

    def __init__(self, kernels: Kernels, seconds: list[float]) -> None:
        self._kernels = kernels
        self._seconds = iter(seconds)
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    process_time = perf_counter
    """No other program takes the processor."""

    def read_memory(self, *arguments: int) -> object:
        self._now += next(self._seconds, peak_rates.SECONDS)
        return self._kernels.read_memory(*arguments)

    def multiply(self, *arguments: int) -> int:
        self._now += next(self._seconds, peak_rates.SECONDS)
        return int(self._kernels.multiply(*arguments))


@each_level
def test_limits_count_the_work_of_the_fastest_run(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test has a clock of its own: how fast a machine is, and which of its products is the
    fastest, is the machine's affair."""
    kernels = load(level)
    timed = Timed(kernels, [0.004, 0.002, 0.003])
    monkeypatch.setattr(peak_rates, "time", timed)
    found = peak_rates.CpuPeakRates(timed, threads=1)  # type: ignore[arg-type]
    assert found.read_bytes_per_s(5 << 20) == pytest.approx((4 << 20) / 0.002)
    assert (
        found.read_bytes_per_s(1)
        == found.read_bytes_per_s(peak_rates.SMALLEST)
        == pytest.approx(peak_rates.SMALLEST / peak_rates.SECONDS)
    )
    lanes = {
        product: kernels.multiply(number, 1, 1) / kernels.multiply(0, 1, 1)
        for product, number in peak_rates.PRODUCTS.items()
    }
    if (
        level in TILES
    ):  # 16 products of tiles, 16 x 16 x 16 words each, beside 20 products of 16 lanes
        assert lanes == {"float32": 1, "bfloat16": 16**4 * 2 / 320, "int8": 16**4 * 4 / 320}
    else:
        bytes_at_once = level in VNNI or "-mavxvnni" in build._flags(level, more=True)
        assert lanes == {
            "float32": 1,
            "bfloat16": 2 if level == "avx512_bf16" else 1,
            "int8": 4 if bytes_at_once else 1,
        }
    for product, number in peak_rates.PRODUCTS.items():
        assert found.flops(product) == pytest.approx(
            kernels.multiply(number, 1, 1) * peak_rates.ROUNDS / peak_rates.SECONDS
        )
    assert found.flops("float64") == pytest.approx(found.flops("float32"))
    assert found.measured().keys() == {"threads", "read_bytes_per_s", "flops"}


def test_limits_are_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_rates, "SECONDS", 0.01)
    found = peak_rates.CpuPeakRates(load(), threads=1)
    assert all(found.flops(product) > 0 for product in peak_rates.PRODUCTS)
    assert found.read_bytes_per_s(peak_rates.SMALLEST) > 0


def test_no_limits_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_rates.machine_limits("cuda", threads=1) is None
    assert peak_rates.machine_limits("cpu", threads=1) is not None
    monkeypatch.setenv("SETPOINT_CPU_ISA", "sse9")
    assert peak_rates.machine_limits("cpu", threads=1) is None
