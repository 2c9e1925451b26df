"""The log says that other programs take the CPU: soon, seldom, and in words that the doctor reads."""

from __future__ import annotations

import logging

import pytest

from setpoint.core.records import TurnDone
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.readers.log.reader import read_chunks
from setpoint.observe.figures import Figures
from setpoint.observe.logline import LogLines
from setpoint.testing.harness import Harness

READY = (
    "[2026-05-01 10:00:00] max_total_num_tokens=8192, chunked_prefill_size=2048,"
    " max_prefill_tokens=16384, max_running_requests=64, context_len=4096,"
    " available_cpu_mem=6.00 GB\n"
)


def warnings(turns: list[TurnDone], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.INFO)
    lines = LogLines(Figures(decode_log_interval=40), device="cpu")
    for each in turns:
        lines.on(each)
    return [record.getMessage() for record in caplog.records]


def turns(cpu_s: float | None, count: int, turn_s: float = 1.0) -> list[TurnDone]:
    return [TurnDone(1, False, turn_s, 0.0, turn_s, 0.0, cpu_s)] * count


def test_a_warning_comes_after_ten_seconds_and_then_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = warnings(turns(0.08, 135), caplog)
    assert len(found) == 3
    assert found[1].startswith(
        "CPU contention: the engine had a CPU for 4.8 s of the last 60.0 s of its steps (8 %)."
    )


@pytest.mark.parametrize("cpu_s", [0.9, None])
def test_an_undisturbed_engine_or_one_on_a_gpu_says_nothing(
    cpu_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert not warnings(turns(cpu_s, 135), caplog)


@pytest.mark.parametrize(("every", "verdict"), [(1, "cpu-contended"), (0, "client-bound")])
def test_the_doctor_reads_it_in_a_log(
    every: int, verdict: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Red before: client-bound, whatever the log said."""
    text, said = READY, warnings(turns(0.08, 10), caplog)[0].replace("10.0 s", "9.8 s")
    for second in range(0, 60, 2):
        stamp = f"[2026-05-01 10:01:{second:02}]"
        text += (
            f"{stamp} Decode batch, #running-req: 4, #token: 400, token usage: 0.05,"
            " cpu graph: True, gen throughput (token/s): 12.00, #queue-req: 0\n"
        )
        if every and second % 10 == 8:
            text += f"{stamp} WARNING: {said}\n"
    (seen,) = read_chunks("server.log", [text.encode()])
    report = diagnose(seen)
    assert report.verdict == verdict
    if every:
        assert "CPU contention" in report.findings[0].evidence[0].text
        # Red before: also client-bound, with the advice to send more requests.
        assert [finding.cause for finding in report.findings] == ["cpu-contended"]


def test_the_loop_measures_its_own_cpu_time() -> None:
    now = 0.0

    def cpu() -> float:
        nonlocal now
        now += 0.25
        return now

    harness = Harness()
    harness.loop._cpu_clock = cpu
    harness.submit("a", [1, 2, 3], max_new_tokens=3)
    harness.drain()
    found = harness.recorder.of(TurnDone)
    assert found
    assert all(turn.cpu_s == 0.25 for turn in found)
