"""Log lines: one for each decision of the scheduler, with the reason; and nobody else can write
one."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from setpoint.core.excerpt import excerpt, printable
from setpoint.core.messages import Finish
from setpoint.core.operations import RECORDING, MemoryPart
from setpoint.core.pool import PoolStats
from setpoint.core.records import (
    Fallback,
    HandedOver,
    Operated,
    Preemption,
    RequestClipped,
    RequestDone,
    Retraction,
    StepDone,
)
from setpoint.observe import logline
from setpoint.observe.figures import Figures
from setpoint.observe.logline import LogLines, leave_out_of_access_log, setup_logging
from setpoint.observe.tee import Tee

FORGED = "x\n[2026-01-01 00:00:00] ERROR: The server was broken into. \x1b[2J\u2028\r"


def log_lines(*, device: str = "cpu", decode_log_interval: int = 40) -> Tee:
    figures = Figures(decode_log_interval=decode_log_interval)
    return Tee(figures, LogLines(figures, device=device))


def done(rid: str, status: int, message: str, *, accepted_at: float | None = 1.0) -> RequestDone:
    finish = Finish("abort", message=message, status_code=status)
    return RequestDone(
        seq_id=1, rid=rid, finish=finish, num_prompt=3, accepted_at=accepted_at, ended_at=2.0
    )


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, which gets its handlers and its level back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = handlers, level


def test_what_happens_to_requests_is_logged_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = log_lines()
    with caplog.at_level(logging.INFO):
        lines.on(Retraction(2, 31, 0.25, 0.5))
        lines.on(Preemption("u", ("a", "b"), 12))
        lines.on(done("r", 503, "Request waiting timeout reached."))
        lines.on(done("many", 503, "The request queue is full.", accepted_at=None))
        lines.on(done("long", 400, "Too long.", accepted_at=None))
        lines.on(done("s", 500, "NaN happened"))
        lines.on(Fallback("lpm acts as fcfs", "there is no prefix cache"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            (
                "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained:"
                " 31, #new_token_ratio: 0.2500 -> 0.5000"
            ),
        ),
        (
            "INFO",
            (
                "Priority preemption. #preempted_reqs: 2, #new_tokens_gained: 12, for request u;"
                " back in the queue: a, b"
            ),
        ),
        ("WARNING", "Request r was answered 503: Request waiting timeout reached."),
        ("ERROR", "Request s was answered 500: NaN happened"),
        ("WARNING", "Fallback: lpm acts as fcfs (there is no prefix cache)"),
    ]


def test_operations_are_logged_in_words(caplog: pytest.LogCaptureFixture) -> None:
    lines = log_lines()
    with caplog.at_level(logging.INFO):
        lines.on(Operated(1, RECORDING["start"], (), ""))
        lines.on(Operated(2, RECORDING["stop"], (), "There is none."))
        lines.on(Operated(3, "ReleaseMemory", (MemoryPart.WEIGHTS,), ""))
        lines.on(Operated(4, "AttachStorage", (), ""))
        lines.on(Operated(5, "ClearStorage", (), "No storage is in use."))
    assert caplog.messages == [
        "Starting a record of experts is done.",
        "Stopping the record of experts was refused: There is none.",
        "ReleaseMemory is done. Released memory: weights",
        "The storage is attached.",
        "The storage could not be cleared: No storage is in use.",
    ]


def test_the_same_failed_handover_is_logged_once_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: each request wrote a line."""
    lines = log_lines()
    for number in range(3):
        lines.on(HandedOver(f"r{number}", number, "they differ", 0, 0.0, 0.0))
    lines.on(HandedOver("r3", 3, "timed out", 0, 0.0, 0.0))
    lines.on(HandedOver("r4", 4, "", 10, 0.1, 0.0))
    monkeypatch.setattr(logline, "REPEAT_S", 0.0)
    lines.on(HandedOver("r5", 5, "they differ", 0, 0.0, 0.0))
    assert caplog.messages == [
        "The prompt of request r0 was not handed over: they differ",
        "The prompt of request r3 was not handed over: timed out",
        "The prompt of request r5 was not handed over: they differ"
        " (2 others since the last line like this)",
    ]


def test_a_clients_string_does_not_write_a_line_of_its_own(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red before: a clipped and an unservable request wrote a second line that looked like the server's."""
    setup_logging("info")
    lines = log_lines()
    lines.on(RequestClipped(FORGED, 2000, 1000))
    lines.on(done(FORGED, 500, "Nothing else runs."))
    lines.on(done(FORGED * 10_000, 503, "Request waiting timeout reached."))
    lines.on(Preemption(FORGED, (FORGED, FORGED), 12))
    logging.getLogger("anybody").warning("who forgets: %s", FORGED)
    written = capsys.readouterr().err.splitlines()
    assert len(written) == 5
    assert all(
        re.match(r"\[[-\d]+ [:\d]+\] \S", line) and line.isprintable() and len(line) < 1200
        for line in written
    ), written
    assert r"Request x\n[2026-01-01 00:00:00] ERROR" in written[0]


def test_a_traceback_is_indented(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("info")
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("anybody").exception("A bug.")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR: A bug.")
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_what_is_shown_of_a_string() -> None:
    assert printable("Zürich 🚀 a b") == "Zürich 🚀 a b"
    assert printable("a\nb\t\x00\u202e") == r"a\nb\t\x00\u202e"
    assert excerpt("abc", 3) == "abc"
    assert excerpt("abcd\n" * 1000, 6) == r"abcd\na… (5000 characters)"


def step_done(num_prefill_rows: int, *, way: str = "eager") -> StepDone:
    pool = PoolStats(total=100, free=60, evictable=0, locked=30, held=10)
    return StepDone(
        step_id=1, finished_at=1.0, num_prefill_rows=num_prefill_rows, num_decode_rows=1 - num_prefill_rows, num_new_tokens=0,
        num_cached_tokens=0, num_new_seqs=0, num_running=1, num_queued=0, num_preparing=0, num_pending_tokens=0,
        num_sampled=1, pool=pool, new_token_ratio=0.5, way=way,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("way", ["eager", "replay", "compiled"])
def test_a_line_says_whether_its_step_was_replayed(
    device: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines = log_lines(device=device, decode_log_interval=1)
    with caplog.at_level(logging.INFO):
        for num_prefill_rows in (1, 0):
            lines.on(step_done(num_prefill_rows, way=way))
    assert [
        f", {device} graph: {way != 'eager'}, " in record.getMessage() for record in caplog.records
    ] == [
        True,
        True,
    ]


@pytest.mark.parametrize("is_short", [False, True])
def test_a_line_for_a_terminal_is_shorter(is_short: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LogLines(Figures(decode_log_interval=1), device="cpu", is_short=is_short).on(step_done(1))
    more = "" if is_short else "#pending-token: 0, cpu graph: False, "
    assert caplog.messages == [
        "Prefill batch, #new-seq: 1, #new-token: 0, #cached-token: 0, token usage: 0.40,"
        f" #running-req: 1, #queue-req: 0, {more}input throughput (token/s): 0.00"
    ]


def test_a_line_for_the_times_of_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    figures = Figures(decode_log_interval=40)
    done = RequestDone(
        seq_id=1,
        rid="r\n1",
        finish=Finish("length"),
        num_prompt=9,
        num_cached=4,
        num_outputs=3,
        num_retractions=1,
        accepted_at=10.0,
        admitted_at=10.5,
        first_token_at=11.0,
        ended_at=12.0,
    )
    LogLines(figures, device="cpu").on(done)
    assert not caplog.messages
    lines = LogLines(figures, device="cpu", request_times=True)
    lines.on(done)
    lines.on(RequestDone(seq_id=2, rid="r", finish=Finish("abort"), num_prompt=9, ended_at=1.0))
    assert caplog.messages == [
        "ReqTimeStats(rid=r\\n1, input_len=9, cached_input_len=4, output_len=3, attempts=2,"
        " type=unified): queue_duration=500.00ms, forward_duration=1500.00ms"
    ]


def test_probes_can_be_left_out_of_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("uvicorn.access")
    before = list(access.filters)
    leave_out_of_access_log(["/metrics", "/health"])
    try:
        caplog.set_level("INFO")
        for path in ("/metrics", "/health_generate?x=1", "/generate", "/x/metrics"):
            access.info('%s - "%s %s HTTP/%s" %d', "a:1", "GET", path, "1.1", 200)
        access.info("plain")
    finally:
        access.filters[:] = before
    assert [line.split()[3] if " - " in line else line for line in caplog.messages] == [
        "/generate",
        "/x/metrics",
        "plain",
    ]


def test_without_prefixes_every_request_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("uvicorn.access")
    before = list(access.filters)
    leave_out_of_access_log([])
    try:
        caplog.set_level("INFO")
        access.info('%s - "%s %s HTTP/%s" %d', "a:1", "GET", "/metrics", "1.1", 200)
    finally:
        access.filters[:] = before
    assert len(caplog.messages) == 1
