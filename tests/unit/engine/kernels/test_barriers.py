"""The simulation of wider machines: how kernels are divided, what a loop costs, and that it gives
back the step that it was fitted to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import barriers
import pytest
from barriers import (
    DEFAULT_MODEL,
    MEASURED_ON,
    NOTEBOOK,
    ONE_BILLION,
    product_units,
    row_units,
)
from team_loop import FREE, OWN_S, Barrier, empty_loop, even, loop

NEAR, FAR = Barrier(37e-9, 37e-9, OWN_S), Barrier(156e-9, 156e-9, OWN_S)
USUAL = Barrier(37e-9, 156e-9, OWN_S)
TREE = Barrier(37e-9, 156e-9, OWN_S, tree=True)


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
