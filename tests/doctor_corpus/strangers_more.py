"""Painted logs: other looks of the same causes."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    BLOCK_WRONG,
    CAP,
    CAP_WRONG,
    CONS,
    CONS_WRONG,
    DECODE_WRONG,
    DOWN,
    FULL_WRONG,
    GRAPH,
    GRAPH_WRONG,
    HEAD_WRONG,
    LEAK_WRONG,
    LITTLE_WRONG,
    MEM,
    OPT_WRONG,
    PREFIX_WRONG,
    QUEUE_WRONG,
    UP,
    WELL_WRONG,
    Painter,
    Written,
    done,
)
from strangers_paper import (
    A10G,
    A100_40,
    A100_TP2,
    H100_8B,
    H100_70B,
    H200_V3,
    L4,
    L4_7B,
    RTX_4090,
    paper,
)
from strangers_state import load
from strangers_traces import BEGIN, LOOP, killed, no_memory, trace


def blocking_giant(r: Random) -> Written:
    sheet = paper(r, H100_70B, H200_V3)
    sheet.start(chunked_prefill_size=4096)
    for _ in range(2):
        load(sheet, 25, running=(30, 50), usage=(0.1, 0.2), queue=(0, 1))
        waiting = 0
        for piece in range(r.randint(35, 60)):
            sheet.at += 0.6
            waiting += r.choice((0, 0, 1, 1))
            sheet.prefill(1, 4096, 0, 0.15 + piece * 4096 / sheet.pool, 38, waiting)
            if piece % 9 == 8:
                sheet.decode(38, 0.15 + piece * 4096 / sheet.pool, 90.0, waiting)
        sheet.prefill(min(waiting, 9), 3100, 0, 0.5, 38, max(0, waiting - 9))
        sheet.prefill(max(1, waiting - 9), 2900, 0, 0.5, 47, 0)
    return done(
        sheet,
        "long-prompt-blocking",
        "giant",
        "Two prompts of some 200,000 tokens take a chunk after another; whoever comes waits until they are done.",
        (),
        BLOCK_WRONG,
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


def graph_light(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, RTX_4090, era=r.choice(("2025", "0.5.23")))
    sheet.start(free=4.9, disable_cuda_graph=True)
    load(sheet, r.randint(40, 80), running=(4, 12), usage=(0.1, 0.3), queue=(0, 0), graph=False)
    return done(
        sheet,
        "graph-miss",
        "light",
        "Four to twelve requests, an empty queue, and no graphs: each step is slow for no reason.",
        (("--disable-cuda-graph", "set"), ("--disable-cuda-graph", "decrease")),
        GRAPH_WRONG,
    )


def graph_low_queue(r: Random) -> Written:
    sheet = paper(r, H100_70B, A100_TP2, era=r.choice(("2025", "0.5.23")))
    limit = 16
    key = "cuda_graph_max_bs_decode" if sheet.era == "0.5.23" else "cuda_graph_max_bs"
    sheet.start(free=6.2, **{key: limit})
    load(
        sheet,
        r.randint(40, 80),
        running=(30, 60),
        usage=(0.3, 0.6),
        queue=(0, 0),
        graph_limit=limit,
    )
    return done(
        sheet,
        "graph-miss",
        "no-queue",
        "Nobody waits, but all decode batches of 30 to 60 requests run without graphs, which end at 16.",
        ((GRAPH, UP),),
        GRAPH_WRONG,
        ("client-bound",),
    )


def init_pool(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, RTX_4090)
    sheet.fraction = 0.98
    sheet.start("weights")
    sheet.say(
        f"Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem={sheet.machine.gb - 0.4 - sheet.machine.weights:.2f} GB"
    )
    trace(
        sheet,
        (*BEGIN, ("mem_cache/memory_pool.py", 204, "_create_buffers")),
        no_memory(sheet, "1.96 GiB", "1.31 GiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-init",
        "pool",
        "The pool of the wanted share cannot be allocated: too large a share.",
        ((MEM, DOWN),),
        ((MEM, UP),),
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


def decode_oom_2024(r: Random) -> Written:
    sheet = paper(r, A100_40, A10G, era="2024")
    sheet.start(free=1.1)
    load(sheet, r.randint(15, 40), running=(120, 200), usage=(0.85, 0.97), queue=(0, 10))
    sheet.decode(196, 0.97, 2211.7, 2)
    trace(
        sheet,
        (
            *LOOP[:2],
            ("model_executor/model_runner.py", 433, "forward_decode"),
            ("models/llama.py", 310, "forward"),
        ),
        no_memory(sheet, "244.00 MiB", "88.00 MiB"),
    )
    killed(sheet)
    return done(
        sheet,
        "oom-decode",
        "2024",
        "CUDA out of memory while 196 requests are decoded.",
        ((CAP, DOWN), (MEM, DOWN)),
        DECODE_WRONG,
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


def queue_moderate(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, era="0.5.23")
    sheet.start(free=5.5, schedule_policy="lpm")
    low = 2300
    for _ in range(8):
        load(
            sheet, 8, running=(130, 200), usage=(0.93, 0.98), queue=(low, low + 400), hit=(0.1, 0.4)
        )
        low += 350
    return done(
        sheet,
        "queue-too-long",
        "growing",
        "From 2,300 to 5,000 wait, more each minute.",
        (),
        QUEUE_WRONG,
        ("kv-full",),
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
    blocking_giant,
    headroom_small,
    leak_creeps,
    graph_light,
    graph_low_queue,
    init_pool,
    prefix_2024,
    healthy_middle,
    healthy_long,
    decode_oom_2024,
    optimistic_many,
    conservative_2024,
    queue_moderate,
    cap_edge,
    full_2024,
    little_garbled,
)
