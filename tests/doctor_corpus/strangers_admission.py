"""Painted logs of servers whose clients, slots or KV pool bind."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    CAP,
    CAP_WRONG,
    CLIENT_WRONG,
    CONS,
    CONS_WRONG,
    DOWN,
    FULL_WRONG,
    OPT_WRONG,
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
    L4,
    L4_7B,
    RTX_4090,
    paper,
)
from strangers_state import load


def client_few(r: Random) -> Written:
    sheet = paper(r)
    sheet.start()
    users = r.randint(1, 12)
    each = r.uniform(300, 1500) * users / sheet.pool
    load(
        sheet,
        r.randint(25, 120),
        running=(max(1, users - 2), users),
        usage=(0.6 * each, min(0.5, each)),
        queue=(0, 0),
    )
    return done(
        sheet,
        "client-bound",
        "few",
        "A handful of requests run, none waits, the pool is nearly empty.",
        (),
        CLIENT_WRONG,
    )


def client_middle(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, A100_TP2)
    sheet.start()
    load(
        sheet, r.randint(40, 85), running=(40, 90), usage=(0.2, 0.45), queue=(0, 0), hit=(0.1, 0.4)
    )
    return done(
        sheet,
        "client-bound",
        "middle",
        "Dozens run at a third of the pool and never one waits: more work would be taken.",
        (),
        CLIENT_WRONG,
    )


def client_no_start(r: Random) -> Written:
    sheet = paper(r, L4, RTX_4090)
    load(sheet, r.randint(30, 60), running=(2, 8), usage=(0.02, 0.1), queue=(0, 0))
    return done(
        sheet,
        "client-bound",
        "no-start",
        "Without the start's lines: two to eight requests at a time, an empty queue, an empty pool.",
        (),
        CLIENT_WRONG,
    )


def client_blips(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_80)
    sheet.start()
    for _ in range(12):
        load(sheet, r.randint(5, 8), running=(10, 24), usage=(0.05, 0.2), queue=(0, 0))
        sheet.prefill(1, r.randint(200, 900), 0, 0.12, 14, r.randint(1, 2))
        sheet.at += r.uniform(0, 4)
    return done(
        sheet,
        "client-bound",
        "blips",
        "Now and then one or two wait for the length of a prefill; else the queue is empty.",
        (),
        CLIENT_WRONG,
        ("healthy",),
    )


def cap_set(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, H100_70B, L4, A100_TP2)
    cap = r.choice((8, 16, 24, 32, 48, 64, 100, 128))
    sheet.start(running=cap, max_running_requests=cap)
    load(
        sheet, r.randint(30, 90), running=(cap - 1, cap), cap=cap, usage=(0.2, 0.5), queue=(20, 300)
    )
    return done(
        sheet,
        "seq-cap",
        "set",
        f"{cap} run all the time, which is max_running_requests, many wait and half of the pool is free.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def cap_reduced(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, RTX_4090, era=r.choice(("2025", "0.5.23")))
    asked, got = r.choice(((128, 50), (256, 96), (64, 24), (512, 160), (200, 71)))
    sheet.start(running=got, max_running_requests=asked)
    load(
        sheet,
        r.randint(40, 110),
        running=(got - 1, got),
        cap=got,
        usage=(0.15, 0.45),
        queue=(15, 200),
    )
    return done(
        sheet,
        "seq-cap",
        "reduced",
        f"{asked} were asked for, the ready line says {got}, and {got} run all the time while many wait.",
        (),
        CAP_WRONG,
    )


def cap_no_args(r: Random) -> Written:
    sheet = paper(r, H100_8B, L4, A100_80)
    cap = r.choice((16, 32, 40, 64))
    sheet.start(args=False, running=cap)
    load(
        sheet, r.randint(30, 80), running=(cap - 1, cap), cap=cap, usage=(0.12, 0.55), queue=(8, 90)
    )
    return done(
        sheet,
        "seq-cap",
        "ready-line",
        "Only the ready line says the cap; the running requests stand at it.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def cap_no_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2)
    cap = r.choice((32, 64, 128))
    load(sheet, r.randint(35, 60), running=(cap, cap), cap=cap, usage=(0.2, 0.4), queue=(30, 150))
    sheet.lines = [
        line
        for line in sheet.lines
        if f"#running-req: {cap}," in line or "Prefill" in line or "POST" in line
    ]
    return done(
        sheet,
        "seq-cap",
        "flat",
        f"No start, but the running requests stand at exactly {cap} in every decode line while a queue waits.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def cap_dp(r: Random) -> Written:
    sheet = paper(r, H100_8B, era=r.choice(("2025", "0.5.23")))
    cap = r.choice((16, 32))
    sheet.rank = "DP0 TP0"
    sheet.start(running=cap, max_running_requests=cap * 2, dp_size=2)
    for _ in range(20):
        for rank in ("DP0 TP0", "DP1 TP0"):
            part = sheet.on(rank)
            load(part, 2, running=(cap - 1, cap), cap=cap, usage=(0.2, 0.35), queue=(20, 60))
        sheet.at = part.at
    return done(
        sheet,
        "seq-cap",
        "dp",
        "Both ranks run as many requests as each may, and both have a queue over a pool two thirds empty.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def conservative(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_TP2, H100_70B, L4)
    value = r.choice((1.0, 1.0, 1.2, 1.5))
    sheet.start(schedule_conservativeness=value)
    load(sheet, r.randint(40, 85), running=(50, 110), usage=(0.45, 0.72), queue=(80, 500))
    return done(
        sheet,
        "kv-conservative",
        "started",
        "Far below the cap, a third of the pool free, hundreds wait, not one retraction.",
        ((CONS, DOWN),),
        CONS_WRONG,
    )


def conservative_no_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40)
    load(
        sheet, r.randint(35, 75), running=(90, 160), usage=(0.5, 0.75), queue=(100, 400), batch=None
    )
    return done(
        sheet,
        "kv-conservative",
        "no-start",
        "Usage well below 0.9 with a lasting queue, the running requests vary, no retraction.",
        ((CONS, DOWN),),
        CONS_WRONG,
    )


def conservative_low(r: Random) -> Written:
    sheet = paper(r, A10G, RTX_4090, L4_7B, H100_8B)
    sheet.start(schedule_conservativeness=r.choice((1.3, 2.0)))
    load(sheet, r.randint(40, 90), running=(14, 30), usage=(0.25, 0.45), queue=(30, 120))
    return done(
        sheet,
        "kv-conservative",
        "careful",
        "Conservativeness was raised; the pool is a third full while dozens wait.",
        ((CONS, DOWN),),
        CONS_WRONG,
    )


def conservative_one_retraction(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B)
    sheet.start()
    load(sheet, 50, running=(70, 120), usage=(0.55, 0.8), queue=(150, 350))
    sheet.retract(1, 0.2311, 0.2604)
    load(sheet, 70, running=(70, 120), usage=(0.55, 0.8), queue=(150, 350))
    return done(
        sheet,
        "kv-conservative",
        "one-retraction",
        "One retraction in minutes; else the pool has room and hundreds wait.",
        ((CONS, DOWN),),
        CONS_WRONG,
    )


def optimistic(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_TP2, H100_70B, A10G, L4)
    sheet.start(schedule_conservativeness=r.choice((0.1, 0.3, 0.3, 0.5)), running=2048)
    load(
        sheet,
        r.randint(40, 85),
        running=(60, 140),
        usage=(0.94, 1.0),
        queue=(30, 250),
        retract=r.uniform(0.25, 0.7),
    )
    return done(
        sheet,
        "kv-optimistic",
        "low-setting",
        "The pool is full and requests are retracted many times a minute; conservativeness was lowered.",
        ((CONS, UP),),
        OPT_WRONG,
    )


def optimistic_default(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, RTX_4090)
    sheet.start()
    load(
        sheet,
        r.randint(35, 75),
        running=(40, 90),
        usage=(0.95, 1.0),
        queue=(10, 120),
        retract=0.5,
        ratio=(0.3, 0.6),
    )
    return done(
        sheet,
        "kv-optimistic",
        "default",
        "Default settings, long outputs: a full pool and a retraction every few seconds.",
        ((CONS, UP),),
        OPT_WRONG,
    )


def optimistic_no_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B)
    load(
        sheet,
        r.randint(40, 90),
        running=(100, 200),
        usage=(0.95, 1.0),
        queue=(100, 300),
        retract=0.8,
        ratio=(0.2, 0.5),
    )
    return done(
        sheet,
        "kv-optimistic",
        "no-start",
        "Without the start's lines: usage of nearly 1 and retractions between most decode lines.",
        ((CONS, UP),),
        OPT_WRONG,
    )


def full(r: Random) -> Written:
    sheet = paper(r, A10G, RTX_4090, L4_7B, A100_80)
    sheet.fraction = round(min(0.93, max(sheet.fraction, 0.89)), 2)
    sheet.start(free=r.uniform(1.6, 3.2) if sheet.machine.gb < 30 else r.uniform(4, 6))
    load(sheet, r.randint(40, 85), running=(5, 11), usage=(0.96, 1.0), queue=(150, 500))
    return done(
        sheet,
        "kv-full",
        "small-pool",
        "A handful of long requests fills the whole pool, hundreds wait, nothing is retracted, little memory is left outside the pool.",
        (),
        FULL_WRONG,
    )


def full_growing(r: Random) -> Written:
    sheet = paper(r, A10G, A100_80, H100_8B)
    sheet.start(free=r.uniform(5, 6.5) if sheet.machine.gb > 30 else 2.2)
    low = 40
    for _ in range(12):
        load(sheet, r.randint(6, 10), running=(18, 30), usage=(0.96, 1.0), queue=(low, low + 30))
        low += r.randint(50, 75)
    return done(
        sheet,
        "kv-full",
        "growing",
        "The pool is full at all times and the queue grows without end, from forty to a thousand.",
        (),
        FULL_WRONG,
    )


def full_careful(r: Random) -> Written:
    sheet = paper(r, A10G, A100_40, H100_8B)
    sheet.start(
        schedule_conservativeness=r.choice((1.5, 2.0)), free=5.5 if sheet.machine.gb > 30 else 1.8
    )
    load(
        sheet,
        r.randint(40, 75),
        running=(12, 24),
        usage=(0.96, 1.0),
        queue=(100, 260),
        retract=0.4,
        ratio=(0.97, 1.0),
    )
    return done(
        sheet,
        "kv-full",
        "most-careful",
        "Conservativeness is past its effective maximum and requests are still retracted: only a larger pool helps.",
        (),
        ((CONS, UP), *FULL_WRONG),
    )


def optimistic_many(r: Random) -> Written:
    sheet = paper(r, H100_8B, L4_7B, A100_40)
    sheet.start(schedule_conservativeness=0.3)
    for _ in range(r.randint(15, 25)):
        load(sheet, 2, running=(50, 100), usage=(0.97, 1.0), queue=(20, 60))
        for _ in range(r.randint(1, 4)):
            sheet.retract(r.randint(2, 12), 0.21, r.uniform(0.4, 0.8))
    return done(
        sheet,
        "kv-optimistic",
        "storms",
        "Storms of retractions, a dozen requests at a time, under a lowered conservativeness.",
        ((CONS, UP),),
        OPT_WRONG,
    )


def conservative_2024(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, era="2024")
    sheet.start()
    load(sheet, r.randint(35, 60), running=(80, 140), usage=(0.55, 0.8), queue=(200, 420))
    return done(
        sheet,
        "kv-conservative",
        "2024",
        "The first guide's case: usage below 0.9 and a queue, no cap in reach.",
        ((CONS, DOWN),),
        CONS_WRONG,
    )


def cap_edge(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2)
    cap = 64
    sheet.start(running=cap, max_running_requests=cap)
    load(sheet, r.randint(35, 60), running=(cap, cap), cap=cap, usage=(0.6, 0.85), queue=(10, 40))
    return done(
        sheet,
        "seq-cap",
        "high-usage",
        "All 64 slots are taken and requests wait, while a fifth of the pool is free.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def full_2024(r: Random) -> Written:
    sheet = paper(r, A10G, RTX_4090, era="2024")
    sheet.start(mem_fraction_static=0.92)
    load(sheet, r.randint(35, 60), running=(6, 14), usage=(0.97, 1.0), queue=(100, 400))
    return done(
        sheet,
        "kv-full",
        "2024",
        "Ten long requests fill the small device's pool all the time, hundreds wait, no retractions.",
        (),
        FULL_WRONG,
    )


PAINTERS: tuple[Painter, ...] = (
    client_few,
    client_middle,
    client_no_start,
    client_blips,
    cap_set,
    cap_reduced,
    cap_no_args,
    cap_no_start,
    cap_dp,
    conservative,
    conservative_no_start,
    conservative_low,
    conservative_one_retraction,
    optimistic,
    optimistic_default,
    optimistic_no_start,
    full,
    full_growing,
    full_careful,
    optimistic_many,
    conservative_2024,
    cap_edge,
    full_2024,
)
