"""Estimates of a step's work: by hand for the default model, and over the steps of a scheduler."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from resolving import SPEC

from setpoint.core.control import MemoryUsage
from setpoint.core.model import Mixture
from setpoint.core.pool import PoolStats
from setpoint.core.records import StepDone, Turn
from setpoint.observe.readers import EngineReaders
from setpoint.observe.work import WorkModel
from setpoint_testing.harness import Harness

WEIGHTS = 269_000_000
MODEL = WorkModel(
    spec=SPEC,
    weights_bytes=WEIGHTS,
    experts_share=0.0,
    dtype_bytes=2,
    kv_bytes=SPEC.kv_bytes_per_token(2),
)

NO_MEMORY = (MemoryUsage(), None)


def step(at: float, **counts: int) -> StepDone:
    zero = dict.fromkeys(
        ["num_prefill_rows", "num_decode_rows", "num_new_tokens", "num_cached_tokens", "num_new_seqs", "num_running", "num_queued", "num_preparing", "num_pending_tokens", "num_sampled"], 0,
    )  # fmt: skip
    numbers: dict[str, Any] = zero | counts
    pool = PoolStats(total=100, free=60, evictable=0, locked=40, held=0)
    return StepDone(step_id=1, finished_at=at, pool=pool, new_token_ratio=0.5, **numbers)


def test_a_decoded_token_of_a_mixture_by_hand() -> None:
    """Two of 30 layers have 8 experts of size 100, of which a token uses 2, a router and a shared
    expert of size 50; 80 % of the weights are experts."""
    mixture = Mixture(8, 2, 100, frozenset({3, 4}), shared_size=50)
    model = replace(MODEL, spec=replace(SPEC, mixture=mixture), experts_share=0.8)
    attention = 2 * 576 * 576 + 2 * 576 * 192
    sparse, dense = 576 * 8 + 3 * 576 * (2 * 100 + 50), 3 * 576 * 1536
    weights = 30 * attention + 2 * sparse + 28 * dense
    one = model.of(step(1.0, num_decode_rows=1))
    assert one.flops == pytest.approx(2 * weights)
    two = model.of(step(1.0, num_decode_rows=2))
    # One token reads a quarter of the experts, two tokens 1 - (3/4)².
    read = WEIGHTS * 0.8 * (0.4375 - 0.25)
    moved = MODEL.of(step(1.0, num_decode_rows=1)).read_bytes - WEIGHTS
    assert two.read_bytes - one.read_bytes == pytest.approx(read + moved)


def test_a_prompt_of_the_default_model_by_hand() -> None:
    """128 tokens behind 72 cached ones. A token meets, in each of 30 layers, the matrices of q (576 x
    576), k and v (576 x 192 each), the output (576 x 576), and three of the MLP (576 x 1536): 3,538,944
    weights, 106,168,320 in all layers."""
    assert 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 == 3_538_944
    pairs = 128 * 72 + 128 * 129 // 2  # 17,472
    work = MODEL.of(
        step(1.0, num_prefill_rows=1, num_new_tokens=128, num_pairs=pairs, num_behind=72)
    )
    assert work.flops == 2 * 106_168_320 * 128 + 4 * 576 * 30 * 17_472 == 28_386_754_560
    # K and V of a token are 2 x 3 x 64 numbers of two bytes in each layer.
    moved = 128 * 30 * 2 * (576 + (576 + 192 + 192) + 576 + 576)
    attended = 128 * 30 * 2 * (576 + 192 + 192)
    assert work.read_bytes == 269_000_000 + moved + attended + 72 * 23_040
    assert work.write_bytes == 128 * 23_040 + moved + 128 * 30 * 2 * 3 * 1536


def test_decode_of_the_default_model_by_hand() -> None:
    """Two rows of 101 and 201 tokens, the ones computed now included. The weights are read once."""
    work = MODEL.of(step(1.0, num_decode_rows=2, num_pairs=101 + 201, num_behind=100 + 200))
    assert work.flops == 2 * 106_168_320 * 2 + 4 * 576 * 30 * 302
    moved = 2 * 30 * 2 * (576 + (576 + 192 + 192) + 576 + 576)
    assert work.read_bytes == 269_000_000 + moved + 2 * 30 * 2 * 576 + 300 * 23_040
    assert work.write_bytes == 2 * 23_040 + moved + 2 * 30 * 2 * 3 * 1536


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_scheduler_counts_what_its_rows_see(overlap: int) -> None:
    """A prompt of 6 in chunks of 4 and 2, then three steps of decode; the same prompt again, whose
    first five tokens are cached. (The pairs that windows hide are counted, too.)"""
    harness = Harness(chunked_prefill_size=4, depth=overlap)
    harness.submit("a", [1, 2, 3, 4, 5, 6], max_new_tokens=4)
    harness.drain()
    first = [(each.num_pairs, each.num_behind) for each in harness.recorder.steps]
    assert first[:5] == [(1 + 2 + 3 + 4, 0), (5 + 6, 4), (7, 6), (8, 7), (9, 8)]
    harness.submit("b", [1, 2, 3, 4, 5, 6], max_new_tokens=1)
    harness.drain()
    last = harness.recorder.steps[-1]
    assert (last.num_cached_tokens, last.num_pairs, last.num_behind) == (5, 6, 5)


def test_forced_tokens_are_computed_too() -> None:
    """A row that computes a known token and two forced ones, behind 9."""
    forced = MODEL.of(step(1.0, num_decode_rows=1, num_forced=2, num_pairs=10 + 11 + 12))
    assert forced.flops == 2 * 106_168_320 * 3 + 4 * 576 * 30 * 33


def test_lines_and_counters_say_it(caplog: pytest.LogCaptureFixture) -> None:
    """A prefill of a tenth of a second, and two decode steps of which the second has a line."""
    readers = EngineReaders(
        device="cpu", decode_log_interval=2, request_times=False, metrics=True, work=MODEL
    )
    prefill = step(0.1, num_prefill_rows=1, num_new_tokens=128, num_pairs=8256)
    decode = [
        step(at, num_decode_rows=100, num_sampled=100, num_pairs=12_900, num_behind=12_800)
        for at in (0.2, 0.5)
    ]
    with caplog.at_level(logging.INFO):
        readers.on(Turn(0.0))
        for each in (prefill, *decode):
            readers.on(each)
    first, second = caplog.messages
    assert MODEL.of(prefill).flops == pytest.approx(27.75e9, rel=1e-3)
    assert first.endswith(", est. prefill TFLOPS/s (per GPU): 0.2775")
    one = MODEL.of(decode[0])
    assert (one.flops, one.read_bytes) == pytest.approx((22.13e9, 0.584e9), rel=0.01)
    assert second.endswith(
        f"#queue-req: 0, est. decode TFLOPS/s (per GPU): {2 * one.flops / 0.5 / 1e12:.4f},"
        f" est. read BW (GB/s per GPU): {2 * one.read_bytes / 0.5 / 1e9:.2f},"
        f" est. write BW (GB/s per GPU): {2 * one.write_bytes / 0.5 / 1e9:.2f}"
    )
    report = readers.report(*NO_MEMORY).metrics
    assert report is not None
    total = MODEL.of(prefill) + one + one
    for name, value in (
        ("flops", total.flops),
        ("read_bytes", total.read_bytes),
        ("write_bytes", total.write_bytes),
    ):
        assert report.counters[f"sglang:estimated_{name}_per_gpu"] == {"": value}


def test_without_the_option_nothing_is_estimated(caplog: pytest.LogCaptureFixture) -> None:
    readers = EngineReaders(device="cpu", decode_log_interval=1, request_times=False, metrics=True)
    with caplog.at_level(logging.INFO):
        readers.on(Turn(0.0))
        readers.on(step(0.1, num_decode_rows=1))
    assert caplog.messages[0].endswith("#queue-req: 0")
    report = readers.report(*NO_MEMORY).metrics
    assert report is not None
    assert not any("estimated" in name for name in report.counters)
