"""The plans of the step benchmark: every position once, no step too large, no page twice; and what is timed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from setpoint.bench.one_batch import REPEATS, Subject, bench_one_batch
from setpoint.config.bench import OneBatchOptions
from setpoint.core.plan import OWN_LENGTH, StepPlan, TokenMasks
from setpoint.core.result import StepResult

DECODE_S, TOKEN_S = 0.002, 0.0005


class Recorder:
    """Takes TOKEN_S per prompt token and DECODE_S per decode step."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> Recorder:
        self.plans.append(plan)
        rows = plan.rows
        time.sleep(0 if not len(rows) else DECODE_S if rows.starts[0] == OWN_LENGTH else TOKEN_S * int(rows.counts.sum()))
        return self

    def finish(self, masks: TokenMasks | None) -> None:
        assert masks is None

    def result(self) -> StepResult:
        rows = self.plans[-1].rows
        return StepResult(self.plans[-1].step_id, rows.seq_ids[rows.samples], np.zeros(int(rows.samples.sum()), np.int32))

    def shutdown(self) -> None:
        pass


def test_plans_and_times(tmp_path: Path) -> None:
    recorder, out = Recorder(), tmp_path / "out.jsonl"

    def build(num_slots: int, length: int) -> Subject:
        assert (num_slots, length) == (3, 14)
        return Subject(recorder, page_size=4, vocab_size=50, chunk_tokens=7, about={})

    own = OneBatchOptions(batch_size=(3,), input_len=(10,), output_len=(4,), output_file=str(out))
    assert bench_one_batch(own, build) == 0
    prefills = [plan for plan in recorder.plans if len(plan.rows) and plan.rows.starts[0] != OWN_LENGTH]
    computed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for plan in prefills:
        assert plan.rows.counts.sum() <= 7
        for slot, start, count, samples in zip(plan.rows.slots, plan.rows.starts, plan.rows.counts, plan.rows.samples, strict=True):
            computed[int(slot)] += range(start, start + count)
            assert samples == (start + count == 10)
    assert computed == {slot: [*range(10)] * 2 * REPEATS for slot in range(3)}  # once to warm up
    for plan in recorder.plans:
        assert len(set(plan.pages.pages.tolist())) == len(plan.pages.pages)
        assert all(1 <= page <= 3 * 4 for page in plan.pages.pages.tolist())
    (row,) = map(json.loads, out.read_text().splitlines())
    assert len(row["decode_latencies"]) == 3
    assert row["prefill_latency"] >= 30 * TOKEN_S
    assert row["median_decode_latency"] >= DECODE_S
    assert row["median_decode_latency"] == sorted(row["decode_latencies"])[1]
    assert row["prefill_latency"] == sorted(row["prefill_latencies"])[1]
    assert row["overall_throughput"] == pytest.approx(3 * 14 / row["total_latency"])
