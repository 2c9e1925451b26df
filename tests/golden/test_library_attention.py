"""Attention by libraries against its definition, on packages that are pretended: they take what the
real ones take, and compute with torch (``setpoint_testing.fake_libraries``). Nothing here has run on
a GPU.
"""

from __future__ import annotations

import shutil
import sys
import types
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from setpoint.core.errors import ConfigError
from setpoint.core.graph_sizes import NO_GRAPHS, GraphSizes
from setpoint.engine.attention import fa3_attention, flashinfer_attention, packages
from setpoint.engine.attention.attention_backend import (
    AttentionBackend,
    AttentionShape,
    choose_attention,
)
from setpoint.engine.attention.split_attention import SplitAttention
from setpoint.engine.executor.build_runner import build_runner
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.attention_problems import (
    VARIANTS,
    Case,
    Problem,
    Row,
    make_problem,
    make_shape,
    relative_error,
)
from setpoint_testing.fake_graphs import FakeGraphs
from setpoint_testing.fake_libraries import FakeFlashInfer, flash_attn_with_kvcache
from setpoint_testing.graph_steps import (
    FAMILIES,
    SIZES,
    SLOTS,
    compare,
    config_of,
    make_runner,
    pretend_graphs,
    steps,
)
from setpoint_testing.library_signatures import version

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = {
    "decode": (Row(1, 1), Row(1, 129), Row(1, 400)),
    "mixed": (Row(1, 300), Row(3, 3), Row(2, 400), Row(1, 2), Row(20, 50)),
    "chunk": (Row(70, 120),),
}
TOLERANCE = 8e-3
"""A result is rounded to bf16, with sinks twice, and fa3 takes sinks in bf16."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that are installed, with their versions, on a machine with a Hopper GPU."""
    found = dict(
        version(name)
        for name in ("flash_attn_with_kvcache", "BatchPrefillWithPagedKVCacheWrapper.plan")
    )

    def installed_version(distribution: str) -> str:
        if distribution not in found:
            raise metadata.PackageNotFoundError(distribution)
        return found[distribution]

    monkeypatch.setattr(packages.metadata, "version", installed_version)
    flashinfer, kernels = types.ModuleType("flashinfer"), types.ModuleType("sgl_kernel.flash_attn")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = FakeFlashInfer
    kernels.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "sgl_kernel", types.ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", kernels)
    monkeypatch.setattr(FakeFlashInfer, "made", [])
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    on_gpu(monkeypatch, 90)
    return found


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    for module in (fa3_attention, flashinfer_attention):
        monkeypatch.setattr(module, "compute_capability", lambda device: capability)


def problem(
    rows: str, page: int, variant: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> Problem:
    return make_problem(Case(8, 2, 64, page, ROWS[rows]), dtype, kv_dtype, variant)


@pytest.mark.cases(15)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_it_is_the_attention_of_the_definition(
    name: str, page: int, variant: str, rows: str, installed: dict[str, str]
) -> None:
    """Pages of no row, and those before a row's window, are NaN or no pages at all."""
    given = problem(rows, page, variant, BF16)
    expected = given.reference()
    hide_before_windows(given)
    backend = choose_attention(name, given.shape).impl
    assert relative_error(given.run(backend), expected) < TOLERANCE


def hide_before_windows(given: Problem) -> None:
    """Make the entries of page tables undefined before the windows of the rows."""
    if given.variant.window is None:
        return
    page, counts = given.shape.page_size, given.batch.cu_q.diff()
    for slot, length, count in zip(
        given.batch.slots.tolist(), given.batch.kv_lens.tolist(), counts.tolist(), strict=True
    ):
        hidden = max(length - count - given.variant.window + 1, 0) // page
        given.batch.page_table[slot, :hidden] = 1 << 30


def test_windows_begin_within_the_rows() -> None:
    """The rows of the test above have pages before their windows."""
    given = problem("mixed", 16, "window100", BF16)
    hide_before_windows(given)
    table = given.batch.page_table[given.batch.slots.long()]
    assert (table[:, 0] == 1 << 30).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_an_8_bit_cache_has_scales(kv_dtype: torch.dtype, installed: dict[str, str]) -> None:
    given = problem("mixed", 16, "softcap", FP16, kv_dtype)
    given.variant = replace(given.variant, k_scale=0.75, v_scale=2.5)
    backend = choose_attention("flashinfer", given.shape).impl
    assert relative_error(given.run(backend), given.reference()) < TOLERANCE


def test_plans_take_turns_in_pinned_memory(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a plan is written again only when the device has copied it."""
    marks: list[object] = []
    waited: list[object] = []

    def mark() -> object:
        marks.append(object())
        return marks[-1]

    monkeypatch.setattr(flashinfer_attention, "marker", lambda device: mark)
    monkeypatch.setattr(flashinfer_attention, "wait", waited.append)
    given = problem("mixed", 16, "plain", BF16)
    backend = choose_attention("flashinfer", given.shape).impl
    expected = given.reference()
    for number in range(5):
        assert relative_error(given.run(backend), expected) < TOLERANCE
        assert waited == marks[: max(number - 1, 0)], "the plan before the last one"
    assert [len(each.plans) for each in FakeFlashInfer.made] == [2, 3]


def test_layers_of_a_kind_share_a_plan(installed: dict[str, str]) -> None:
    given = problem("mixed", 16, "window100", BF16)
    backend = choose_attention("flashinfer", given.shape).impl
    for _ in range(2):
        backend.prepare(given.batch)
        for window in (100, None, 100, None):
            variant = replace(given.variant, window=window)
            backend.forward(given.q, given.k_cache, given.v_cache, given.batch, variant)
    assert sum(len(each.plans) for each in FakeFlashInfer.made) == 4


REFUSALS = [
    ("fa3", {}, 80, "capability 9.0, and this one has 8.0; triton needs no package"),
    ("fa3", {}, 100, "and this one has 10.0"),
    ("fa3", {}, 0, "and cpu is none"),
    ("flashinfer", {}, 75, "capability 8.0 and more, and this one has 7.5; triton"),
    ("flashinfer", {}, 0, "and cpu is none"),
    ("fa3", {"kv_dtype": E4M3}, 90, "torch.bfloat16 with torch.float8_e4m3fn in the cache"),
    ("fa3", {"dtype": torch.float32}, 90, "takes bf16 and fp16"),
    ("flashinfer", {"dtype": torch.float32}, 90, "takes bf16 and fp16"),
    ("fa3", {"head_dim": 512}, 90, "head dimensions up to 256 that are multiples of 8, not 512"),
    ("flashinfer", {"head_dim": 96}, 90, "head dimensions 64, 128, 256, not 96"),
    ("fa3", {"v_head_dim": 32}, 90, "latent attention (K of 64 numbers, V of 32) is not adapted"),
    ("flashinfer", {"v_head_dim": 32}, 90, "latent attention (K of 64 numbers, V of 32)"),
]


@pytest.mark.parametrize(("name", "changes", "capability", "words"), REFUSALS)
def test_what_it_does_not_take_is_refused_with_the_reason(
    name: str,
    changes: dict[str, Any],
    capability: int,
    words: str,
    installed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu(monkeypatch, capability)
    shape = make_shape(8, 2, 64, 16, BF16)
    if "dtype" in changes:
        changes = {"kv_dtype": changes["dtype"], **changes}
    refused(name, replace(shape, **changes), words)


def refused(name: str, shape: AttentionShape, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_attention(name, shape)
    assert f"Cannot run here: {name}: " in str(caught.value)
    assert words in str(caught.value)


PACKAGES = [("fa3", "sglang-kernel"), ("flashinfer", "flashinfer-python")]


@pytest.mark.parametrize(("name", "package"), PACKAGES)
def test_a_package_that_is_missing_or_of_another_version_is_named(
    name: str, package: str, installed: dict[str, str]
) -> None:
    shape, known = make_shape(8, 2, 64, 16, BF16), installed.pop(package)
    refused(name, shape, f"the package {package} is not installed (known are {package}>=")
    first, second, _ = known.split(".")
    for other in (f"{first}.{second}", f"{first}.{int(second) + 1}.0", "nightly"):
        installed[package] = other
        refused(name, shape, f"{package} {other} is installed, and only {package}>={known},<")
    for other in (f"{known}.post1", f"{known}+cu130", f"{first}.{second}.99"):
        installed[package] = other
        assert choose_attention(name, shape).name == name


@pytest.mark.parametrize(("name", "package"), PACKAGES)
def test_a_package_for_another_torch_is_an_error_with_its_own_words(
    name: str, package: str, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(module: str) -> None:
        raise ImportError("undefined symbol: c10\nmore")

    monkeypatch.setattr(packages.importlib, "import_module", broken)
    with pytest.raises(KernelsUnavailable) as caught:
        (fa3_attention if name == "fa3" else flashinfer_attention).PACKAGE.load()
    assert str(caught.value) == (
        f"{package} {installed[package]} cannot be imported (undefined symbol: c10); triton needs"
        " no package"
    )


def test_without_nvcc_flashinfer_needs_its_compiled_kernels(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refused("flashinfer", make_shape(8, 2, 64, 16, BF16), "nor the package flashinfer-jit-cache")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraphs]:
    return pretend_graphs(monkeypatch)


@pytest.mark.cases(4)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("prefill", "decode", "captured"),
    [
        ("fa3", "fa3", SIZES),
        ("fa3", "flashinfer", replace(SIZES, rows=())),
        ("flashinfer", "fa3", replace(SIZES, tokens=())),
        ("flashinfer", "flashinfer", NO_GRAPHS),
    ],
)
def test_steps_of_the_kinds_that_can_be_captured_are(
    family: str,
    prefill: str,
    decode: str,
    captured: GraphSizes,
    tmp_path: Path,
    graphs: list[FakeGraphs],
    installed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps are in float64, which only pretended packages take."""
    for module in (fa3_attention, flashinfer_attention):
        monkeypatch.setattr(module, "DTYPES", (torch.float64,))

    def attention(shape: AttentionShape) -> AttentionBackend:
        first, second = (choose_attention(name, shape).impl for name in (prefill, decode))
        return SplitAttention(first, second)

    folder = write_tiny(tmp_path, FAMILIES[family].config | {"head_dim": 64})
    eager = make_runner(folder, capture=False)
    tried = make_runner(folder, capture=True, attention=attention)
    if captured == NO_GRAPHS:
        assert tried.why_eager == "its attention plans each step on the host"
        (found, ways), (expected, _) = (steps(each, 1) for each in (tried, eager))
        assert set(ways) == {"eager"}
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
        return
    compare(tried, eager, SLOTS, rtol=1e-9, atol=1e-11)
    assert graphs[0].num_captured == len(captured.rows) + len(captured.tokens)


def test_an_engine_has_the_backends_of_its_configuration(
    tmp_path: Path, installed: dict[str, str]
) -> None:
    folder = write_tiny(tmp_path, FAMILIES["llama"].config | {"head_dim": 64})
    config = config_of(
        folder,
        capture=False,
        dtype="bfloat16",
        attention_backend="fa3",
        decode_attention_backend="flashinfer",
    )
    runner = build_runner(config)
    assert runner.report.attention == "fa3 and, for decode steps, flashinfer"
    attention = runner.backends.attention
    assert isinstance(attention, SplitAttention)
    assert isinstance(attention.prefill, fa3_attention.Fa3Attention)
    assert isinstance(attention.decode, flashinfer_attention.FlashInferAttention)
