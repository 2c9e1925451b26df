"""The log reader: every generation of SGLang's lines, whatever is wrapped around them."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import random
import re
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.errors import SourceError
from setpoint.doctor.observations import Observations
from setpoint.doctor.readers.log import stream
from setpoint.doctor.readers.log.reader import read_chunks, read_log

LATE_2024 = """\
[16:43:29 TP0] Prefill batch. #new-seq: 4, #new-token: 8192, #cached-token: 291, cache hit rate: 2.76%, token usage: 0.04, #running-req: 1, #queue-req: 38
[16:43:31 TP0] Decode batch. #running-req: 29, #token: 12000, token usage: 0.55, gen throughput (token/s): 1204.50, #queue-req: 18
"""
IN_2025 = """\
[2025-09-03 18:33:18 TP0] Prefill batch. #new-seq: 1, #new-token: 103, #cached-token: 1, token usage: 0.00, #running-req: 0, #queue-req: 0,{space}
[2025-09-03 18:33:19 TP0] Decode batch. #running-req: 1, #token: 137, token usage: 0.01, accept len: 2.54, cuda graph: True, gen throughput (token/s): 1.06, largest-len: 0, #queue-req: 0,{space}
""".replace("{space}", " ")
IN_2026 = """\
[2026-07-04 04:31:24 DP1 TP3 EP3] Prefill batch [17], #new-seq: 12, #new-token: 43008, #cached-token: 7, full token usage: 0.14, swa token usage: 0.02, mamba usage: 0.20, #running-req: 1, #queue-req: 97, #pending-token: 109585, npu graph: False, input throughput (token/s): 15734.14, est. prefill TFLOPS/s (per GPU): 320.5
[2026-07-04 04:31:26 DP1 TP3 EP3] Decode batch [18], #running-req: 13, #full token: 165376, full token usage: 0.42, #swa token: 768, swa token usage: 0.03, pre-allocated usage: 0.01, #prealloc-req: 2, #transfer-req: 1, #retracted-req: 0, npu graph: False, gen throughput (token/s): 167.04, #queue-req: 90
"""


def read(text: str | bytes, name: str = "server.log") -> Observations:
    data = text.encode() if isinstance(text, str) else text
    (seen,) = read_chunks(name, [data])
    return seen


def test_lines_of_late_2024_have_a_clock_without_a_date() -> None:
    seen = read(LATE_2024)
    prefill, decode = seen.ranks[0].moments
    assert decode.at - prefill.at == 2 == prefill.seconds
    assert prefill.other == {"cache hit rate": 0.0276}
    assert decode.gen_throughput == 1204.5
    assert (seen.ranks[0].name, seen.sources[0].generation) == ("TP0", "SGLang 2024")


def test_lines_of_2025() -> None:
    seen = read(IN_2025)
    prefill, decode = seen.ranks[0].moments
    assert (prefill.new_tokens, prefill.cached_tokens) == (103, 1)
    assert (decode.graph_hits, decode.graph_misses) == (1, 0)
    assert decode.other == {"accept len": 2.54, "largest-len": 0}
    assert seen.sources[0].generation == "SGLang 2025"
    assert seen.sources[0].unknown_fields == {}


def test_lines_of_2026() -> None:
    seen = read(IN_2026)
    prefill, decode = seen.ranks[0].moments
    assert seen.ranks[0].name == "DP1 TP3 EP3"
    assert prefill.usage == 0.14
    assert prefill.other_usage == {"swa": 0.02, "mamba": 0.2}
    assert (prefill.pending_tokens, prefill.input_throughput) == (109585, 15734.14)
    assert prefill.other == {"iter": 17, "est. prefill TFLOPS/s (per GPU)": 320.5}
    assert (prefill.graph_misses, decode.graph_misses, decode.missed_running) == (0, 1, 13)
    assert (decode.tokens, decode.queue_max, decode.queue_min) == (165376, 90, 90)
    assert decode.other_usage == {"swa": 0.03, "pre-allocated": 0.01}
    assert seen.sources[0].unknown_fields == {}
    assert decode.at == 1783139486.0


def test_unknown_fields_are_kept_and_counted() -> None:
    line = "[2027-01-01 00:00:0{} TP0] Decode batch, #running-req: 2, #token: 9, token usage: 0.10, moon phase: 0.25, gen throughput (token/s): 3.5, #queue-req: 0\n"
    seen = read("".join(line.format(second) for second in range(5)))
    assert seen.ranks[0].moments[2].other == {"moon phase": 0.25}
    assert seen.sources[0].unknown_fields == {"moon phase": 5}
    assert seen.coverage == 1.0


def test_values_that_cannot_be_read_lower_the_coverage() -> None:
    seen = read(IN_2025 + IN_2025.replace("0.01", "n/a"))
    assert (seen.sources[0].num_batch_lines, seen.sources[0].num_understood) == (4, 3)
    assert "line 4" in seen.sources[0].notes[0]


PLAIN = IN_2025.splitlines()
WRAPPED = {
    "docker compose": [f"sglang-1  | {line}" for line in PLAIN],
    "kubernetes": [
        f"2025-09-03T18:33:2{i}.000000001Z stderr F {line}" for i, line in enumerate(PLAIN)
    ],
    "kubectl": [f"[pod/llm-0/main] {line}" for line in PLAIN],
    "journald": [f"Sep 03 18:33:2{i} host sglang[12{i}]: {line}" for i, line in enumerate(PLAIN)],
    "docker json": [
        json.dumps({"log": f"{line}\n", "stream": "stderr", "time": f"2025-09-03T18:33:2{i}.5Z"})
        for i, line in enumerate(PLAIN)
    ],
    "structured": [json.dumps({"seq": i, "message": line}) for i, line in enumerate(PLAIN)],
    "colours": [f"\x1b[32m{line}\x1b[0m" for line in PLAIN],
    "progress": [
        f"Capturing:  0%|   | 0/5 [00:00<?, ?it/s]\rCapturing: 20%|=  | 1/5 [00:00<?]{line}"
        for line in PLAIN
    ],
    "logging": [f"2025-09-03 18:33:20,123 - INFO - {line}" for line in PLAIN],
    "milliseconds": [line.replace(" TP0]", ".250 TP0]") for line in PLAIN],
    "windows": [f"{line}\r" for line in PLAIN],
}


@pytest.mark.parametrize("form", WRAPPED)
def test_wrapped_lines_are_the_same(form: str) -> None:
    bare, seen = read(IN_2025), read("\n".join(WRAPPED[form]) + "\n")
    assert seen.coverage == 1.0
    assert len(seen.ranks) == 1
    for ours, theirs in zip(seen.ranks[0].moments, bare.ranks[0].moments, strict=True):
        later = 0.25 if form == "milliseconds" else 0
        assert ours.at == theirs.at + later
        ours.at, ours.text, ours.line = theirs.at, theirs.text, theirs.line
        assert ours == theirs


@pytest.mark.parametrize("ending", ["", "\n", ", \n"])
def test_a_wrapped_line_without_a_stamp_has_the_time_of_its_wrapping(ending: str) -> None:
    line = f"[TP0] Decode batch. #running-req: 1, #token: 137, token usage: 0.00, #queue-req: 0{ending}"
    lines = [json.dumps({"log": line, "time": f"2025-09-03T18:33:2{i}.5Z"}) for i in range(3)]
    assert [moment.at % 60 for moment in read("\n".join(lines) + "\n").ranks[0].moments] == [
        20.5,
        21.5,
        22.5,
    ]


def test_times_without_stamps_follow_from_the_throughput() -> None:
    line = "Decode batch. #running-req: 20, #token: 137, token usage: 0.00, gen throughput (token/s): 400.00, #queue-req: 0\n"
    seen = read(line * 4)
    assert [moment.at for moment in seen.ranks[0].moments] == [2, 4, 6, 8]  # 40 steps x 20 / 400
    assert seen.sources[0].clock == "estimated"


def test_a_clock_that_goes_back_is_repaired_and_noted() -> None:
    lines = PLAIN[1].replace("18:33:19", "{}") + "\n"
    stamps = ["10:00:00", "10:00:10", "09:30:00", "09:30:05"]
    seen = read("".join(lines.replace("{}", stamp) for stamp in stamps))
    times = [moment.at for moment in seen.ranks[0].moments]
    assert [at - times[0] for at in times] == [0, 10, 10, 15]
    assert "clock goes back once" in seen.sources[0].notes[0]


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("Engine 0", 1, "An engine of the server died (line 2)."),
        ("Engine 0", 3, "died 3 times (last in line 10)."),
        ("Engine 0 of model a/b-1", 1, "An engine of the server died (line 2)."),
    ],
)
def test_an_engine_that_died_and_was_replaced_is_noted(name: str, count: int, words: str) -> None:
    lines = [
        PLAIN[1],
        f"[2025-09-03 18:33:20] ERROR: {name} died: The engine process was ended by SIGSEGV.",
        f"[2025-09-03 18:33:20] WARNING: {name} is started again (1 of at most 3 in an hour).",
        PLAIN[1].replace("18:33:19", "18:33:40"),
    ]
    assert words in " ".join(read("\n".join(lines * count) + "\n").sources[0].notes)


def test_midnight_without_dates_is_no_step_back() -> None:
    seen = read(LATE_2024.replace("16:43:29", "23:59:59").replace("16:43:31", "00:00:01"))
    assert seen.ranks[0].moments[1].at - seen.ranks[0].moments[0].at == 2
    assert seen.sources[0].notes == []


def test_ranks_are_kept_apart() -> None:
    lines = [PLAIN[1].replace("TP0", f"DP{i % 2} TP{i % 2}") for i in range(6)]
    seen = read("\n".join(lines) + "\n")
    assert [(rank.name, len(rank.moments)) for rank in seen.ranks] == [
        ("DP0 TP0", 3),
        ("DP1 TP1", 3),
    ]


def log_of(num: int, seed: int = 0) -> str:
    generator = random.Random(seed)
    lines = []
    for index in range(num):
        second = f"2026-01-01 {index // 3600 % 24:02}:{index // 60 % 60:02}:{index % 60:02}"
        running, usage = generator.randrange(200), generator.random()
        if index % 7 == 3:
            lines.append(
                f"[{second} TP0] Prefill batch, #new-seq: 3, #new-token: {running * 8}, #cached-token: 5, token usage: {usage:.2f}, #running-req: {running}, #queue-req: {index % 50}, #pending-token: 0, cuda graph: False, input throughput (token/s): 100.25"
            )
        elif index % 11 == 5:
            lines.append(
                f"[{second} TP0] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 7, #new_token_ratio: 0.2000 -> 0.4000"
            )
        elif index % 13 == 7:
            lines.append(f'[{second}] INFO:     10.0.0.1:55 - "POST /generate HTTP/1.1" 200 OK')
        else:
            lines.append(
                f"[{second} TP0] Decode batch, #running-req: {running}, #token: {running * 50}, token usage: {usage:.2f}, cuda graph: {index % 5 > 0}, gen throughput (token/s): {usage * 1000:.2f}, #queue-req: {index % 50}"
            )
    return "\n".join(lines) + "\n"


def test_a_long_log_is_bounded_and_its_sums_hold() -> None:
    seen = read(log_of(20_000))
    moments = seen.ranks[0].moments
    assert 2000 < len(moments) <= 4096
    decodes = [line for line in log_of(20_000).splitlines() if "Decode" in line]
    assert sum(moment.num_decode for moment in moments) == len(decodes)
    assert sum(moment.graph_misses for moment in moments) == sum(
        "graph: False" in line for line in decodes
    )
    assert sum(moment.retracted for moment in moments) == 2 * seen.ranks[0].num_events["retraction"]
    assert len(seen.ranks[0].events) == 64
    assert all(a.at <= b.at for a, b in itertools.pairwise(moments))
    assert log_of(20_000).splitlines()[moments[100].line - 1] == moments[100].text


@given(st.lists(st.integers(1, 4000), max_size=40), st.integers(0, 5))
def test_how_the_bytes_arrive_does_not_matter(sizes: list[int], seed: int) -> None:
    data = log_of(300, seed).encode()
    chunks, start = [], 0
    for size in sizes:
        chunks.append(data[start : start + size])
        start += size
    chunks.append(data[start:])
    assert read_chunks("x", chunks) == read_chunks("x", [data])


WORDS = [
    "Decode batch",
    ", #running-req: ",
    "[2026-01-01 00:00:00 TP0] ",
    "1",
    "\n",
    "{",
    '"log": "',
    "\r",
    "server_args=ServerArgs(",
    "'",
    "Traceback (most recent call last)",
    "CUDA out of memory",
    "max_total_num_tokens=1, ",
    "#retracted_reqs: 1",
    "token usage: nan",
    "\x1b[3",
    "0%|",
    "] ",
    "): 3, #queue-req: 1e999",
    "é",
    "Killed",
    "99:99:99",
]


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        *(("token usage", value) for value in ("nan", "inf", "-5", "1.51", "1e999")),
        *(("#queue-req", value) for value in ("1e22", "-1", "nan")),
        *(("#running-req", value) for value in ("nan", "2000000001")),
        ("gen throughput (token/s)", "inf"),
    ],
)
def test_a_line_with_a_figure_that_cannot_be_is_not_understood(name: str, figure: str) -> None:
    figures = {"#running-req": "3", "token usage": "0.5", "gen throughput (token/s)": "9"}
    figures |= {"#queue-req": "2"}

    def line(second: int, changed: dict[str, str]) -> str:
        fields = ", ".join(f"{key}: {value}" for key, value in {**figures, **changed}.items())
        return f"[2026-01-01 00:00:{second:02} TP0] Decode batch. {fields}\n"

    seen = read(line(0, {}) + line(1, {name: figure}) + line(2, {}))
    assert [moment.line for moment in seen.ranks[0].moments] == [1, 3]
    assert seen.coverage == pytest.approx(2 / 3)
    assert "the first is line 2: [2026-01-01 00:00:01 TP0] Decode" in seen.sources[0].notes[0]


@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=60))
def test_garbage_never_raises_anything_else(words: list[str]) -> None:
    data = "".join(words).encode("utf-8", "replace")
    with contextlib.suppress(SourceError):
        read_chunks("x", [data])


@given(
    st.integers(0, 4000), st.floats(0, 1), st.floats(0, 1e6), st.booleans(), st.integers(0, 10**7)
)
def test_a_printed_moment_read_back_is_equal(
    running: int, usage: float, throughput: float, graph: bool, tokens: int
) -> None:
    line = f"[2026-01-01 00:00:00] Decode batch, #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, cuda graph: {graph}, gen throughput (token/s): {throughput:.2f}, #queue-req: {tokens}\n"
    (moment,) = read(line).ranks[0].moments
    again = f"[2026-01-01 00:00:00] Decode batch, #running-req: {moment.running:.0f}, #token: {moment.tokens:.0f}, token usage: {moment.usage:.2f}, cuda graph: {moment.graph_hits == 1}, gen throughput (token/s): {moment.gen_throughput:.2f}, #queue-req: {moment.queue:.0f}\n"
    assert again == line
    assert read(again).ranks[0].moments == [moment]


@pytest.mark.parametrize("packing", ["plain", "gzip", "zstd", "utf-16", "bom", "cut gzip"])
def test_files_are_unpacked(tmp_path: Path, packing: str) -> None:
    data = log_of(400).encode()
    packed = {
        "plain": data,
        "gzip": gzip.compress(data),
        "zstd": zstandard.compress(data),
        "utf-16": data.decode().encode("utf-16"),
        "bom": b"\xef\xbb\xbf" + data,
        "cut gzip": gzip.compress(data)[:-40],
    }[packing]
    path = tmp_path / "server.log"
    path.write_bytes(packed)
    (seen,) = read_log(str(path))
    wanted = read(data)
    if packing != "cut gzip":
        assert seen.ranks == wanted.ranks
    assert len(seen.ranks[0].moments) > 100


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
@pytest.mark.parametrize(
    ("begins_as_log", "filler"), [(True, b"\n"), (True, b"\0"), (False, b"\n")]
)
def test_what_unpacks_without_end_is_left_out(
    tmp_path: Path,
    packing: str,
    begins_as_log: bool,
    filler: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red before, with zeros, which are one endless line: what was before them counted as
    nothing."""
    monkeypatch.setattr(stream, "MAX_SWOLLEN", 4 << 20)
    head = log_of(400).encode() if begins_as_log else b"hello\n" * 10
    bomb = head + filler * (32 << 20)
    path = tmp_path / "server.log"
    path.write_bytes(gzip.compress(bomb) if packing == "gzip" else zstandard.compress(bomb))
    if not begins_as_log:
        with pytest.raises(SourceError, match="250 times its size") as raised:
            read_log(str(path))
        assert str(path) in str(raised.value)
        return
    (seen,) = read_log(str(path))
    notes = "\n".join(seen.sources[0].notes)
    assert re.search(r"250 times its size, .* after the first \d+ MiB was left out", notes)
    assert seen.ranks == read(head).ranks


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (bytes(range(256)) * 50, "binary file"),
        (b"Jan 01 kernel: hello\n" * 20, "none that SGLang or Setpoint writes"),
        (b"INFO 07-14 [loggers.py:273] vllm Avg prompt throughput: 1546.5\n", "log of vLLM"),
        (b"\x1f\x8b\x08garbage that is no gzip", "damaged"),
        (b"\0" * 5000, "none that SGLang"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=words) as raised:
        read_log(str(path))
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SourceError, match=r"Cannot read /nowhere/x\.log"):
        read_log("/nowhere/x.log")


def test_a_cut_last_line_is_left_out() -> None:
    seen = read(IN_2025 + PLAIN[1][:90])
    assert len(seen.ranks[0].moments) == 2
    assert seen.coverage == 1.0
    assert "cut off" in seen.sources[0].notes[0]


def test_wrong_bytes_are_replaced() -> None:
    seen = read(b"caf\xe9 \xff\xfe\n" + IN_2025.encode())
    assert len(seen.ranks[0].moments) == 2
