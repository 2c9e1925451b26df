"""Painted logs of free memory at the start, and of prefix caches."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    DOWN,
    HEAD_WRONG,
    MEM,
    PREFIX_WRONG,
    UNDER_WRONG,
    UP,
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
    RTX_4090,
    paper,
)
from strangers_state import load


def underused(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, H100_70B, H200_V3, era=r.choice(("2025", "0.5.23")))
    lowest = sheet.machine.weights / sheet.machine.gb
    sheet.fraction = round(r.uniform(max(0.5, lowest + 0.05), max(0.6, lowest + 0.08)), 2)
    sheet.start()
    load(sheet, r.randint(35, 75), running=(14, 40), usage=(0.95, 1.0), queue=(40, 180))
    return done(
        sheet,
        "mem-underused",
        "low-fraction",
        "The pool is full and requests wait, while tens of gigabytes stood free when the server was ready.",
        ((MEM, UP),),
        UNDER_WRONG,
    )


def underused_guide(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_80, A100_TP2, era=r.choice(("2025", "0.5.23")))
    sheet.start(free=r.uniform(12.5, 19))
    load(sheet, r.randint(35, 75), running=(50, 90), usage=(0.95, 0.99), queue=(60, 260))
    return done(
        sheet,
        "mem-underused",
        "guide",
        "Between ten and twenty gigabytes stood free at the ready line and the pool is full: the guide raises the static share.",
        ((MEM, UP),),
        UNDER_WRONG,
    )


def underused_retracting(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era=r.choice(("2025", "0.5.23")))
    sheet.fraction = 0.6
    sheet.start()
    load(
        sheet, r.randint(50, 75), running=(20, 50), usage=(0.96, 1.0), queue=(30, 90), retract=0.01
    )
    return done(
        sheet,
        "mem-underused",
        "rare-retractions",
        "As before, with a retraction every few minutes.",
        ((MEM, UP),),
        UNDER_WRONG,
    )


def headroom(r: Random) -> Written:
    sheet = paper(
        r, H100_8B, A100_TP2, H100_70B, H200_V3, A100_40, era=r.choice(("2025", "0.5.23"))
    )
    sheet.fraction = round(r.uniform(0.94, 0.97), 2)
    sheet.start(free=r.uniform(0.25, 1.2))
    load(sheet, r.randint(35, 75), running=(70, 160), usage=(0.91, 0.96), queue=(60, 240))
    return done(
        sheet,
        "mem-headroom-low",
        "good-load",
        "The load is served well, but hardly a gigabyte was free when the server was ready.",
        ((MEM, DOWN),),
        HEAD_WRONG,
    )


def headroom_idle(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, H100_70B, era=r.choice(("2025", "0.5.23")))
    sheet.fraction = 0.96
    sheet.start(free=r.uniform(0.3, 0.9))
    load(sheet, r.randint(40, 80), running=(70, 120), usage=(0.6, 0.85), queue=(0, 0))
    return done(
        sheet,
        "mem-headroom-low",
        "no-queue",
        "Nobody waits, but a few hundred megabytes are free on a large device.",
        ((MEM, DOWN),),
        HEAD_WRONG,
    )


def prefix_disabled(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, L4, A100_40)
    sheet.start(disable_radix_cache=True)
    prompt = r.randint(2200, 3800)
    for _ in range(r.randint(20, 40)):
        running, queue, used = r.randint(20, 40), r.randint(4, 40), r.uniform(0.4, 0.7)
        for _ in range(r.randint(2, 5)):
            count = r.randint(1, 3)
            sheet.at += 0.3
            sheet.prefill(
                count,
                min(count * prompt + r.randint(-40, 40), sheet.machine.chunk),
                0,
                used,
                running,
                queue,
            )
        sheet.at += 0.7
        sheet.decode(running, used, r.uniform(500, 1200), queue)
    return done(
        sheet,
        "prefix-miss",
        "disabled",
        f"The prefix cache is off; prompts of nearly the same {prompt} tokens are computed again and again, and #cached-token is always 0.",
        (),
        PREFIX_WRONG,
        ("prefill-budget",),
    )


def prefix_thrash(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_TP2)
    sheet.start(schedule_policy="fcfs")
    for step in range(r.randint(34, 50)):
        good = step < 10
        running, used, queue = (
            r.randint(24, 40),
            r.uniform(0.5, 0.7) if good else r.uniform(0.9, 0.97),
            0 if good else r.randint(40, 90),
        )
        for _ in range(r.randint(2, 5)):
            count = r.randint(2, 3)
            total = count * r.randint(2400, 2600)
            share = r.uniform(0.82, 0.92) if good else r.uniform(0.0, 0.06)
            sheet.at += 0.1 if good else 0.4
            sheet.prefill(
                count,
                min(int(total * (1 - share)), sheet.machine.chunk),
                int(total * share),
                used,
                running,
                queue,
            )
        sheet.at += 0.7
        sheet.decode(running, used, r.uniform(500, 1200), queue)
    return done(
        sheet,
        "prefix-miss",
        "thrash",
        "At first nine tenths of each prompt come from the cache; when the load grows hardly any do, since the prefixes are evicted before they are used again, and a queue forms. The policy is fcfs.",
        (("--schedule-policy", "set"),),
        PREFIX_WRONG,
    )


def prefix_disabled_long(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era=r.choice(("2025", "0.5.23")))
    sheet.start(disable_radix_cache=True, chunked_prefill_size=8192)
    for _ in range(r.randint(20, 30)):
        running, queue, used = r.randint(8, 16), r.randint(5, 20), r.uniform(0.3, 0.5)
        for _ in range(r.randint(2, 4)):
            sheet.at += 0.6
            sheet.prefill(1, r.randint(6100, 6300), 0, used, running, queue)
        sheet.at += 0.7
        sheet.decode(running, used, r.uniform(200, 500), queue)
    return done(
        sheet,
        "prefix-miss",
        "disabled-long",
        "One system prompt of 6,000 tokens before every question, and --disable-radix-cache.",
        (),
        PREFIX_WRONG,
        ("prefill-budget",),
    )


def headroom_small(r: Random) -> Written:
    sheet = paper(r, RTX_4090, A10G, era=r.choice(("2025", "0.5.23")))
    sheet.fraction = 0.96
    sheet.start(free=r.uniform(0.08, 0.25))
    load(sheet, r.randint(40, 80), running=(16, 30), usage=(0.91, 0.95), queue=(20, 60))
    return done(
        sheet,
        "mem-headroom-low",
        "small-device",
        "A consumer device with a hundred megabytes to spare; the load itself is in the good state.",
        ((MEM, DOWN),),
        HEAD_WRONG,
    )


def prefix_2024(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, era="2024")
    sheet.start(schedule_policy="fcfs", disable_radix_cache=True)
    for _ in range(r.randint(25, 40)):
        running, waiting, used = r.randint(30, 50), r.randint(10, 60), r.uniform(0.5, 0.75)
        for _ in range(r.randint(2, 4)):
            sheet.at += 0.5
            sheet.prefill(2, 2 * 1850 + r.randint(-60, 60), 0, used, running, waiting)
        sheet.at += 0.6
        sheet.decode(running, used, r.uniform(700, 1400), waiting)
    return done(
        sheet,
        "prefix-miss",
        "hit-rate",
        "A hit rate of 0.00% with the cache switched off and prompts that all have the same length.",
        (),
        PREFIX_WRONG,
        ("prefill-budget",),
    )


PAINTERS: tuple[Painter, ...] = (
    underused,
    underused_guide,
    underused_retracting,
    headroom,
    headroom_idle,
    prefix_disabled,
    prefix_thrash,
    prefix_disabled_long,
    headroom_small,
    prefix_2024,
)
