"""What logs from outside taught: ends without a traceback, hangs, where memory ran out, what changes
over time, excerpts of a few lines, and lines that were made to keep their reader busy."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from doctor_cases import decode, prefill, rank, seen

from setpoint.core.errors import SourceError
from setpoint.core.moments import Moment
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.findings import Report
from setpoint.doctor.readers import sources
from setpoint.doctor.readers.log import budget
from setpoint.doctor.readers.log.reader import read_chunks

BEGIN = datetime(2025, 5, 1, 10)
READY = "max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=32768, available_gpu_mem=6.50 GB"
SIGQUIT = "Received sigquit from a child process. It usually means the child failed."


class Log:
    """Lines of a server, a second apart unless told otherwise."""

    def __init__(self, ready: bool = True) -> None:
        self.second = 0.0
        self.lines: list[str] = []
        if ready:
            self.say(READY)

    def say(self, text: str, after: float = 1.0) -> Log:
        self.second += after
        stamp = f"{BEGIN + timedelta(seconds=self.second):%Y-%m-%d %H:%M:%S}"
        self.lines.append(f"[{stamp} TP0] {text}")
        return self

    def raw(self, *texts: str) -> Log:
        self.lines += texts
        return self

    def decode(self, running: int, queue: int, usage: float) -> Log:
        return self.say(
            f"Decode batch, #running-req: {running}, #token: {int(usage * 4e5)}, token usage: {usage:.2f}, cuda graph: True, gen throughput (token/s): {running * 20.5:.2f}, #queue-req: {queue}"
        )

    def prefill(self, new: int, cached: int, queue: int, running: int, usage: float) -> Log:
        return self.say(
            f"Prefill batch, #new-seq: 1, #new-token: {new}, #cached-token: {cached}, token usage: {usage:.2f}, #running-req: {running}, #queue-req: {queue}"
        )

    def serve(self, running: int = 20, queue: int = 0, usage: float = 0.3) -> Log:
        for index in range(30):
            self.decode(running + index % 3, queue, usage)
            if index % 5 == 0:
                self.prefill(500, 0, queue, running, usage)
        return self

    def report(self) -> Report:
        (observed,) = read_chunks("server.log", ["\n".join(self.lines).encode() + b"\n"])
        return diagnose(observed)


@pytest.mark.parametrize(
    "text",
    [
        "Fatal Python error: Segmentation fault",
        "./run.sh: line 14:  7731 Segmentation fault      (core dumped) python3 -m sglang.launch_server",
        "./run.sh: line 14:  7731 Aborted                 (core dumped) python3 -m sglang.launch_server",
        "Killed",
        "Memory cgroup out of memory: Killed process 4183 (python3) total-vm:92274688kB",
        "sglang-1 exited with code 137",
        "sglang.service: Main process exited, code=killed, status=9/KILL",
        "Subprocess scheduler_0 (pid=4183) crashed with exit code -11. Triggering SIGQUIT for cleanup...",
        "Child process unexpectedly failed with an exit code 9. pid=4183",
        "Scheduler or DataParallelController 4183 terminated with -9",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "Memory access fault by GPU node-4 on address 0x7f0e00000000. Reason: Unknown.",
        "NVRM: Xid (PCI:0000:4e:00): 79, pid=4183, GPU has fallen off the bus.",
    ],
)
@pytest.mark.parametrize(("queue", "usage"), [(0, 0.1), (90, 0.97)])
def test_a_death_without_a_traceback_outranks_the_load(text: str, queue: int, usage: float) -> None:
    report = Log().serve(20, queue, usage).raw(text).report()
    assert report.verdict == "server-dead"
    assert text[:40] in report.findings[0].evidence[0].text
    assert Log().serve(20, queue, usage).raw(text).serve(20, queue, usage).report().verdict != (
        "server-dead"
    ), "batches follow: the server survived it"


@pytest.mark.parametrize(
    "text",
    [
        "process exited with code 0",
        "Gracefully exiting... Remaining number of requests 0.",
        "If you run into out of memory errors, lower --mem-fraction-static.",
        "subprocess.CalledProcessError: Command 'py-spy' returned non-zero exit status 1.",
    ],
)
def test_an_orderly_end_and_advice_are_no_deaths(text: str) -> None:
    assert Log().serve().raw(text).report().verdict == "client-bound"


HEALTH = "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 05:49:14. last_heartbeat time: 05:42:53"


def test_a_line_about_a_failed_health_check_is_a_servers_log() -> None:
    assert Log(ready=False).say(HEALTH).report().verdict == "server-dead"


def test_health_checks_that_fail_to_the_end_show_a_server_that_hangs() -> None:
    log = Log().serve()
    for _ in range(3):
        log.say('INFO:     10.0.0.7:4183 - "GET /health HTTP/1.1" 503 Service Unavailable', 20)
    assert log.report().verdict == "server-dead"
    assert log.serve().report().verdict == "client-bound"


@pytest.mark.parametrize(
    ("running", "queue", "verdict"),
    [(20, 3, "server-dead"), (21, 0, "server-dead"), (1, 0, "client-bound")],
)
def test_a_log_that_goes_on_without_batches(running: int, queue: int, verdict: str) -> None:
    """... shows a hang if work was left; the last request of a load may end unseen."""
    log = Log().serve().decode(running, queue, 0.3)
    for _ in range(20):
        log.say('INFO:     10.0.0.7:4183 - "GET /health_generate HTTP/1.1" 200 OK', 15)
    assert log.report().verdict == verdict


LOOP = '  File "/sgl/srt/managers/scheduler.py", line 1416, in run_batch\n    step()'
TRIED = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total capacity of 79.10 GiB of which 18.00 MiB is free."


def test_memory_that_runs_out_in_the_sampler_is_decodes() -> None:
    log = Log().serve(200, 0, 0.8).prefill(900, 0, 3, 200, 0.8)
    log.say("Scheduler hit an exception: Traceback (most recent call last):").raw(
        LOOP, '  File "/sgl/srt/layers/sampler.py", line 131, in forward', TRIED.format(594), ""
    )
    assert log.say(SIGQUIT).report().verdict == "oom-decode"


def test_a_request_that_fits_in_no_pool_is_decodes() -> None:
    log = Log().serve(3, 0, 0.95).prefill(900, 0, 0, 3, 0.95)
    log.say("Out of memory even after retracting all other requests in the decode batch.")
    assert log.report().verdict == "oom-decode"


@pytest.mark.parametrize(("running", "where"), [(9, "oom-prefill"), (240, "oom-decode")])
def test_the_size_of_a_bare_allocation_tells_which_step_asked_for_it(
    running: int, where: str
) -> None:
    report = Log().serve(running, 0, 0.4).raw(TRIED.format(2048)).report()
    assert report.verdict == where
    assert report.findings[0].confidence < 0.7


def test_no_larger_chunk_is_advised_if_prompts_were_not_split() -> None:
    log = Log(ready=False)
    for tokens in (31_007, 44_300, 12_950) * 3:
        log.prefill(tokens, 0, 2, 8, 0.3).decode(9, 2, 0.3)
    log.prefill(52_111, 0, 2, 8, 0.3).raw(TRIED.format(9000))
    action = log.report().findings[0].action
    assert (action.flag, action.direction, action.value) == (
        "--chunked-prefill-size",
        "decrease",
        4096,
    )


@pytest.mark.parametrize(
    "text",
    [
        "max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled value instead.",
        "RuntimeError: Trying to create tensor with negative dimension -22080: [-22080, 8, 128]",
    ],
)
def test_a_pool_of_less_than_nothing_is_a_failed_plan(text: str) -> None:
    log = Log(ready=False).say("Load weight begin. avail mem=78.60 GB")
    log.say("Load weight end. type=M, avail mem=21.73 GB, mem usage=56.87 GB.").raw(text)
    report = log.say(SIGQUIT).report()
    assert report.verdict == "oom-init"
    assert report.findings[0].action.direction == "increase"


@pytest.mark.parametrize(
    ("queue", "flag"), [(30, "--schedule-policy"), (0, "--enable-hierarchical-cache")]
)
def test_a_hit_rate_that_collapses_is_the_verdict(queue: int, flag: str) -> None:
    log = Log()
    for index in range(40):
        cached = 2200 if index < 15 else 60
        log.prefill(2500 - cached, cached, 0 if index < 15 else queue, 20, 0.6)
        log.decode(20 + index % 3, 0 if index < 15 else queue, 0.6)
    report = log.report()
    assert report.verdict == "prefix-miss"
    assert report.findings[0].action.flag == flag
    assert "kv-conservative" not in [each.cause for each in report.findings]


def test_a_cache_that_was_flushed_is_no_collapse() -> None:
    log = Log()
    for index in range(40):
        if index == 30:
            log.say("Cache flushed successfully!")
        cached = 2200 if index < 30 else 60
        log.prefill(2500 - cached, cached, 0, 20, 0.6).decode(20, 0, 0.6)
    assert log.report().verdict == "client-bound"


def excerpt(lines: list[Moment]) -> Report:
    return diagnose(seen(rank(lines)))


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ([decode(5, 0, 0.02) for _ in range(3)], "client-bound"),
        ([decode(160 + i, 90, 0.94) for i in range(4)], "healthy"),
        ([decode(6, 40, 0.99) for _ in range(5)], "kv-full"),
        ([decode(48, 90, 0.02) for _ in range(4)], "seq-cap"),
        ([decode(200, 5200, 0.96) for _ in range(3)], "queue-too-long"),
        ([decode(41, 12, 0.53), decode(44, 9, 0.55)], "not-enough-evidence"),
        ([prefill(3, 1600, 0, 0, 0.05), *(decode(3, 0, 0.06) for _ in range(2))], "not-enough-evidence"),
    ],
)  # fmt: skip
def test_an_excerpt_that_proves_its_point_gets_a_verdict_with_its_doubt(
    lines: list[Moment], verdict: str
) -> None:
    report = excerpt(lines)
    assert report.verdict == verdict
    if verdict != "not-enough-evidence":
        assert all(finding.confidence <= 0.75 for finding in report.findings)
        assert f"{len(lines)} lines (" in report.missing[0]


def test_a_number_of_running_requests_that_stands_still_is_a_cap() -> None:
    """... and lowering the reserve would change nothing, however short the log is."""
    for lines in (
        [decode(48 - (i % 5 == 0), 60, 0.01) for i in range(12)],
        [decode(value, 250, 0.2) for value in (200, 192, 189, 200, 196, 197, 200, 200, 194, 200)],
    ):
        report = excerpt(lines)
        assert report.verdict == "seq-cap"
        assert report.findings[0].action.flag == "--max-running-requests"


@pytest.mark.parametrize(
    ("running", "queue", "usage", "verdict"),
    [(40, 84, 0.965, "kv-full"), (90, 190, 0.965, "kv-full"), (170, 290, 0.94, "healthy"), (30, 15, 0.92, "healthy")],
)  # fmt: skip
def test_how_long_requests_wait_at_a_full_pool_decides(
    running: int, queue: int, usage: float, verdict: str
) -> None:
    lines = [decode(running + i % 3, queue + i % 5, usage) for i in range(40)]
    assert excerpt(lines).verdict == verdict


def test_little_free_memory_comes_before_an_empty_queue() -> None:
    lines = [decode(8, 0, 0.1) for _ in range(30)]
    facts = {"available_gb": 1.2, "total_gb": 79.0, "chunked_prefill_size": 8192}
    assert diagnose(seen(rank(lines), **facts)).verdict == "mem-headroom-low"


@pytest.mark.parametrize(
    "wrapped",
    [
        "sglang-1  | {}",
        "[pod/llm-7f9c/sglang] {}",
        "May 01 10:00:00 node-3 sglang[48213]: {}",
        "2025-05-01T10:00:00.123456789Z stderr F {}",
        "(SGLangActor pid=4183, ip=10.1.2.3) {}",
        "llama-serving-0 sglang {}",
        "0: {}",
        "\x1b[32mINFO\x1b[0m {}\x1b[0m",
        "{}\r",
    ],
)
def test_a_quoted_line_is_the_one_whose_number_it_has(wrapped: str) -> None:
    log = Log().serve(20, 0, 0.3).raw("", "", " ", "Killed")
    lines = [wrapped.format(line) for line in log.lines]
    (observed,) = read_chunks("x", ["\n".join(lines).encode() + b"\n"])
    evidence = [each for found in diagnose(observed).findings for each in found.evidence]
    assert evidence
    for each in evidence:
        plain = lines[each.line - 1].replace("\x1b[32m", "").replace("\x1b[0m", "").strip()
        assert each.text == plain


def test_empty_lines_between_batches_are_counted() -> None:
    line = Log(ready=False).decode(5, 0, 0.1).lines[0]
    text = f"{line}\n\n\n \n" * 8000  # more than a block, whose lines are found by one pattern
    (observed,) = read_chunks("x", [text.encode()])
    assert all((moment.line - 1) % 4 == 0 for moment in observed.ranks[0].moments)


def test_a_line_of_very_many_fields_is_no_batch() -> None:
    line = "Decode batch, #running-req: 1, " + ", ".join(f"#f{i}: {i}" for i in range(5000))
    with pytest.raises(SourceError):
        read_chunks("x", [f"{line}, #queue-req: 0\n".encode() * 40])


def test_a_log_that_takes_too_long_is_left_out_from_there_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(clock)))
    monkeypatch.setattr(budget, "GRACE_S", 1.0)
    line = Log(ready=False).decode(5, 0, 0.1).lines[0]
    (observed,) = read_chunks("x", [f"{line}\n".encode() * 20_000])
    assert any("was left out" in note for note in observed.sources[0].notes)
    assert observed.sources[0].num_lines < 20_000


def test_files_of_a_folder_share_the_time_of_one_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(clock)))
    monkeypatch.setattr(budget, "GRACE_S", 450.0)
    line = Log(ready=False).decode(5, 0, 0.1).lines[0]
    for name in "abcdef":
        (tmp_path / f"{name}.log").write_text(f"{line}\n" * 20)
    seen = sources.observe_sources([str(tmp_path)], seconds=0.0)
    notes = [note for each in seen for source in each.sources for note in source.notes]
    (note,) = [note for note in notes if note.startswith("Not read: ")]
    assert "f.log" in note
    assert sum(source.num_lines for each in seen for source in each.sources) < 6 * 20


def test_a_folder_of_very_many_servers_shows_the_first(tmp_path: Path) -> None:
    line = Log(ready=False).decode(5, 0, 0.5).lines[0]
    for number in range(70):
        options = f"[2025-05-01 10:00:00] server_args=ServerArgs(port={number})\n"
        (tmp_path / f"{number:02}.log").write_text(options + f"{line}\n" * 3)
    seen = sources.observe_sources([str(tmp_path)], seconds=0.0)
    assert len(seen) <= 64
    assert any("only the first 64" in note for note in seen[0].sources[0].notes)


def test_very_many_ranks_have_fewer_moments_each(tmp_path: Path) -> None:
    """They stand for all lines, but a diagnosis ends in bounded time."""
    lines = Log(ready=False).decode(5, 0, 0.1).lines * 2
    path = tmp_path / "ranks.log"
    path.write_text(
        "".join(f"{lines[0].replace('TP0', f'DP{n % 200} TP0')}\n" for n in range(80_000))
    )
    (seen,) = sources.observe_sources([str(path)], seconds=0.0)
    assert sum(len(rank.moments) for rank in seen.ranks) <= sources.MAX_MOMENTS
    assert sum(moment.num_decode for rank in seen.ranks for moment in rank.moments) == 80_000
