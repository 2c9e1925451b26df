"""The log says that other programs take the CPU: soon, seldom, and in words that the doctor reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import pytest

from setpoint.core.records import TurnDone
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.findings import Report
from setpoint.doctor.readers.log.reader import read_chunks
from setpoint.observe.figures import Figures
from setpoint.observe.logline import LogLines
from setpoint_testing.harness import Harness

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


WARNED = (
    "WARNING: CPU contention: the engine had a CPU for 6.0 s of the last 10.1 s of its steps (60 %)."
    " Other programs, or a limit of its container, take the rest."
)
WARNED_LATER = WARNED.replace("6.0 s", "33.0 s").replace("10.1 s", "60.0 s").replace("60 %", "55 %")
SAID = (
    "Doctor: cpu-contended limits the server. Other programs take the CPU: the engine had work for"
    " 24.3 s, and a CPU for 13.4 s of them (55 %). End the other programs on this machine."
)


def diagnosed(seconds: int, said: Mapping[int, str], every: int = 2) -> Report:
    """The report about a log of a load that never has a queue: a line every few seconds, and what
    the server says at some of these seconds."""
    lines = [READY]
    for second in range(0, seconds, every):
        stamp = time.strftime("[%Y-%m-%d %H:%M:%S]", time.gmtime(1_777_629_660 + second))
        lines.append(
            f"{stamp} Decode batch, #running-req: 4, #token: 400, token usage: 0.05,"
            " cpu graph: True, gen throughput (token/s): 12.00, #queue-req: 0\n"
        )
        if second in said:
            lines.append(f"{stamp} {said[second]}\n")
    (seen,) = read_chunks("server.log", ["".join(lines).encode()])
    return diagnose(seen)


def notes(report: Report) -> str:
    return " ".join(note for source in report.sources for note in source.notes)


@pytest.mark.parametrize(
    ("seconds", "every", "said"),
    [
        pytest.param(30, 2, {10: WARNED}, id="the first warning, and the next one is not due yet"),
        pytest.param(30, 2, {26: SAID}, id="the server's own doctor"),
        pytest.param(32, 2, {10: WARNED, 28: SAID}, id="both"),
        pytest.param(28, 4, {12: WARNED}, id="an excerpt"),
        pytest.param(
            3 * 3600,
            20,
            {10 * 60 + 60 * minute: WARNED_LATER for minute in range(170)},
            id="more warnings than are kept",
        ),
    ],
)
def test_contention_that_the_log_names_is_not_the_lack_of_requests(
    seconds: int, every: int, said: dict[int, str]
) -> None:
    """Red before: client-bound, 97 % sure."""
    report = diagnosed(seconds, said, every)
    assert [finding.cause for finding in report.findings] == ["cpu-contended"]
    first, last = next(iter(said.values())), list(said.values())[-1]
    texts = [each.text for each in report.findings[0].evidence]
    assert first in texts[0]
    assert last in texts[-1]


def test_what_the_warnings_do_not_cover_makes_it_less_sure() -> None:
    def sure(said: dict[int, str]) -> float:
        report = diagnosed(62, said)
        assert report.verdict == "cpu-contended"
        return report.findings[0].confidence

    covered = SAID.replace("24.3 s", "58.0 s").replace("13.4 s", "31.9 s")
    assert sure({10: WARNED}) < sure({10: WARNED, 26: SAID}) < sure({60: covered})


def test_contention_that_has_passed_is_told_beside_the_verdict() -> None:
    """Red before: nothing named the lines."""
    report = diagnosed(1200, {10: WARNED, 300: WARNED})
    assert report.verdict == "client-bound"
    assert "For a part of the time, other programs took the CPU (lines 8 and 154)." in notes(report)
    gone = "Doctor: cpu-contended no longer limits the server. The server waits for requests."
    report = diagnosed(70, {10: WARNED, 60: gone})
    assert report.verdict == "client-bound"
    assert "(line 8)" in notes(report)
    assert not notes(diagnosed(1200, {}))


def test_a_limit_that_the_servers_own_doctor_named_is_not_passed_over() -> None:
    """Red before: nothing named the line."""
    said = "Doctor: seq-cap limits the server. Requests wait while 8 run."
    report = diagnosed(60, {30: said})
    assert report.verdict == "client-bound"
    assert "The server's own doctor named seq-cap (line 18)" in notes(report)
    gone = "Doctor: seq-cap no longer limits the server. The server waits for requests."
    assert "own doctor" not in notes(diagnosed(60, {30: said, 50: gone}))
    agrees = "Doctor: client-bound limits the server. The server waits for requests."
    assert "own doctor" not in notes(diagnosed(60, {30: agrees}))
    quoted = f"Receive: obj={{'text': '{said}'}}"
    assert "own doctor" not in notes(diagnosed(60, {30: quoted}))


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
