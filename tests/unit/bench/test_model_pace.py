"""A model's pace from given limits and times, by hand: what a step does besides its products is
bounded by memory or by computation, whichever is slower."""

from __future__ import annotations

from typing import Any

import pytest
from resolving import SPEC

from setpoint.bench.engines.model_pace import Machine, ModelSteps, pace_of
from setpoint.observe.work import WorkModel
from setpoint.planning.pace import Stored

LAYERS, HEAD = 106_000_000, 28_000_000
STORED = (Stored("bfloat16", layers=LAYERS, head=HEAD),)
TIMES = {"bfloat16": {1: 1e-11, 16: 2e-11, 64: 8e-11}}
KV = SPEC.kv_bytes_per_token(2)


class Given:
    """Limits that a test chooses."""

    def __init__(self, *, read: float, flops: float) -> None:
        self.read, self.rate = read, flops

    def read_bytes_per_s(self, num_bytes: int) -> float:
        return self.read

    def flops(self, product: str) -> float:
        assert product == "bfloat16"
        return self.rate

    def measured(self) -> dict[str, Any]:
        raise AssertionError


STEPS = ModelSteps(WorkModel(SPEC, 0, 0.0, 2, KV), STORED, "bfloat16")
ENDLESS = Machine(Given(read=1e30, flops=1e30), TIMES)


def test_products_alone() -> None:
    assert STEPS.seconds(ENDLESS, decoded=1, behind=100) == pytest.approx((LAYERS + HEAD) * 1e-11)
    assert STEPS.seconds(ENDLESS, new=64) == pytest.approx(LAYERS * 8e-11 + HEAD * 1e-11)


def test_keys_and_values_are_read_at_the_limit_of_memory() -> None:
    machine = Machine(Given(read=1e9, flops=1e30), TIMES)
    near = STEPS.seconds(machine, decoded=16, behind=100)
    far = STEPS.seconds(machine, decoded=16, behind=1100)
    assert far - near == pytest.approx(16 * 1000 * KV / 1e9)


def test_attention_is_computed_at_the_limit_of_computation() -> None:
    machine = Machine(Given(read=1e30, flops=1e9), TIMES)
    pairs, of_pair = 64 * 65 // 2, 4 * SPEC.num_heads * SPEC.head_dim * SPEC.num_layers
    besides = STEPS.seconds(machine, new=64) - STEPS.seconds(ENDLESS, new=64)
    assert besides == pytest.approx(pairs * of_pair / 1e9)


def test_a_prompt_is_computed_in_chunks() -> None:
    """Two steps of 16 tokens take as long as the measured times of 16 say, not those of 32."""
    pace = pace_of(STEPS, ENDLESS, prompt_tokens=32, streams=16, chunk_tokens=16)
    assert pace.first_token_s == pytest.approx(2 * (LAYERS * 2e-11 + HEAD * 1e-11))
    assert pace.decode_tokens_per_s == pytest.approx(1 / ((LAYERS + HEAD) * 1e-11))
    assert pace.streams_tokens_per_s == pytest.approx(16 / ((LAYERS + HEAD) * 2e-11))
