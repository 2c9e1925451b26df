"""Implementations of a product that give the same bits: that they do, that the fastest one on this
processor is taken, and that a measurement is kept."""

from __future__ import annotations

import ctypes
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_gguf_blocks import quantised, row_of

from setpoint.engine.kernels.cpu import build, choices, library
from setpoint.engine.kernels.cpu.calls import LinearCall
from setpoint.engine.kernels.cpu.choices import CLASS_ROWS, TunedProduct, summary
from setpoint.engine.kernels.cpu.probe import PROBED_ROWS, measure
from setpoint.engine.kernels.ops import GELU_TANH, SILU
from setpoint.engine.quant import blocks as block_linear
from setpoint.engine.quant import cpu_linear as panel_linear
from setpoint.engine.quant import w8a8_int8_cpu
from setpoint_testing.cpu_levels import each_level

BF16 = torch.bfloat16
ROWS = (1, 2, 7, 8, 9, 13, 32, 33, 70, 300)
GATES = (None, SILU, GELU_TANH)
SUBNORMAL, HUGE = 2.0**-130, 3e38


def implementations(level: str, product: str) -> Iterator[str]:
    """Each in turn, for any number of rows; afterwards what was chosen before."""
    kernels = library.load(level)
    names = kernels.implementations[product]
    try:
        for number, name in enumerate(names):
            for size_class in range(len(CLASS_ROWS)):
                kernels.choose(product, size_class, number)
            yield name
    finally:
        for size_class, most in enumerate(CLASS_ROWS):
            taken = next(
                (c.name for c in kernels.choices if (c.product, c.most_rows) == (product, most)),
                names[0],
            )
            kernels.choose(product, size_class, names.index(taken))


def numbers(rows: int, k: int) -> torch.Tensor:
    """Ordinary rows, and some with what has rules of its own: subnormal numbers and products,
    infinity, NaN, sums beyond the largest number."""
    torch.manual_seed(k)
    x = torch.randn(rows, k)
    x[1::7] *= SUBNORMAL
    x[2::7] *= 2.0**-64
    x[3::7] = HUGE
    x[4::7, 0] = torch.inf
    x[5::7, -1] = torch.nan
    return x.to(BF16)


def all_equal(results: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(results[0].view(torch.int16), each.view(torch.int16)) for each in results
    )


@each_level
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("columns", "k"), [(70, 36), (33, 576), (96, 64)])
def test_bf16_has_the_same_bits_however_it_is_multiplied(columns, k, gate, level):
    method = panel_linear.create(BF16, level=level)
    weight, bias = numbers(2 * columns, k), torch.randn(2 * columns).to(BF16)
    weight[::5] = torch.randn(weight[::5].shape).to(BF16)
    for b in (None, bias):
        packed = method.pack(weight, b) if gate is None else method.pack_gated(weight, b, gate)
        for rows in ROWS:
            x = numbers(rows, k)
            assert all_equal([packed(x) for _ in implementations(level, "bf16")]), (rows, b)


@pytest.mark.cases(19)
@each_level
@pytest.mark.parametrize("kind", block_linear.KINDS)
def test_blocks_have_the_same_bits_however_they_are_multiplied(kind, level):
    k = row_of(kind, 5)
    blocks, weight = quantised(kind, 96, k)
    for gate in GATES:
        method, panels = (
            block_linear.create(BF16, level=level),
            panel_linear.create(BF16, level=level),
        )
        packed, words = (
            (method.pack(blocks, None), panels.pack(weight, None))
            if gate is None
            else (method.pack_gated(blocks, None, gate), panels.pack_gated(weight, None, gate))
        )
        for rows in ROWS:
            x = numbers(rows, k)
            both = [(packed(x), words(x)) for _ in implementations(level, "bf16")]
            assert all_equal([each for pair in both for each in pair]), (rows, gate)


@each_level
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("columns", "k"), [(70, 37), (33, 576), (96, 64)])
def test_int8_has_the_same_bits_however_it_is_multiplied(columns, k, gate, level):
    method = w8a8_int8_cpu.create(BF16, level=level)
    weight, bias = torch.randn(2 * columns, k).to(BF16), torch.randn(2 * columns).to(BF16)
    for b in (None, bias):
        packed = method.pack(weight, b) if gate is None else method.pack_gated(weight, b, gate)
        for rows in ROWS:
            x = numbers(rows, k)
            assert all_equal([packed(x) for _ in implementations(level, "int8")]), (rows, b)


def test_the_mode_of_the_processor_is_left_as_it_was() -> None:
    """Products that flush subnormal numbers do not make others flush them."""
    level = build.choose_level()
    packed = panel_linear.create(BF16, level=level).pack(numbers(64, 64), None)
    for _ in implementations(level, "bf16"):
        packed(numbers(40, 64))
        tiny = torch.full((1000,), 2.0**-127)
        assert (tiny * 0.5 != 0).all()


class Scripted:
    """Kernels of given speeds: seconds of CPU time of a call, by implementation and class."""

    def __init__(
        self,
        *seconds: tuple[float, ...],
        wrong: int | None = None,
        wrong_classes: tuple[int, ...] = (0, 1, 2, 3),
    ) -> None:
        """``wrong``: an implementation whose bits differ in these classes."""
        self.implementations = {
            "bf16": ["first", "second", "third"][: len(seconds)],
            "int8": ["one"],
        }
        self._seconds = seconds
        self._wrong, self._wrong_classes = wrong, wrong_classes
        self._now = 0.0
        self._class = 0
        self.chosen = dict.fromkeys(range(len(CLASS_ROWS)), 0)

    def choose(self, product: str, size_class: int, implementation: int) -> None:
        assert product == "bf16"
        self.chosen[size_class] = implementation
        self._class = size_class

    def linear(self, address: int) -> None:
        implementation = self.chosen[self._class]
        self._now += self._seconds[implementation][self._class]
        result = LinearCall.from_address(address).out
        ctypes.c_uint16.from_address(result).value = (
            implementation == self._wrong and self._class in self._wrong_classes
        )

    linear_int8 = linear

    def thread_time(self) -> float:
        return self._now


def chosen(
    monkeypatch: pytest.MonkeyPatch, kernels: Scripted, folder: Path
) -> tuple[TunedProduct, ...]:
    monkeypatch.setattr(time, "thread_time", kernels.thread_time)
    return choices.choose(kernels, folder / "level-1.so", measure)


def test_the_fastest_is_chosen_for_each_class_and_the_first_if_it_is_hardly_slower(
    monkeypatch, tmp_path
):
    kernels = Scripted((10e-6, 20e-6, 103e-6, 400e-6), (12e-6, 10e-6, 100e-6, 200e-6))
    made = chosen(monkeypatch, kernels, tmp_path)
    assert list(kernels.chosen.values()) == [0, 1, 0, 1]
    assert [(each.most_rows, each.name) for each in made] == [
        (1, "first"),
        (8, "second"),
        (32, "first"),
        (None, "second"),
    ]
    assert summary(made) == (
        "bf16 products on first with 1 row (on second they take 1.20 times as long), on second up to"
        " 8 rows (on first they take 2.00 times as long), on first up to 32 rows (on second they take"
        " 0.97 times as long), on second above (on first they take 2.00 times as long)"
    )


def test_an_implementation_that_gives_other_bits_here_is_not_taken(monkeypatch, tmp_path):
    kernels = Scripted((50e-6,) * 4, (10e-6,) * 4, (20e-6,) * 4, wrong=1)
    made = chosen(monkeypatch, kernels, tmp_path)
    assert list(kernels.chosen.values()) == [2] * 4
    assert summary(made) == (
        "bf16 products on third (on first they take 2.50 times as long, on second they have other"
        " bits on this processor)"
    )
    assert chosen(monkeypatch, Scripted((1e-6,) * 4, (1e-6,) * 4, (1e-6,) * 4), tmp_path) == made


@pytest.mark.parametrize("size_class", range(len(CLASS_ROWS)))
def test_other_bits_for_some_rows_bar_an_implementation_for_all(monkeypatch, tmp_path, size_class):
    kernels = Scripted((50e-6,) * 4, (10e-6,) * 4, wrong=1, wrong_classes=(size_class,))
    chosen(monkeypatch, kernels, tmp_path)
    assert list(kernels.chosen.values()) == [0] * 4, "a row's bits do not depend on its batch"


def test_a_clock_that_sees_no_time_pass_measures_nothing(monkeypatch, tmp_path):
    made = chosen(monkeypatch, Scripted((0.0,) * 4, (0.0,) * 4), tmp_path)
    assert summary(made) == "bf16 products on first (not measured)"


def test_a_measurement_is_kept_for_this_library_on_this_processor(monkeypatch, tmp_path):
    slow, fast = (50e-6,) * 4, (10e-6,) * 4
    first = chosen(monkeypatch, Scripted(slow, fast), tmp_path)
    again = Scripted(fast, slow)
    assert chosen(monkeypatch, again, tmp_path) == first, "as measured before"
    assert again.thread_time() == 0
    assert list(again.chosen.values()) == [1] * 4

    (kept,) = tmp_path.iterdir()
    for damaged in (
        "",
        "{",
        "{}",
        "[1]",
        '[{"product": "bf16"}]',
        json.dumps(json.loads(kept.read_text())[:3]),
        kept.read_text().replace("second", "unheard-of"),
        kept.read_text().replace('"most_rows": 8', '"most_rows": 9'),
    ):
        kept.write_text(damaged)
        anew = Scripted(fast, slow)
        assert {each.name for each in chosen(monkeypatch, anew, tmp_path)} == {"first"}, damaged

    monkeypatch.setattr(choices, "_identity", lambda: "another-processor")
    other = Scripted(slow, fast)
    assert {each.name for each in chosen(monkeypatch, other, tmp_path)} == {"second"}
    assert len(list(tmp_path.iterdir())) == 2
    assert summary(first) == "bf16 products on second (on first they take 5.00 times as long)"


def test_what_takes_too_long_to_measure_keeps_its_first_implementation(monkeypatch, tmp_path):
    kernels = Scripted((2e-3, 9e-3, 1e-3, 1.0), (1e-3, 9e-3, 1e-3, 1.0))
    made = chosen(monkeypatch, kernels, tmp_path)
    assert [each.name for each in made] == ["second", "first", "first", "first"]
    assert [bool(each.others) for each in made] == [True, False, False, False]
    assert summary(made).endswith(", on first above (not measured)")
    assert not list(tmp_path.iterdir()), "the next start measures again"


def test_a_cache_that_cannot_be_written_is_no_hindrance(monkeypatch, tmp_path):
    kernels = Scripted((50e-6,) * 4, (10e-6,) * 4)
    assert {e.name for e in chosen(monkeypatch, kernels, tmp_path / "missing")} == {"second"}


def test_one_implementation_is_no_choice_and_no_measurement(monkeypatch, tmp_path):
    assert chosen(monkeypatch, Scripted((1e-6,) * 4), tmp_path) == ()
    assert summary(()) == ""
    assert not list(tmp_path.iterdir())


@each_level
def test_the_real_kernels_are_measured(level, tmp_path, monkeypatch):
    if build.is_emulated(level):
        pytest.skip("its speed says nothing about a machine")
    kernels = library.load(level)
    several = {name for name, found in kernels.implementations.items() if len(found) > 1}
    try:
        made = choices.choose(kernels, tmp_path / "level-1.so", measure)
        assert [(each.product, each.most_rows) for each in made] == [
            (product, rows) for rows, product in itertools.product(CLASS_ROWS, sorted(several))
        ]
        assert made == choices.choose(kernels, tmp_path / "level-1.so", measure)
    finally:
        for choice in kernels.choices:
            kernels.choose(
                choice.product,
                CLASS_ROWS.index(choice.most_rows),
                kernels.implementations[choice.product].index(choice.name),
            )


def test_a_probed_number_of_rows_is_of_its_class() -> None:
    least = (1, *(rows + 1 for rows in CLASS_ROWS[:-1]))
    assert all(
        low <= rows and (most is None or rows <= most)
        for low, rows, most in zip(least, PROBED_ROWS, CLASS_ROWS, strict=True)
    )
