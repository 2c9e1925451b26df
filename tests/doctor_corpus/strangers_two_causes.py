"""Painted logs that show two things, of which one binds."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    CAP,
    CAP_WRONG,
    CONS,
    CONS_WRONG,
    DOWN,
    FULL_WRONG,
    MEM,
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
    paper,
)
from strangers_state import load


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
    cap_beside_free_memory,
    cap_beside_no_hits,
    full_beside_long_queue,
    conservative_after_startup_retractions,
    underused_beside_long_queue,
)
