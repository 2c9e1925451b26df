"""Painted logs of servers that end."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    DEAD_WRONG,
    LEAK_WRONG,
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
    L4,
    RTX_4090,
    paper,
)
from strangers_state import load
from strangers_traces import LOOP, killed, trace


def leak(r: Random) -> Written:
    sheet = paper(r)
    sheet.start()
    load(sheet, r.randint(15, 50), running=(6, 30), usage=(0.1, 0.5), queue=(0, 0))
    for running in (5, 2, 1):
        sheet.at += 1
        sheet.decode(running, 0.02 * running, 60.0 * running, 0)
    sheet.at += 1
    lost = r.randint(30, 4000)
    error = {
        "2024": f"Warning: available_size={sheet.pool - lost}, max_total_num_token={sheet.pool}\nKV cache pool leak detected!",
        "2025": f"ValueError: token_to_kv_pool_allocator memory leak detected! available_size={sheet.pool - lost - 900}, protected_size=0, self.max_total_num_tokens={sheet.pool}\nself.token_to_kv_pool_allocator.available_size()={sheet.pool - lost - 900}\nself.tree_cache.evictable_size()=900",
        "0.5.23": f"ValueError: token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens={sheet.pool}, available_size={sheet.pool - lost - 2000}, evictable_size=2000, protected_size=0",
    }[sheet.era]
    if sheet.era == "2024":
        for line in error.split("\n"):
            sheet.bare(line)
    else:
        trace(sheet, (LOOP[0], LOOP[1], ("managers/scheduler.py", 1510, "check_memory")), error)
        killed(sheet)
    return done(
        sheet,
        "pool-leak",
        "message",
        "The idle server finds that tokens of the pool belong to nobody.",
        (),
        LEAK_WRONG,
    )


def leak_req(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era="2025")
    sheet.start()
    load(sheet, r.randint(20, 40), running=(6, 30), usage=(0.1, 0.5), queue=(0, 0))
    trace(
        sheet,
        (LOOP[0], ("managers/scheduler.py", 1522, "check_memory")),
        "ValueError: req_to_token_pool memory leak detected!available_size=4090, total_size=4096",
    )
    killed(sheet)
    return done(
        sheet, "pool-leak", "requests", "The pool of request slots has lost some.", (), LEAK_WRONG
    )


def dead_watchdog(r: Random) -> Written:
    sheet = paper(r)
    sheet.start()
    load(sheet, r.randint(20, 50), running=(10, 60), usage=(0.2, 0.8), queue=(0, 0))
    sheet.at += 300
    if sheet.era == "2024":
        sheet.say("Watchdog timeout (self.watchdog_timeout=300)")
    else:
        sheet.say(
            "Watchdog timeout (self.watchdog_timeout=300, self.soft=False)"
            if sheet.era == "0.5.23"
            else "Watchdog timeout (self.watchdog_timeout=300)"
        )
        sheet.bare("Pyspy dump for PID 1207:")
        sheet.bare("Thread 1207 (active): MainThread")
        sheet.bare("    all_reduce (torch/distributed/distributed_c10d.py:2501)")
    killed(sheet)
    return done(
        sheet,
        "server-dead",
        "watchdog",
        "Five minutes of silence, then the watchdog ends the server.",
        (),
        DEAD_WRONG,
    )


def dead_access(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, A100_40)
    load(sheet, r.randint(20, 50), running=(10, 60), usage=(0.2, 0.8), queue=(0, 20))
    trace(
        sheet,
        LOOP,
        "RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
    )
    killed(sheet)
    return done(
        sheet,
        "server-dead",
        "illegal-access",
        "An illegal memory access ends the scheduler.",
        (),
        DEAD_WRONG,
    )


def dead_nccl(r: Random) -> Written:
    sheet = paper(r, H100_70B, A100_TP2, H200_V3)
    sheet.start()
    load(sheet, r.randint(20, 40), running=(10, 60), usage=(0.2, 0.8), queue=(0, 0))
    sheet.at += 600
    sheet.bare(
        "[rank2]:[E304 10:21:44.120 ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=120231, OpType=ALLREDUCE, NumelIn=8192, NumelOut=8192, Timeout(ms)=600000) ran for 600032 milliseconds before timing out."
    )
    sheet.bare("terminate called after throwing an instance of 'c10::DistBackendError'")
    sheet.bare("Fatal Python error: Aborted")
    killed(sheet)
    return done(
        sheet,
        "server-dead",
        "nccl",
        "A collective hangs and NCCL's watchdog aborts the process.",
        (),
        DEAD_WRONG,
    )


def dead_assert(r: Random) -> Written:
    sheet = paper(r, H100_8B, L4, RTX_4090, era=r.choice(("2025", "0.5.23")))
    sheet.start()
    load(sheet, r.randint(20, 40), running=(10, 30), usage=(0.3, 0.7), queue=(0, 0))
    trace(
        sheet,
        (LOOP[0], LOOP[1], ("managers/schedule_batch.py", 1450, "retract_decode")),
        "AssertionError: running batch is empty",
    )
    killed(sheet)
    return done(
        sheet,
        "server-dead",
        "assertion",
        "A failed assertion in the scheduler takes the server down.",
        (),
        DEAD_WRONG,
    )


def leak_creeps(r: Random) -> Written:
    sheet = paper(r, H100_8B, L4, era=r.choice(("2025", "0.5.23")))
    sheet.start()
    kept = 0.02
    for _ in range(12):
        load(sheet, 5, running=(8, 16), usage=(kept + 0.04, kept + 0.06), queue=(0, 0))
        for running in (3, 1):
            sheet.at += 1
            sheet.decode(running, kept + 0.003, running * 70.0, 0)
        sheet.at += 30
        kept += 0.075
    return done(
        sheet,
        "pool-leak",
        "creeps",
        "Usage rises from burst to burst and does not fall when one request is left: tokens are lost, although no message says so.",
        (),
        LEAK_WRONG,
    )


PAINTERS: tuple[Painter, ...] = (
    leak,
    leak_req,
    dead_watchdog,
    dead_access,
    dead_nccl,
    dead_assert,
    leak_creeps,
)
