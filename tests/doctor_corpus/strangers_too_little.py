"""Painted logs from which too little is known."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    LITTLE_WRONG,
    Painter,
    Written,
    done,
)
from strangers_paper import (
    A100_40,
    H100_8B,
    H100_70B,
    L4,
    paper,
)
from strangers_state import load


def little_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, H100_70B)
    sheet.start(free=5.9)
    return done(
        sheet,
        "not-enough-evidence",
        "start",
        "A start with the warm-up request and nothing after it.",
        (),
        LITTLE_WRONG,
    )


def little_lines(r: Random) -> Written:
    sheet = paper(r, H100_8B, L4)
    sheet.start(free=5.9)
    sheet.prefill(1, 420, 0, 0.0, 0, 0)
    sheet.at += 1
    sheet.decode(1, 0.01, 71.2, 0)
    return done(
        sheet,
        "not-enough-evidence",
        "one-request",
        "One request after the start.",
        (),
        LITTLE_WRONG,
    )


def little_access(r: Random) -> Written:
    sheet = paper(r)
    for _ in range(60):
        sheet.at += r.uniform(0.1, 4)
        sheet.access = 0.9
        sheet._visit()
        if r.random() < 0.2:
            sheet.bare(
                f'INFO:     127.0.0.1:{r.randint(30000, 60000)} - "GET /health HTTP/1.1" 200 OK'
            )
    return done(
        sheet,
        "not-enough-evidence",
        "access-only",
        "Only access lines, no batch line.",
        (),
        LITTLE_WRONG,
    )


def little_vllm(r: Random) -> Written:
    sheet = paper(r, H100_8B)
    for _ in range(40):
        sheet.at += 10
        sheet.bare(
            f"INFO 03-04 09:{r.randint(10, 59)}:11 [metrics.py:481] Avg prompt throughput: {r.uniform(10, 900):.1f} tokens/s, Avg generation throughput: {r.uniform(100, 900):.1f} tokens/s, Running: {r.randint(1, 90)} reqs, Swapped: 0 reqs, Pending: {r.randint(0, 40)} reqs, GPU KV cache usage: {r.uniform(10, 90):.1f}%, CPU KV cache usage: 0.0%."
        )
    return done(sheet, "not-enough-evidence", "vllm", "Another engine's log.", (), LITTLE_WRONG)


def little_two(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era=r.choice(("2025", "0.5.23")))
    sheet.decode(41, 0.53, 1800.0, 12)
    sheet.at += 1
    sheet.decode(44, 0.55, 1890.0, 9)
    return done(sheet, "not-enough-evidence", "two-lines", "Two decode lines.", (), LITTLE_WRONG)


def little_garbled(r: Random) -> Written:
    sheet = paper(r, H100_8B, era="2025")
    load(sheet, 8, running=(5, 9), usage=(0.1, 0.2), queue=(0, 0))
    sheet.lines = [line[: r.randint(5, 48)] for line in sheet.lines]
    return done(
        sheet,
        "not-enough-evidence",
        "cut-lines",
        "Lines cut by a terminal's width: not a figure is left.",
        (),
        LITTLE_WRONG,
    )


PAINTERS: tuple[Painter, ...] = (
    little_start,
    little_lines,
    little_access,
    little_vllm,
    little_two,
    little_garbled,
)
