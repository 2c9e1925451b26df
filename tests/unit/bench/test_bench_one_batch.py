"""The plans of the step benchmark: every position once, no step too large, no page twice; and what
is timed."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from setpoint.bench.breakdown import LoopTimes, StepShare, parts_of, table
from setpoint.bench.engines.engine_turns import engine_turns
from setpoint.bench.one_batch import REPEATS, Subject, bench_one_batch
from setpoint.config.bench import OneBatchOptions
from setpoint.config.commandline import parse
from setpoint.config.commands import COMMANDS
from setpoint.config.environment import read_environment
from setpoint.core.errors import ConfigError
from setpoint.core.plan import OWN_LENGTH, StepPlan, TokenMasks
from setpoint.core.result import StepResult, one_each
from setpoint.core.work import Work
from setpoint.offline.offline_engine import Engine
from setpoint_testing.byte_tokenizer import write_byte_tokenizer

DECODE_S, TOKEN_S = 0.002, 0.0005


class Recorder:
    """Takes TOKEN_S per prompt token and DECODE_S per decode step."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> Recorder:
        self.plans.append(plan)
        rows = plan.rows
        time.sleep(
            0
            if not len(rows)
            else DECODE_S
            if rows.starts[0] == OWN_LENGTH
            else TOKEN_S * int(rows.counts.sum())
        )
        return self

    def finish(self, masks: TokenMasks | None) -> None:
        assert masks is None

    def result(self) -> StepResult:
        rows = self.plans[-1].rows
        seq_ids = rows.seq_ids[rows.sampling]
        return StepResult(
            self.plans[-1].step_id,
            seq_ids,
            np.zeros(len(seq_ids), np.int32),
            one_each(len(seq_ids)),
        )

    def idle(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass


class Measured(Recorder):
    """Has always counted the same."""

    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self._eager = eager

    def take(self) -> dict[str, Work]:
        if not self._eager:
            return {"linear": Work(1e-3), "attention": Work(2e-4), "elementwise": Work(1e-5)}
        return {
            "linear": Work(1.0, num_calls=10, num_bytes=8_000_000, flops=10**6, product="bfloat16"),
            "attention": Work(1.0, num_calls=2, num_bytes=1000, flops=10**8, product="bfloat16"),
            "elementwise": Work(1.0, num_calls=5, num_bytes=5000),
        }


class RoundLimits:
    def read_bytes_per_s(self, num_bytes: int) -> float:
        return {8_001_000: 1e10, 1000: 1e11, 0: 1e11}[num_bytes]

    def flops(self, product: str) -> float:
        return {"bfloat16": 1e12}[product]

    def measured(self) -> dict[str, Any]:
        return {"threads": 2, "read_bytes_per_s": {8_000_000: 1e10}, "flops": {"bfloat16": 1e12}}


def subject(recorder: Recorder) -> Subject:
    return Subject(
        recorder,
        page_size=4,
        num_groups=1,
        vocab_size=50,
        chunk_tokens=7,
        about={},
        measure=Measured,
        limits=RoundLimits(),
    )


def no_turns(shapes: object) -> Any:
    raise AssertionError("no engine without --breakdown")


def test_plans_and_times(tmp_path: Path) -> None:
    recorder, out = Recorder(), tmp_path / "out.jsonl"

    def build(num_slots: int, length: int) -> Subject:
        assert (num_slots, length) == (3, 14)
        return subject(recorder)

    own = OneBatchOptions(batch_size=(3,), input_len=(10,), output_len=(4,), output_file=str(out))
    assert bench_one_batch(own, build, no_turns) == 0
    prefills = [
        plan for plan in recorder.plans if len(plan.rows) and plan.rows.starts[0] != OWN_LENGTH
    ]
    computed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for plan in prefills:
        assert plan.rows.counts.sum() <= 7
        for slot, start, count, samples in zip(
            plan.rows.slots, plan.rows.starts, plan.rows.counts, plan.rows.samples, strict=True
        ):
            computed[int(slot)] += range(start, start + count)
            assert samples == (start + count == 10)
    assert computed == {slot: [*range(10)] * (1 + REPEATS) for slot in range(3)}  # once to warm up
    for plan in recorder.plans:
        assert len(set(plan.pages.pages.ravel().tolist())) == len(plan.pages.pages)
        assert all(1 <= page <= 3 * 4 for page in plan.pages.pages.ravel().tolist())
    (row,) = map(json.loads, out.read_text().splitlines())
    assert len(row["decode_latencies"]) == 3
    assert row["prefill_latency"] >= 30 * TOKEN_S
    assert row["median_decode_latency"] >= DECODE_S
    assert row["median_decode_latency"] == sorted(row["decode_latencies"])[1]
    assert row["prefill_latency"] == sorted(row["prefill_latencies"])[1]
    assert row["overall_throughput"] == pytest.approx(3 * 14 / row["total_latency"])


def test_breakdown_beside_its_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    own = OneBatchOptions(
        batch_size=(2,), input_len=(6,), output_len=(4,), breakdown=True, output_file=str(out)
    )
    turns = {"prefill": LoopTimes(0.01, 1e-4, 2e-4), "decode": LoopTimes(0.003, 1e-5, 5e-5)}
    assert (
        bench_one_batch(
            own,
            lambda slots, length: subject(Recorder()),
            lambda shapes: dict.fromkeys(shapes, turns),
        )
        == 0
    )
    (row,) = map(json.loads, out.read_text().splitlines())
    decode = row["breakdown"]["decode"]["parts"]
    assert decode["linear"]["bound_s"] == pytest.approx(8e-4), (
        "bytes by the bandwidth over the whole step"
    )
    assert decode["attention"]["bound_s"] == pytest.approx(1e-4), "operations by the rate"
    assert decode["elementwise"]["bound_s"] == pytest.approx(5e-8)
    assert decode["rest"]["seconds"] >= DECODE_S - 1e-3 - 2e-4 - 1e-5
    assert (decode["scheduling"]["seconds"], decode["messages"]["seconds"]) == (5e-5, 1e-5)
    assert decode["step"]["seconds"] == pytest.approx(
        decode["rest"]["seconds"] + 1e-3 + 2e-4 + 1e-5 + 6e-5
    )
    assert decode["step"]["bound_s"] == pytest.approx(8e-4 + 1e-4 + 5e-8)
    assert row["breakdown"]["decode"]["engine_s"] == 0.003
    assert row["limits"]["flops"] == {"bfloat16": 1e12}
    printed = capsys.readouterr().out
    assert "| linear layers | 1,000.00 |" in printed
    assert "| 800.00 | 80% |" in printed
    assert ", and 3,000.00 µs as part of a whole engine." in printed
    assert (
        "Limits of this machine with 2 threads: 10.0 GB/s over 8 MB, 1,000 GFLOP/s bfloat16."
        in printed
    )


def test_without_limits_there_are_no_bounds() -> None:
    times = Measured(eager=False).take()
    parts = parts_of([times], [times] * 3, [0.001, 0.002, 0.003], None, None)
    assert {part.bound_s for part in parts.values()} == {None}
    assert "| linear layers | 1,000.00 | 50.0% | – | – |" in table("t", parts, 0.002, None)
    assert sum(part.seconds for name, part in parts.items() if name != "step") == pytest.approx(
        0.002
    )


@pytest.mark.parametrize(
    ("seconds", "unit", "shown"),
    [
        (0.0099, "µs", "9,900.00"),
        (0.25, "ms", "250.00"),
        (2.4475092, "ms", "2,447.51"),
        (12.0, "s", "12.00"),
    ],
)
def test_times_are_shown_in_a_unit_that_fits(seconds: float, unit: str, shown: str) -> None:
    lines = table("t", {"linear": StepShare(seconds), "step": StepShare(seconds)}, seconds, None)
    assert f"| part | {unit} | share | bound {unit} | of bound |" in lines
    assert f"| linear layers | {shown} | 100.0% | – | – |" in lines
    assert lines[-1] == f"Without timers and scheduling it took {shown} {unit}."


def test_runs_that_do_not_agree_are_warned_of() -> None:
    parts = {"linear": StepShare(0.5), "scheduling": StepShare(0.5), "step": StepShare(1.0)}
    assert table("t", parts, 0.6, None)[-1].startswith("Without timers")
    assert (
        "WARNING: Without timers it took 2.0 times as long as with them"
        in table("t", parts, 1.0, None)[-1]
    )
    assert (
        "WARNING: Without timers it took only 50% of the time that it took with them"
        in table("t", parts, 0.25, None)[-1]
    )


def test_a_batch_that_the_engine_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_byte_tokenizer(tmp_path)

    class Small:
        def get_server_info(self) -> dict[str, Any]:
            return {
                "tokenizer_path": str(tmp_path),
                "max_running_requests": 8,
                "max_total_num_tokens": 1000,
            }

    monkeypatch.setattr(Engine, "from_options", lambda *args, **more: nullcontext(Small()))
    line = parse(COMMANDS["bench one-batch"], [])
    for shape in ((9, 4, 2), (8, 120, 6)):
        with pytest.raises(
            ConfigError,
            match=(
                f"--breakdown runs {shape[0]} requests of {shape[1]} .* room for 8 requests and"
                " 1000 tokens"
            ),
        ):
            engine_turns(line, read_environment({}), [(1, 4, 2), shape])


def test_comparison_with_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    line = {
        "batch_size": 2,
        "input_len": 6,
        "output_len": 4,
        "prefill_latency": 1.0,
        "median_decode_latency": 2.0,
    }
    other.write_text(
        "".join(
            json.dumps(line | {"median_decode_latency": latency}) + "\n"
            for latency in (1.0, 2.0, 3.0)
        )
    )
    own = OneBatchOptions(batch_size=(2, 3), input_len=(6,), output_len=(4,), compare=str(other))
    assert bench_one_batch(own, lambda slots, length: subject(Recorder()), no_turns) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.endswith("speed-up: prefill  decode")
    decode_ms, ratio = float(first.split()[5]), float(first.split()[9])
    assert ratio == pytest.approx(2000 / decode_ms, rel=0.01)
    assert second.endswith("not in the file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no result"),
        ("{}", "the key 'batch_size' is missing"),
        ("]", "holds no results"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_compared_with_is_refused_first(
    content: str | None, message: str, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    if content is not None:
        other.write_text(content)
    with pytest.raises(ConfigError, match=message):
        bench_one_batch(
            OneBatchOptions(compare=str(other)),
            lambda slots, length: pytest.fail("built"),
            no_turns,
        )
