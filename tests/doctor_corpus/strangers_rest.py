"""Painted logs of servers that do well, of which too little is known, or that show two things."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    CAP,
    CAP_WRONG,
    CONS,
    CONS_WRONG,
    DOWN,
    FULL_WRONG,
    LITTLE_WRONG,
    MEM,
    UNDER_WRONG,
    UP,
    WELL_WRONG,
    Painter,
    Written,
    done,
)
from strangers_paper import (
    A10G,
    A100_40,
    A100_80,
    A100_TP2,
    H100_8B,
    H100_70B,
    H200_V3,
    L4,
    paper,
)
from strangers_state import load


def healthy_guide(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, A100_TP2, H200_V3)
    sheet.start(free=r.uniform(5.1, 7.6))
    load(
        sheet,
        r.randint(35, 80),
        running=(120, 230),
        usage=(0.91, 0.97),
        queue=(90, 480),
        hit=(0.1, 0.3),
    )
    return done(
        sheet,
        "healthy",
        "guide",
        "The guides' good state: usage above 0.9, a queue of hundreds, graphs on, 5 to 8 GB free, no retraction.",
        (),
        WELL_WRONG,
    )


def healthy_no_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B)
    load(sheet, r.randint(40, 90), running=(200, 260), usage=(0.92, 0.98), queue=(100, 320))
    return done(
        sheet,
        "healthy",
        "no-start",
        "The guides' good state without the start's lines.",
        (),
        WELL_WRONG,
    )


def healthy_retraction(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, A100_TP2)
    sheet.start(free=5.9)
    for _ in range(2):
        load(sheet, r.randint(45, 60), running=(110, 200), usage=(0.92, 0.99), queue=(60, 240))
        sheet.retract(1, 0.3012, 0.3355)
        load(sheet, 12, running=(110, 200), usage=(0.92, 0.98), queue=(60, 240))
    return done(
        sheet,
        "healthy",
        "rare-retraction",
        "As the guides want it, with a single retraction every two minutes.",
        (),
        WELL_WRONG,
    )


def healthy_bursts(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, H100_70B)
    sheet.start(free=6.1 if sheet.machine.gb > 50 else 3.0)
    for _ in range(r.randint(5, 8)):
        load(
            sheet,
            r.randint(6, 10),
            running=(20, 50),
            usage=(0.2, 0.45),
            queue=(0, 0),
            hit=(0.3, 0.6),
        )
        queue, running = r.randint(20, 50), 40
        while queue > 0:
            took = r.randint(8, 16)
            queue = max(0, queue - took)
            running += took
            sheet.at += 0.25
            sheet.prefill(took, r.randint(1500, 4000), r.randint(1500, 4000), 0.35, running, queue)
        for _ in range(5):
            sheet.at += 1
            sheet.decode(running, 0.5, running * 34.0, 0)
            running = int(running * 0.8)
        sheet.at += r.uniform(2, 9)
    return done(
        sheet,
        "healthy",
        "bursts",
        "Bursts of tens of requests wait a second and are served; between them nobody waits, and most slots are used.",
        (),
        WELL_WRONG,
        ("client-bound",),
    )


def healthy_night(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B)
    sheet.start(free=6.5)
    for _ in range(2):
        load(sheet, r.randint(35, 50), running=(130, 200), usage=(0.91, 0.96), queue=(50, 220))
        for _ in range(5):
            sheet.at += r.uniform(600, 3000)
            load(sheet, 1, running=(1, 3), usage=(0.004, 0.01), queue=(0, 0))
        sheet.at += 9000
    return done(
        sheet, "healthy", "night", "Busy and well by day, nearly idle at night.", (), WELL_WRONG
    )


def healthy_cache(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, H100_70B)
    sheet.start(free=6.0)
    load(
        sheet,
        r.randint(40, 75),
        running=(110, 190),
        usage=(0.91, 0.97),
        queue=(40, 190),
        hit=(0.75, 0.93),
    )
    return done(
        sheet,
        "healthy",
        "cache",
        "The good state with nine tenths of the prompts from the cache.",
        (),
        WELL_WRONG,
    )


def healthy_dp(r: Random) -> Written:
    sheet = paper(r, H100_8B, era=r.choice(("2025", "0.5.23")))
    sheet.rank = "DP0 TP0"
    sheet.start(free=6.2, dp_size=2)
    for _ in range(16):
        for rank in ("DP0 TP0", "DP1 TP0"):
            part = sheet.on(rank)
            load(part, 3, running=(120, 170), usage=(0.92, 0.97), queue=(70, 180))
        sheet.at = part.at
    return done(
        sheet, "healthy", "dp", "Two ranks side by side, both in the good state.", (), WELL_WRONG
    )


def healthy_short(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era="2025")
    sheet.stamp = "full"
    load(sheet, 20, running=(190, 233), usage=(0.92, 0.96), queue=(200, 317), prefill_share=0.3)
    return done(sheet, "healthy", "short", "Twenty decode lines as in the guide.", (), WELL_WRONG)


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


def cap_beside_free_memory(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era=r.choice(("2025", "0.5.23")))
    sheet.fraction = 0.7
    cap = r.choice((32, 64))
    sheet.start(running=cap, max_running_requests=cap)
    load(sheet, r.randint(35, 60), running=(cap, cap), cap=cap, usage=(0.3, 0.5), queue=(40, 160))
    return done(
        sheet,
        "seq-cap",
        "beside-free-memory",
        "Much memory is free, but the pool is half empty: requests wait for a slot.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def cap_beside_no_hits(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2)
    cap = 48
    sheet.start(running=cap, max_running_requests=cap, disable_radix_cache=True)
    load(
        sheet,
        r.randint(35, 60),
        running=(cap, cap),
        cap=cap,
        usage=(0.3, 0.5),
        queue=(40, 160),
        hit=(0, 0),
    )
    return done(
        sheet,
        "seq-cap",
        "beside-no-cache",
        "The cache is off, as it may be; requests wait because all 48 slots are taken.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def full_beside_long_queue(r: Random) -> Written:
    sheet = paper(r, A100_80, A10G)
    sheet.start(free=5.6 if sheet.machine.gb > 50 else 2.0)
    load(sheet, r.randint(35, 60), running=(4, 9), usage=(0.97, 1.0), queue=(200, 900))
    return done(
        sheet,
        "kv-full",
        "few-and-many-wait",
        "Four to nine long requests fill the pool, hundreds wait.",
        (),
        FULL_WRONG,
    )


def conservative_after_startup_retractions(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40)
    sheet.start(schedule_conservativeness=1.3)
    load(sheet, 4, running=(140, 170), usage=(0.97, 1.0), queue=(300, 400), retract=1.0)
    load(sheet, r.randint(70, 90), running=(60, 100), usage=(0.5, 0.7), queue=(150, 400))
    return done(
        sheet,
        "kv-conservative",
        "early-retractions",
        "A few retractions in the first seconds; for minutes since, the pool has had room and hundreds wait.",
        ((CONS, DOWN),),
        CONS_WRONG,
    )


def underused_beside_long_queue(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, era=r.choice(("2025", "0.5.23")))
    sheet.fraction = 0.55
    sheet.start()
    load(sheet, r.randint(35, 60), running=(10, 30), usage=(0.97, 1.0), queue=(300, 900))
    return done(
        sheet,
        "mem-underused",
        "beside-queue",
        "Hundreds wait for a full pool while a third of the device is free.",
        ((MEM, UP),),
        UNDER_WRONG,
    )


PAINTERS: tuple[Painter, ...] = (
    healthy_guide,
    healthy_no_start,
    healthy_retraction,
    healthy_bursts,
    healthy_night,
    healthy_cache,
    healthy_dp,
    healthy_short,
    little_start,
    little_lines,
    little_access,
    little_vllm,
    little_two,
    cap_beside_free_memory,
    cap_beside_no_hits,
    full_beside_long_queue,
    conservative_after_startup_retractions,
    underused_beside_long_queue,
)
