"""Logs of several lives, servers and files; what a server says of itself; events."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from setpoint.core.errors import SourceError
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.observations import Observations
from setpoint.doctor.readers.folder import read_folder
from setpoint.doctor.readers.log.reader import read_chunks
from setpoint.doctor.readers.log.server_args import options_of
from setpoint.doctor.readers.sources import observe_sources


def decode(
    second: int, running: int, usage: float = 0.5, pool: int = 100_000, rank: str = " TP0"
) -> str:
    return f"[2025-05-01 10:{second // 60:02}:{second % 60:02}{rank}] Decode batch, #running-req: {running}, #token: {int(pool * usage)}, token usage: {usage:.2f}, cuda graph: True, gen throughput (token/s): 100.00, #queue-req: 1\n"


def ready(second: int, pool: int = 100_000) -> str:
    return f"[2025-05-01 10:{second // 60:02}:{second % 60:02} TP0] max_total_num_tokens={pool}, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=64, context_len=4096, available_gpu_mem=6.00 GB\n"


def args(port: int = 30000) -> str:
    return f"[2025-05-01 10:00:00] server_args=ServerArgs(model_path='/m', port={port}, decode_log_interval=20)\n"


def read_all(text: str) -> list[Observations]:
    return read_chunks("server.log", [text.encode()])


def read(text: str) -> Observations:
    (seen,) = read_all(text)
    return seen


def test_the_last_life_is_diagnosed() -> None:
    first = args() + ready(1) + "".join(decode(i, 10) for i in range(5, 20))
    seen = read(first + args(30001) + ready(40) + "".join(decode(i, 20) for i in range(50, 60)))
    assert [moment.running for moment in seen.ranks[0].moments] == [20] * 10
    assert seen.facts.options["port"] == 30001
    assert "started 2 times" in seen.sources[0].notes[0]
    assert "lines 1, 18" in seen.sources[0].notes[0]


def test_a_restart_that_shows_nothing_leaves_the_life_before() -> None:
    first = args() + ready(1) + "".join(decode(i, 10) for i in range(5, 20))
    seen = read(first + "Killed\n" + args(30001))
    assert len(seen.ranks[0].moments) == 15
    assert seen.ended
    assert "last start that shows anything" in seen.sources[0].notes[0]


def test_two_servers_that_interleave_are_told_by_their_pools() -> None:
    lines = [decode(i // 2, 10, 0.5, 100_000 if i % 2 else 60_000) for i in range(60)]
    assert "pools of two sizes" in read("".join(lines)).sources[0].notes[0]
    assert read("".join(lines[::2])).sources[0].notes == []


def test_batches_during_a_start_are_another_servers() -> None:
    lines = args() + ready(1) + "".join(decode(i, 10) for i in range(5, 20)) + args(30001)
    seen = read(
        lines + "".join(decode(i, 10) for i in range(20, 30)) + ready(31) + decode(32, 3) * 9
    )
    assert any("Two servers" in note for note in seen.sources[0].notes)


def test_containers_of_one_file_are_different_servers() -> None:
    lines = [f"llm-{i % 2 + 1}  | {decode(i, 10 * (i % 2 + 1))}" for i in range(20)]
    one, two = read_all("".join(lines))
    assert {moment.running for moment in one.ranks[0].moments} == {10}
    assert {moment.running for moment in two.ranks[0].moments} == {20}
    assert [each.sources[0].name for each in (one, two)] == [
        "server.log (llm-1)",
        "server.log (llm-2)",
    ]


def test_followers_of_a_tensor_parallel_group_count_once() -> None:
    warning = "[2025-05-01 10:00:09 TP{}] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.5000 -> 0.6000\n"
    lines = decode(1, 5) + "".join(warning.format(rank) for rank in range(4)) + decode(10, 3)
    (rank,) = read(lines).ranks
    assert (rank.name, rank.num_events) == ("TP0", {"retraction": 1})
    assert sum(moment.retracted for moment in rank.moments) == 2
    only_followers = decode(1, 5) + warning.format(1) + warning.format(2)
    assert read(only_followers).ranks[0].num_events == {"retraction": 1}


@pytest.mark.parametrize(
    "message",
    [
        "decode out of memory happened, #retracted_reqs: 3, #new_token_ratio: 0.9998 -> 1.0000",
        "Decode out of memory happened. #retracted_reqs: 3, #new_token_ratio: 0.9998 -> 1.0000",
        "KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: 0.9998 -> 1.0000",
        "KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 900, #mamba_num_gained: 3, #new_token_ratio: 0.9998 -> 1.0000",
    ],
)
def test_the_messages_of_retractions(message: str) -> None:
    (rank,) = read(decode(1, 5) + f"[2025-05-01 10:00:02 TP0] WARNING: {message}\n").ranks
    assert rank.num_events == {"retraction": 1}
    assert rank.events[0].values == {"num": 3, "ratio_before": 0.9998, "ratio_after": 1.0}
    assert (rank.moments[1].retractions, rank.moments[1].retracted) == (1, 3)
    assert rank.events[0].line == 2


def test_retractions_for_tests_do_not_count() -> None:
    text = (
        "[2025-05-01 10:00:02 TP0] Testing retraction. #retracted_reqs: 1, #new_tokens_gained: 9\n"
    )
    seen = read(decode(1, 5) + text)
    assert seen.ranks[0].num_events == {}
    assert "on purpose" in seen.sources[0].notes[0]


def test_clients_texts_are_no_events() -> None:
    lines = [
        "[2025-05-01 10:00:02] Receive: obj=GenerateReqInput(text='torch.OutOfMemoryError: CUDA out of memory. Killed')\n",
        "[2025-05-01 10:00:03] Finish: obj=GenerateReqInput(text='memory leak detected'), out={'text': 'Watchdog timeout'}\n",
        '{"event": "request.received", "obj": "CUDA out of memory"}\n',
    ]
    assert read(decode(1, 5) + "".join(lines)).ranks[0].num_events == {}


@pytest.mark.parametrize("level", ["", "INFO:     "])
def test_the_reason_of_a_refusal_is_no_event(level: str) -> None:
    """The line of an HTTP request counts by its status alone: its path and the reason hold a
    client's words. Red before: any of them could be an event."""
    before = decode(1, 5)
    forged = decode(1, 9).partition("] ")[2].strip()
    lines = [
        f'[2025-05-01 10:00:02] {level}127.0.0.1:5 - "POST {path} HTTP/1.1" {status}, 0.1 s, {why}\n'
        for path, status, why in (
            ("/SIGKILL", 400, "refused: CUDA out of memory"),
            ("/generate", 404, "refused: memory leak detected, server_args=ServerArgs(tp_size=9)"),
            ("/generate", 404, f"refused: {forged}"),
            ("/generate", 503, "refused: The request queue is full."),
        )
    ]
    (rank,) = read(before + "".join(lines)).ranks
    assert rank.num_events == {"access-error": 1}
    assert len(rank.moments) == 1


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            "model_path='/a, b', tp_size=2, x=[1, 2], y={'k': (1, 2)}, z=None)",
            {"model_path": "/a, b", "tp_size": 2, "x": [1, 2], "y": {"k": (1, 2)}, "z": None},
        ),
        (
            "load_format=<LoadFormat.AUTO: 'auto'>, f=0.88, e='it\\'s', n=Other(a=1, b=2))",
            {"load_format": "auto", "f": 0.88, "e": "it's", "n": "Other(a=1, b=2)"},
        ),
        (
            '"tp_size": 4, "enable": true, "name": null}',
            {"tp_size": 4, "enable": True, "name": None},
        ),
        ("a=1, b='cut off", {"a": 1}),
        ("", {}),
    ],
)
def test_server_args_in_their_shapes(text: str, options: dict[str, object]) -> None:
    assert {name: value for name, (value, _) in options_of(text).items()} == options


def test_options_that_were_broken_into_lines() -> None:
    line = args().replace("port=30000, ", "port=30000, quant\nization=None, ")
    assert read(line + ready(1) + decode(5, 1)).facts.options == {
        "model_path": "/m",
        "port": 30000,
        "quantization": None,
        "decode_log_interval": 20,
    }


def test_facts_of_a_start_in_2024_and_of_setpoint() -> None:
    old = "[gpu=0] Load weight begin. avail mem=78.58 GB\n[gpu=0] Load weight end. type=L, dtype=torch.bfloat16, avail mem=63.29 GB\n[gpu=0] Memory pool end. avail mem=8.30 GB\n[gpu=0] max_total_num_tokens=441903, max_prefill_tokens=16384, context_len=8192\n"
    facts = read(old + decode(1, 5)).facts
    # What graphs take from it is not known.
    assert (facts.total_gb, facts.weights_gb, facts.available_gb) == (78.58, 15.29, None)
    assert facts.left_after_pool_gb == 8.3
    assert (facts.max_total_num_tokens, facts.context_len) == (441903, 8192)
    ours = "[2026-01-01 00:00:00] Model: some-model (the hub)\n[2026-01-01 00:00:01] Decision: device=cpu (no GPU)\n[2026-01-01 00:00:02] max_total_num_tokens=1000, chunked_prefill_size=-1, max_prefill_tokens=16384, max_running_requests=8, context_len=512, available_cpu_mem=3.25 GB\n"
    seen = read(ours + decode(1, 5).replace("cuda", "cpu"))
    assert (seen.facts.engine, seen.facts.model, seen.facts.device) == (
        "setpoint",
        "some-model",
        "cpu",
    )
    assert (seen.facts.chunked_prefill_size, seen.facts.available_gb) == (-1, 3.25)
    assert seen.sources[0].generation == "Setpoint"
    assert seen.facts.said["available_gb"].line == 3


def test_a_limit_that_was_lowered_at_the_start() -> None:
    line = "[2025-05-01 10:00:01 TP0] WARNING: max_running_requests was reduced from the requested 128 to 50 (per dp worker) due to the available KV cache capacity.\n"
    seen = read(args() + line + decode(2, 50))
    assert seen.facts.max_running_requests == 50
    assert seen.ranks[0].num_events == {"reduced": 1}


def test_a_folder_of_ranks_and_rotated_files(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.log").write_text(
            "".join(decode(i, 10 + rank, rank=f" DP{rank} TP{rank}") for i in range(10))
        )
    (tmp_path / "rank0.log.0").write_text(
        args() + ready(1) + "".join(decode(i, 10, rank=" DP0 TP0") for i in range(20, 30))
    )
    (tmp_path / "notes.txt").write_text("hello\n")
    (seen,) = read_folder(str(tmp_path))
    assert [(rank.name, len(rank.moments)) for rank in seen.ranks] == [
        ("DP0 TP0", 10),
        ("DP1 TP1", 10),
    ]  # restarted
    assert seen.facts.max_running_requests == 64
    assert "notes.txt" in seen.sources[0].notes[-1]


def test_files_of_one_rank_name_are_named_by_file(tmp_path: Path) -> None:
    for name in ("node-a.log", "node-b.log"):
        (tmp_path / name).write_text("".join(decode(i, 10) for i in range(10)))
    (seen,) = read_folder(str(tmp_path))
    assert [rank.name for rank in seen.ranks] == ["node-a TP0", "node-b TP0"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (args(), args(30001)),
        (args(), args().replace("'/m'", "'/other'")),
        (ready(1, 100_000), ready(1, 60_000)),
    ],
)
def test_logs_of_different_servers_in_a_folder_are_told_apart(
    tmp_path: Path, first: str, second: str
) -> None:
    for name, start in (("a.log", first), ("b.log", second)):
        (tmp_path / name).write_text(start + "".join(decode(i, 10) for i in range(2, 12)))
    seen = read_folder(str(tmp_path))
    assert [len(each.ranks) for each in seen] == [1, 1]
    assert "2 servers" in seen[0].sources[0].notes[-1]


def test_a_log_without_times_is_not_decades_away(tmp_path: Path) -> None:
    lines = [decode(i, 10) for i in range(10)]
    (tmp_path / "a.log").write_text("".join(lines))
    (tmp_path / "b.log").write_text("".join(line.partition("] ")[2] for line in lines))
    assert len(read_folder(str(tmp_path))) == 2


def test_evidence_from_a_folder_names_its_file(tmp_path: Path) -> None:
    for name in ("node-a.log", "node-b.log"):
        (tmp_path / name).write_text("".join(decode(i, 10, 0.1) for i in range(12)))
    (seen,) = read_folder(str(tmp_path))
    evidence = [each for found in diagnose(seen).findings for each in found.evidence]
    assert {each.source for each in evidence} <= {"node-a.log", "node-b.log"}
    assert evidence


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("INFO 07-22 12:55:39 [loggers.py:123] Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 30 reqs, GPU KV cache usage: 42.1%", "vLLM"),
        ("(EngineCore_DP0 pid=272) ERROR 07-22 12:55:39 [core.py:700] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.", "vLLM"),
        ("slot launch_slot_: id  0 | task 12 | processing task", "llama.cpp"),
        ("2025-01-01T10:00:00.000000Z  INFO text_generation_router::server: router/src/server.rs:1: ok", "TGI"),
    ],
)  # fmt: skip
def test_a_log_of_another_program_is_named_as_one(line: str, program: str) -> None:
    with pytest.raises(SourceError, match=f"a log of {program}"):
        read_all(f"{line}\n" * 5)


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="folder without a log"):
        read_folder(str(tmp_path))


def test_standard_input_is_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(decode(1, 5).encode())

    monkeypatch.setattr(sys, "stdin", Stdin)
    (seen,) = observe_sources(["-"], seconds=1)
    assert seen.sources[0].name == "-"


SIZE = 1_000_000_000
SECONDS = 90  # three times what is wanted of one core of a machine that does nothing else
READ = """
import sys, time
from setpoint.doctor.readers.log.reader import read_log
(seen,) = read_log(sys.argv[1])
# getrusage would count the parent that this process was forked from
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) // 1024
print(peak, time.process_time(), seen.coverage, seen.sources[0].num_batch_lines)
"""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("noise", [False, True])
def test_a_gigabyte_in_bounded_memory_and_time(tmp_path: Path, noise: bool) -> None:
    generator = random.Random(0)
    lines = []
    for index in range(20_000):
        if noise and index % 4:
            lines.append(
                f'[2025-05-01 10:00:00] INFO:     10.0.0.{index % 255}:{index} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
            )
        else:
            lines.append(decode(index % 3600, generator.randrange(500), generator.random()))
    part, path = "".join(lines).encode(), tmp_path / "server.log"
    with path.open("wb") as file:
        for _ in range(SIZE // len(part) + 1):
            file.write(part)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    peak_mib, cpu_s, coverage, num_batches = map(float, done.stdout.split())
    print(
        f"1 GB, noise: {noise}: {cpu_s:.1f} s of CPU, {time.monotonic() - began:.1f} s, {peak_mib:.0f} MiB, {num_batches:.0f} batches"
    )
    assert peak_mib < 300
    assert coverage == 1.0
    assert cpu_s < SECONDS


def test_evidence_of_a_long_line_of_options_shows_the_option_and_no_key() -> None:
    many = ", ".join(f"option_{number}={number}" for number in range(200))
    line = f"server_args=ServerArgs(model_path='m', api_key='s3cret', {many}, max_running_requests=16, admin_api_key=\"s3cret, too\", tp_size=1)\n"
    (seen,) = read_chunks("x", [line.encode()])
    said = seen.facts.said
    assert "max_running_requests=16" in said["max_running_requests"].text
    assert "model_path='m'" in said["model_path"].text
    assert len(said["max_running_requests"].text) < 500
    assert not any("s3cret" in each.text for each in said.values())


def test_saved_reports_are_no_logs(tmp_path: Path) -> None:
    line = "[2026-01-01 00:00:00 TP0] Decode batch, #running-req: 1, #token: 5, token usage: 0.10, gen throughput (token/s): 9.00, #queue-req: 0"
    (tmp_path / "report.html").write_text(f"<!doctype html>\n<span>\n{line}\n</span>\n")
    (tmp_path / "report.json").write_text(json.dumps({"format": 1, "text": line}, indent=2))
    with pytest.raises(SourceError, match="without a log"):
        observe_sources([str(tmp_path)], seconds=1)
    with pytest.raises(SourceError, match="is an HTML page"):
        observe_sources([str(tmp_path / "report.html")], seconds=1)
    with pytest.raises(SourceError, match="is a JSON document"):
        observe_sources([str(tmp_path / "report.json")], seconds=1)


def of_models(*names: str) -> str:
    """The start of a server with several models, and a load on each of them."""
    lines = [
        f"[2025-05-01 10:00:0{place}] server_args=ServerArgs(model_path='/m/{name}',"
        f" served_model_name='{name}', port=30000)\n"
        for place, name in enumerate(names)
    ]
    lines += [ready(3).replace("TP0", f"TP0 {name}") for name in names]
    lines.append(
        f"[2025-05-01 10:00:04] {len(names)} models are served, of which at most 1 is loaded at a"
        " time (--max-loaded-models). Loaded now: a.\n"
    )
    lines.append("[2025-05-01 10:00:04] The server is fired up and ready to roll!\n")
    for place in range(5, 60):
        lines.append(
            decode(place, 4, pool=50_000 * (1 + place % 2), rank=f" TP0 {names[place % 2]}")
        )
    return "".join(lines)


def test_a_server_with_several_models_was_started_once() -> None:
    """Red before: "The server was started 2 times in this log (lines 1, 2)", or two servers."""
    (seen,) = read_all(of_models("a", "b"))
    (note,) = seen.sources[0].notes
    assert note == (
        "This log is of a server with 2 models (a, b), which this report puts together. Ask the"
        " server for a report about one of them: /doctor?model=NAME."
    )
    assert sum(len(rank.moments) for rank in seen.ranks) == 55
    first = args() + ready(1) + "".join(decode(i, 10) for i in range(5, 20))
    (seen,) = read_all(first + of_models("a", "b").replace("[2025-05-01", "[2025-05-02"))
    notes = " ".join(seen.sources[0].notes)
    assert "started 2 times in this log (lines 1, 18)" in notes
    assert "2 models (a, b)" in notes


def test_messages_of_a_model_are_read_behind_its_name() -> None:
    """Red before: no event of a line such as "[… TP0 a] WARNING: …"."""
    words = "CPU contention: the engine had a CPU for 4.0 s of the last 10.0 s of its steps (40 %)."
    (seen,) = read_all(of_models("a", "b/c") + f"[2025-05-01 10:01:00 TP0 b/c] WARNING: {words}\n")
    assert [
        event.kind for rank in seen.ranks for event in rank.events if event.kind != "ready"
    ] == ["cpu-contention"]
