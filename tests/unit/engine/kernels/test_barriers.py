"""The simulation of wider machines: how kernels are divided, what a loop costs, and that it gives
back the step that it was fitted to; and that of a model on several ranks."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import barriers
import pytest
from barriers import (
    DEFAULT_MODEL,
    EIGHT_BILLION,
    GATHER,
    MEASURED_ON,
    NOTEBOOK,
    ONE_BILLION,
    product_units,
    row_units,
)
from gathers import Between, measure
from team_loop import FREE, OWN_S, Barrier, empty_loop, even, loop

from setpoint_testing.specs import tiny_spec

NEAR, FAR = Barrier(37e-9, 37e-9, OWN_S), Barrier(156e-9, 156e-9, OWN_S)
USUAL = Barrier(37e-9, 156e-9, OWN_S)
TREE = Barrier(37e-9, 156e-9, OWN_S, tree=True)
SHAPES = (DEFAULT_MODEL, ONE_BILLION, EIGHT_BILLION)
BETWEEN = Between(156e-9, 50e9, 32, USUAL)
SOCKET = replace(MEASURED_ON, socket_bytes=230e9)


def step(rows: int, threads: int, barrier: Barrier, socket_bytes: float) -> float:
    """Seconds of the default model's step on a machine with that memory."""
    times = NOTEBOOK[rows]
    factor = barriers.factors(times, DEFAULT_MODEL, rows, USUAL)
    target = replace(times.machine, socket_bytes=socket_bytes)
    return barriers.step(DEFAULT_MODEL, rows, threads, target, barrier, factor, times.outside)


def test_kernels_are_divided_as_in_the_library() -> None:
    assert product_units(960, 576, 1) == 30, "a unit for each panel of 32 columns"
    assert product_units(960, 576, 64) == 60, "48 rows make a unit"
    assert product_units(49152, 576, 64) == 3072
    assert product_units(960, 576, 512) == 30 * 2 * 6, "two batches of rows, as 455 fit a cache"
    assert row_units(1, 576) == 1, "too little to be divided"
    assert row_units(64, 576) == 16, "four rows of 576 make a unit"


@pytest.mark.parametrize(
    ("rows", "threads", "items"), [(1, 1, 1), (1, 2, 6), (1, 64, 6), (64, 2, 64), (64, 32, 384)]
)
def test_attention_has_more_items_for_more_threads(rows: int, threads: int, items: int) -> None:
    units = barriers.attention_units(DEFAULT_MODEL, rows, 160, threads)
    assert len(units) == items
    assert sum(units) == pytest.approx(1)


def test_the_weights_of_a_step_are_those_of_the_model() -> None:
    of_products = [
        each for each in barriers.kernels(DEFAULT_MODEL, 1, 2) if each.kind in ("linear", "head")
    ]
    assert sum(each.calls * each.num_bytes for each in of_products) == pytest.approx(
        269e6, rel=0.01
    )
    divided = [each for each in barriers.kernels(DEFAULT_MODEL, 1, 2) if len(each.units) > 1]
    assert sum(each.calls for each in divided) == 5 * 30 + 1, "norms and rotations of a row are not"


def test_units_are_whole() -> None:
    at_one_pace = [loop(even(18), threads, FREE, lambda _: 1.0) for threads in (1, 8, 17, 64)]
    assert at_one_pace == pytest.approx([1, 3 / 18, 2 / 18, 1 / 18])


def test_the_memory_is_shared_by_those_who_work() -> None:
    assert loop(even(18), 8, FREE, lambda active: 1 / active) == pytest.approx(1)
    # Sixteen at full rate together, then the last two at the rate of one core each.
    saturated = loop(even(18), 16, FREE, lambda active: min(1.0, 4 / active))
    assert saturated == pytest.approx(16 / 18 / 4 + 1 / 18)


def test_threads_enter_one_after_another() -> None:
    hop = 1.0
    barrier = Barrier(hop, hop, 0.0)
    # The second thread enters after two cache lines; one look at another's units, two to leave.
    assert loop((10.0, 10.0), 2, barrier, lambda _: 1.0) == pytest.approx(2 + 10 + 3)
    assert loop((1.0, 1.0), 2, barrier, lambda _: 1.0) == pytest.approx(2 + 1), "it came too late"


def test_the_model_of_a_loop_has_the_two_measured_costs() -> None:
    assert empty_loop(2, NEAR) == pytest.approx(0.30e-6, rel=0.05)
    assert empty_loop(2, FAR) == pytest.approx(0.90e-6, rel=0.05)


@pytest.mark.parametrize("rows", barriers.BATCHES)
def test_the_measured_step_comes_out_again(rows: int) -> None:
    measured = sum(NOTEBOOK[rows].kinds.values()) + NOTEBOOK[rows].outside
    assert step(rows, 2, USUAL, MEASURED_ON.socket_bytes) == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("rows", barriers.BATCHES)
def test_barriers_cost_more_on_more_threads(rows: int) -> None:
    extra = [step(rows, n, USUAL, 230e9) - step(rows, n, FREE, 230e9) for n in barriers.THREADS]
    assert extra[0] == pytest.approx(0, abs=1e-9)
    assert extra[1:] == sorted(extra[1:])
    assert step(rows, 64, FREE, 230e9) < step(rows, 64, TREE, 230e9) < step(rows, 64, USUAL, 230e9)


def test_what_is_no_kernel_stays() -> None:
    least = NOTEBOOK[1].outside + NOTEBOOK[1].kinds["elementwise"]
    assert step(1, 64, FREE, 1e15) > least


def line(num_bytes: float) -> str:
    parts = {
        kind: {"seconds": seconds, "num_bytes": 0.0} for kind, seconds in NOTEBOOK[1].kinds.items()
    }
    parts["linear"]["num_bytes"] = num_bytes
    parts |= {name: {"seconds": 1e-4, "num_bytes": 0} for name in ("sampling", "rest", "messages")}
    limits = {
        "threads": 4,
        "read_bytes_per_s": {str(1 << 20): 400e9, str(1 << 28): 50e9},
        "flops": {"bfloat16": 800e9},
    }
    return json.dumps(
        {"batch_size": 1, "breakdown": {"decode": {"parts": parts}}, "limits": limits}
    )


def test_times_are_read_from_a_breakdown(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(line(268.9e6) + "\n")
    times = barriers.read_times(path)[1]
    assert times.threads == 4
    assert times.machine.core_flops == 200e9
    assert times.machine.socket_bytes == 50e9
    assert times.kinds == NOTEBOOK[1].kinds
    assert times.outside == pytest.approx(3e-4)
    path.write_text(line(96e6) + "\n")
    with pytest.raises(ValueError, match="not SmolLM2-135M in bf16"):
        barriers.read_times(path)


def test_tables_have_a_row_for_each_number_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    barriers.report(ONE_BILLION, 1, NOTEBOOK[1], MEASURED_ON, USUAL)
    rows = [text for text in capsys.readouterr().out.splitlines() if text.startswith("| ")]
    assert [text.split(" | ")[0] for text in rows] == [
        "| threads",
        *(f"| {n}" for n in barriers.THREADS),
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_compute_what_one_computes(shape: barriers.Shape) -> None:
    spec = tiny_spec(num_heads=shape.heads, num_kv_heads=shape.kv_heads)
    assert list(filter(shape.divides_among, range(1, 99))) == spec.rank_counts
    for ranks in range(1, shape.kv_heads + 1):
        of_ranks = [
            barriers.kernels(shape, 1, 32, part=part) for part in barriers.parts(shape, ranks)
        ]
        for whole, *each in zip(barriers.kernels(shape, 1, 32), *of_ranks, strict=True):
            if whole.kind != "elementwise":  # of which every rank computes all
                assert sum(part.flops for part in each) == pytest.approx(whole.flops)
    heads = [part.heads for part in barriers.parts(DEFAULT_MODEL, 2)]
    assert heads == [3, 6], "the heads of K and V do not divide evenly"


@pytest.mark.parametrize("rows", barriers.BATCHES)
def test_one_rank_takes_a_step_without_gathers(rows: int) -> None:
    factor = barriers.factors(NOTEBOOK[rows], DEFAULT_MODEL, rows, USUAL)
    alone = barriers.rank_step(DEFAULT_MODEL, rows, 1, SOCKET, BETWEEN, factor, 1e-3)
    assert alone == (
        barriers.step(DEFAULT_MODEL, rows, 32, SOCKET, USUAL, factor, 1e-3),
        0.0,
    )


def test_a_step_has_four_gathers_in_a_layer_and_two_more() -> None:
    assert barriers.gathers(ONE_BILLION) == [(33, 4096), (16, 4096), (16, 16384), (1, 256512)]


def test_the_measured_gathers_come_out_again() -> None:
    for each in GATHER.measured:
        alone = Between(GATHER.line_s, math.inf, 1, FREE)
        assert GATHER.seconds(each.rows, each.row_bytes, 2, alone) <= each.least_s * 1.001


NEAR_STATE = {
    (1, 1152): 131,
    (1, 3072): 187,
    (1, 4096): 223,
    (1, 8192): 390,
    (1, 16384): 1196,
    (1, 28672): 2307,
    (1, 98304): 7596,
    (1, 256512): 17575,
    (64, 1152): 6121,
    (64, 3072): 14505,
    (64, 4096): 17654,
    (64, 8192): 22948,
    (64, 16384): 36534,
    (64, 28672): 64531,
    (64, 98304): 274212,
}
"""Nanoseconds in the machine's other state, where a cache line takes 41.3 (docs/notebook.md)."""


def test_gathers_take_as_many_times_longer_as_a_cache_line_does() -> None:
    alone = Between(41.3e-9, math.inf, 1, FREE)
    for (rows, size), measured in NEAR_STATE.items():
        predicted = GATHER.seconds(rows, size, 2, alone) * 1e9
        assert 0.8 < predicted / measured < 1.7, (rows, size)


def test_a_gather_is_limited_by_the_link_and_sped_up_by_threads() -> None:
    many = GATHER.seconds(64, 98304, 2, BETWEEN)
    assert many < GATHER.seconds(64, 98304, 2, replace(BETWEEN, threads=1))
    half = 64 * 98304 / 2
    assert GATHER.seconds(64, 98304, 2, replace(BETWEEN, link_bytes=1e9)) > half / 1e9
    # A short gather is not divided: its cost is that of the arrivals.
    short = [GATHER.seconds(1, 1152, ranks, BETWEEN) for ranks in (2, 3, 4, 8)]
    assert short == sorted(short)
    assert short[3] - short[0] == pytest.approx(6 * 156e-9, rel=0.02)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_gathers_are_measured_between_two_processes() -> None:
    here = measure([(1, 1152), (64, 1152)])
    assert [each.num_bytes for each in here.measured] == [1152, 64 * 1152]
    assert all(0 < each.least_s <= each.median_s < 1 for each in here.measured)
    assert 0 < here.line_s < 1e-3


def test_a_table_of_sockets_says_that_it_is_a_prediction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    barriers.report_ranks(DEFAULT_MODEL, 1, NOTEBOOK[1], SOCKET, BETWEEN)
    printed = capsys.readouterr().out
    assert "PREDICTED" in printed
    rows = [text.split(" | ")[0] for text in printed.splitlines() if text.startswith("| ")]
    assert rows == ["| sockets", "| 1", "| 2", "| 3", "| 6"]
    barriers.report_here(1, NOTEBOOK[1], USUAL)
    assert capsys.readouterr().out.count("two ranks of one") == 2
