"""Matrix tiles: instructions and plain code in their order give the same bits, and machines that
refuse tiles get the next level."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_cpu_attention import CASES, Case, Problem, make_problem

from setpoint.engine.kernels.cpu import build, library
from setpoint.engine.kernels.ops import SILU
from setpoint.engine.quant import cpu_linear as cpu_linear
from setpoint.engine.quant import w8a8_int8_cpu
from setpoint_testing.cpu_levels import LEVELS, QUICK

BF16 = torch.bfloat16
SIZES = [(96, 576), (70, 36), (1, 2), (33, 100), (64, 1536)]
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 65, 130)

on_tiles = pytest.mark.skipif("amx" not in LEVELS, reason="this machine has no matrix tiles")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def odd_numbers(*shape: int) -> torch.Tensor:
    """Normal numbers, and now and then a subnormal one, a zero of either sign, a huge one or an
    infinity."""
    x = torch.randn(shape).to(BF16)
    odd = torch.tensor([1e-39, -1e-40, 0.0, -0.0, 3e38, -3e38, torch.inf]).to(BF16)
    return torch.where(torch.rand(shape) < 0.01, odd[torch.randint(0, len(odd), shape)], x)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


@on_tiles
@pytest.mark.parametrize(("columns", "k"), SIZES)
@pytest.mark.parametrize("gate", [None, SILU], ids=str)
def test_products_on_tiles_have_the_bits_of_their_emulation(
    columns: int, k: int, gate: str | None
) -> None:
    weight, bias = torch.randn(2 * columns, k).to(BF16), torch.randn(2 * columns).to(BF16)
    methods = [cpu_linear.create(BF16, level=level) for level in ("amx", "amx_emulated")]
    packed = [
        method.pack(weight, bias) if gate is None else method.pack_gated(weight, bias, gate)
        for method in methods
    ]
    for rows in ROWS:
        x = odd_numbers(rows, k)
        results = [linear(x).nan_to_num(7.0) for linear in packed]
        assert torch.equal(bits(results[0]), bits(results[1]))


@on_tiles
@pytest.mark.parametrize(
    "other", ["amx_emulated", pytest.param("avx512_vnni", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(("columns", "k"), SIZES)
@pytest.mark.parametrize("gate", [None, SILU], ids=str)
def test_products_of_8_bits_on_tiles_have_the_bits_of_other_levels(
    columns: int, k: int, gate: str | None, other: str
) -> None:
    """Sums of integers are exact at every level."""
    weight, bias = torch.randn(2 * columns, k).to(BF16), torch.randn(2 * columns).to(BF16)
    ours, theirs = (
        w8a8_int8_cpu.Int8Weight(
            w8a8_int8_cpu.rounded(weight, library.load(level)), bias, library.load(level), gate
        )
        for level in ("amx", other)
    )
    for rows in ROWS:
        x = odd_numbers(rows, k).nan_to_num(1.0, 1.0, -1.0)
        assert torch.equal(bits(ours(x).nan_to_num(7.0)), bits(theirs(x).nan_to_num(7.0)))


@on_tiles
@pytest.mark.parametrize("variant", ["plain", "both"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_on_tiles_has_the_bits_of_its_emulation(case: Case, variant: str) -> None:
    problem: Problem = make_problem(case, BF16, variant=variant)
    assert torch.equal(bits(problem.run_on_cpu("amx")), bits(problem.run_on_cpu("amx_emulated")))


def test_the_emulation_is_never_chosen_by_itself() -> None:
    assert all(not build.is_emulated(level) for level in (build.choose_level(), LEVELS[0]))
    assert build.choose_level("scalar") == "scalar"


def test_a_processor_without_tiles_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        build, "_cpu_flags", lambda: set(build.LEVELS["x86_64"]["avx512_bf16"].needs)
    )
    assert build.choose_level() == "avx512_bf16"
    assert build.why_no_better("avx512_bf16") == ""


@pytest.fixture
def a_machine_with_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever this one is, as far as its flags go; nothing refused so far."""
    # With its own flags, too, so that the libraries are those that all tests here use.
    flags = build._cpu_flags() | build.LEVELS["x86_64"]["amx"].needs
    if "avx512_bf16" not in LEVELS:
        pytest.skip("this machine cannot run the next level either")
    monkeypatch.setattr(build, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(build, "_refused", {})
    library._load.cache_clear()
    yield
    library._load.cache_clear()


@pytest.mark.usefixtures("a_machine_with_tiles")
def test_a_system_that_refuses_tiles_gets_the_next_level_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        build,
        "ask_for_tiles",
        lambda: "Linux does not let this process use matrix tiles: Not supported",
    )
    assert build.choose_level() == "avx512_bf16"
    assert (
        build.why_no_better("avx512_bf16")
        == "Linux does not let this process use matrix tiles: Not supported"
    )
    with pytest.raises(build.BuildError, match="cannot run the level 'amx': Linux does not let"):
        build.choose_level("amx")


@pytest.mark.usefixtures("a_machine_with_tiles")
def test_a_processor_without_a_palette_gets_the_next_level_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(build.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(build, "ask_for_tiles", lambda: "")
    opened = library._open

    def without_palette(level: str) -> library.Kernels:
        kernels = opened(QUICK[0])
        kernels.level, kernels.usable = level, level != "amx"
        return kernels

    monkeypatch.setattr(library, "_open", without_palette)
    assert library.load().level == "avx512_bf16"
    assert "has no palette" in build.why_no_better("avx512_bf16")


def test_linux_refuses_tiles_while_a_signal_stack_is_too_small() -> None:
    """The real refusal, in a process of its own: asked through the same function."""
    if "amx" not in LEVELS:
        pytest.skip("this machine has no matrix tiles")
    code = (
        "import ctypes\nclass Stack(ctypes.Structure):\n    _fields_ = [('at', ctypes.c_void_p),"
        " ('flags', ctypes.c_int), ('size', ctypes.c_size_t)]\nmemory ="
        " ctypes.create_string_buffer(4096)\nlibc = ctypes.CDLL(None)\nassert"
        " libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0\nfrom"
        " setpoint.engine.kernels.cpu import build\nprint(build.choose_level(), '|',"
        " build.why_no_better('avx512_bf16'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    level, why = done.stdout.strip().split(" | ")
    assert level == "avx512_bf16"
    assert why.startswith("Linux does not let this process use matrix tiles: ")


@pytest.mark.full
def test_the_library_for_tiles_compiles_on_any_x86_and_holds_the_instructions(
    tmp_path: Path,
) -> None:
    if shutil.which("objdump") is None:
        pytest.skip("no objdump here")
    built = tmp_path / "amx.so"
    build.compile_library(build.find_compiler(), "amx", built)
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(built)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {line.split("\t")[-1].split()[0] for line in code.splitlines() if line.startswith(" ")}
    assert found >= {"ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease"}
    assert ctypes.CDLL(str(built), mode=os.RTLD_LAZY).setpoint_k_multiple() == 16
