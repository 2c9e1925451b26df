"""Painted logs of servers that do well."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    WELL_WRONG,
    Painter,
    Written,
    done,
)
from strangers_paper import (
    A100_40,
    A100_TP2,
    H100_8B,
    H100_70B,
    H200_V3,
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


def healthy_middle(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, A100_TP2)
    sheet.start(free=6.3)
    load(
        sheet, r.randint(35, 70), running=(60, 110), usage=(0.6, 0.85), queue=(0, 3), hit=(0.2, 0.5)
    )
    return done(
        sheet,
        "healthy",
        "middle",
        "An online service: two thirds of the pool used, now and then one or two wait a moment, nothing binds.",
        (),
        WELL_WRONG,
        ("client-bound",),
    )


def healthy_long(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B)
    sheet.wrapper = "plain"
    sheet.access = 0.6
    sheet.start(free=5.6)
    load(sheet, 120, running=(150, 230), usage=(0.91, 0.96), queue=(100, 600), prefill_share=0.5)
    return done(
        sheet,
        "healthy",
        "long",
        "A long log of the good state, most of whose lines are access lines.",
        (),
        WELL_WRONG,
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
    healthy_middle,
    healthy_long,
)
