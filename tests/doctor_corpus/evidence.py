"""Sources that do not say enough for a verdict."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from cases import Label, Simulated, Written
from deployments import A10G, H100, L40S, Deployment
from generations import Style, Writer
from startup import start_up

from setpoint_testing.traffic import Arrivals, Load, uniform

NOTHING = Label(cause="not-enough-evidence", why="The source shows no load of a server.")
TOO_SHORT = Label(
    cause="not-enough-evidence",
    why="The log ends before the load has lasted: a handful of lines shows no lasting state.",
)
TINY = Load(uniform(5, 20), uniform(3, 8), 16)


def simulated() -> list[Simulated]:
    chat = Load(uniform(200, 800), uniform(100, 300), 1024)
    return [
        Simulated(
            name="evidence-three-lines", label=TOO_SHORT, generation="sglang-2025", deployment=Deployment(L40S), load=chat,
            arrivals=Arrivals(users=60), words="60 users; three batch lines", max_lines=3,
        ),
        Simulated(
            name="evidence-one-decode-line", label=TOO_SHORT, generation="sglang-2024", deployment=Deployment(A10G), load=chat,
            arrivals=Arrivals(users=3), words="3 users; the log ends with the first decode line", max_lines=4, style=Style(stamps="none", rank=""),
        ),
        Simulated(
            name="evidence-health-checks", label=NOTHING, generation="sglang-0.5.23", deployment=Deployment(H100), load=TINY,
            arrivals=Arrivals(rate=0.1), words="a health check of a few tokens every 10 s", seconds=300, style=Style(begin="2026-01-01 00:00:00"),
        ),
        Simulated(
            name="evidence-ramp-only", label=TOO_SHORT, generation="setpoint", deployment=Deployment(L40S), load=chat,
            arrivals=Arrivals(users=30, ramp_s=1), words="30 users; the log ends after 6 batch lines", max_lines=6, style=Style(begin="2026-11-20 08:00:00"),
        ),
    ]  # fmt: skip


def _written(name: str, text: bytes, how: str, label: Label = NOTHING) -> Written:
    return Written(
        name=f"evidence-{name}", label=label, generation="none", text=text,
        made_by=f"Written: {how} {label.why}", source="written",
    )  # fmt: skip


def _start(generation: str) -> bytes:
    style = Style(begin="2026-10-10 10:10:10")
    writer = Writer(generation, style, 1)  # type: ignore[arg-type]
    lines = start_up(Deployment(H100), generation, style, writer)  # type: ignore[arg-type]
    return ("\n".join(lines) + "\n").encode()


def _vllm() -> Iterator[str]:
    for second in range(60):
        yield (
            f"INFO 06-12 10:{second:02}:00 [loggers.py:118] Engine 000: Avg prompt throughput:"
            f" {120 + second:.1f} tokens/s, Avg generation throughput: {900 + 3 * second:.1f}"
            f" tokens/s, Running: {20 + second % 7} reqs, Waiting: {second % 5} reqs, GPU KV cache"
            f" usage: {30 + second / 10:.1f}%, Prefix cache hit rate: 12.3%"
        )


def _nginx() -> Iterator[str]:
    for second in range(120):
        yield (
            f'10.0.0.{second % 9} - - [12/Jun/2025:10:00:{second % 60:02} +0000] "POST'
            f' /v1/chat/completions HTTP/1.1" 200 {700 + second} "-" "python-requests/2.32.3"'
        )


def written() -> list[Written]:
    noise = bytes((zlib.crc32(bytes([i % 251, i // 251])) >> 7) % 256 for i in range(6000))
    journal = "".join(
        f"Jun 12 10:{minute:02}:00 host kernel: [{minute}.1] eth0: link is up\n"
        for minute in range(60)
    )
    words = (
        "A review of the logs of last week. The token usage was fine and the queue was short. We saw"
        " a Decode batch or two.\n" * 12
    )
    return [
        _written("empty", b"", "an empty file."),
        _written("only-start-0523", _start("sglang-0.5.23"), "the lines of a start and nothing else."),
        _written("only-start-2024", _start("sglang-2024"), "the lines of a start and nothing else."),
        _written("vllm", "\n".join(_vllm()).encode(), "the log of another engine, vLLM."),
        _written("nginx", "\n".join(_nginx()).encode(), "the access log of a proxy."),
        _written("binary", noise, "6,000 bytes without structure."),
        _written("kernel-journal", journal.encode(), "the journal of a machine."),
        _written("prose", words.encode(), "an English text that mentions batches."),
        _written(
            "truncated-line", _start("sglang-2025")[:-1] + b"\n[2026-10-10 10:10:11 TP0] Decode batch. #running-req: 2", "a start and the beginning of one line.",
        ),
        _written("newlines", b"\n" * 500, "500 empty lines."),
        _written("utf16", _start("sglang-2025").decode().encode("utf-16"), "a start, saved as UTF-16."),
    ]  # fmt: skip
