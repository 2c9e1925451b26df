"""Painted logs of servers whose prefill, queue or decode graphs bind."""

from __future__ import annotations

from random import Random

from strangers_labels import (
    BLOCK_WRONG,
    BUDGET_WRONG,
    CHUNK,
    GRAPH,
    GRAPH_WRONG,
    PREFILL,
    QUEUE_WRONG,
    UP,
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


def budget(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, L4, A100_TP2)
    chunk = r.choice((512, 1024, 2048))
    sheet.start(chunked_prefill_size=chunk)
    for _ in range(r.randint(20, 45)):
        running, queue = r.randint(8, 20), r.randint(30, 90)
        used = r.uniform(0.08, 0.3)
        for _ in range(r.randint(4, 9)):
            sheet.at += chunk / r.uniform(7000, 10000)
            sheet.prefill(
                r.randint(2, 5),
                chunk if r.random() < 0.9 else chunk - r.randint(1, 60),
                r.randint(0, 40),
                used,
                running,
                queue + r.randint(-5, 5),
            )
        sheet.at += 0.4
        sheet.decode(running, used, r.uniform(60, 200), queue)
    return done(
        sheet,
        "prefill-budget",
        "chunk",
        f"Every prefill batch holds exactly the {chunk} tokens it may, prompts wait, the pool is mostly free.",
        ((CHUNK, UP),),
        BUDGET_WRONG,
    )


def budget_max_prefill(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, era=r.choice(("2025", "0.5.23")))
    limit = r.choice((2048, 4096))
    sheet.start(max_prefill_tokens=limit, chunked_prefill_size=8192)
    for _ in range(r.randint(20, 35)):
        running, queue, used = r.randint(10, 24), r.randint(40, 120), r.uniform(0.1, 0.35)
        for _ in range(r.randint(4, 8)):
            sheet.at += limit / 15000
            sheet.prefill(
                r.randint(3, 7),
                limit - r.randint(0, 220),
                r.randint(0, 60),
                used,
                running,
                queue + r.randint(-9, 9),
            )
        sheet.at += 0.5
        sheet.decode(running, used, r.uniform(100, 300), queue)
    return done(
        sheet,
        "prefill-budget",
        "max-prefill",
        f"Prefill batches end just below max_prefill_tokens of {limit}, far below the chunk size; many wait, the pool has room.",
        ((PREFILL, UP),),
        BUDGET_WRONG,
    )


def budget_no_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, L4)
    chunk = r.choice((2048, 4096, 8192))
    for _ in range(r.randint(20, 35)):
        running, queue, used = r.randint(6, 14), r.randint(60, 160), r.uniform(0.1, 0.4)
        for _ in range(r.randint(5, 9)):
            sheet.at += chunk / 12000
            sheet.prefill(
                r.randint(4, 8), chunk, r.randint(0, 90), used, running, queue + r.randint(-5, 5)
            )
        sheet.at += 0.3
        sheet.decode(running, used, r.uniform(50, 150), queue)
    return done(
        sheet,
        "prefill-budget",
        "no-start",
        f"Without the start: {chunk} tokens in each prefill batch of several prompts, a queue, a pool that is mostly free.",
        ((CHUNK, UP), (PREFILL, UP)),
        BUDGET_WRONG,
    )


def blocking(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, A100_TP2, H200_V3)
    chunk = r.choice((2048, 4096, 8192))
    sheet.start(chunked_prefill_size=chunk)
    for _ in range(r.randint(4, 6)):
        load(sheet, r.randint(8, 14), running=(20, 36), usage=(0.15, 0.35), queue=(0, 0))
        queue, running = 0, r.randint(22, 30)
        used = r.uniform(0.2, 0.3)
        for piece in range(r.randint(12, 24)):
            sheet.at += chunk / r.uniform(6000, 9000)
            queue += r.choice((0, 1, 1, 2, 3))
            sheet.prefill(
                1 if piece == 0 else r.choice((0, 1)),
                chunk,
                0,
                used + piece * chunk / sheet.pool,
                running,
                queue,
            )
            if piece % 6 == 5:
                sheet.decode(running, used + piece * chunk / sheet.pool, r.uniform(100, 400), queue)
        for _ in range(3):
            queue = max(0, queue // 3)
            sheet.at += 0.3
            sheet.prefill(max(1, queue), r.randint(400, chunk - 100), 0, used, running, queue)
    return done(
        sheet,
        "long-prompt-blocking",
        "started",
        "Again and again one prompt takes a dozen or more prefill batches by itself; short requests queue behind it and are taken at once when it is done.",
        (),
        BLOCK_WRONG,
    )


def blocking_no_start(r: Random) -> Written:
    chunk = r.choice((4096, 8192))
    sheet = paper(r, H100_8B, H100_70B)
    for _ in range(5):
        load(sheet, r.randint(6, 10), running=(12, 20), usage=(0.1, 0.25), queue=(0, 0))
        queue, running, used = 1, r.randint(12, 18), 0.2
        for piece in range(r.randint(10, 16)):
            sheet.at += chunk / 8000
            queue += r.randint(0, 3)
            sheet.prefill(1, chunk, 0, used + piece * chunk / sheet.pool, running, queue)
        sheet.prefill(queue, r.randint(900, chunk - 1), 0, used, running, 0)
        sheet.at += 1
    return done(
        sheet,
        "long-prompt-blocking",
        "no-start",
        "One sequence at a time fills batch after batch with its chunks while the queue grows; then the queue is empty at once.",
        (),
        BLOCK_WRONG,
    )


def queue(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_TP2, H100_70B)
    sheet.start(free=5.8)
    deep = r.randint(3000, 16000)
    load(sheet, r.randint(40, 75), running=(110, 240), usage=(0.92, 0.99), queue=(0.8 * deep, deep))
    return done(
        sheet,
        "queue-too-long",
        "started",
        "The pool is well used, but thousands of requests wait: the clients send far too much at once.",
        (),
        QUEUE_WRONG,
    )


def queue_no_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B)
    deep = r.randint(2600, 9000)
    load(sheet, r.randint(40, 90), running=(180, 320), usage=(0.93, 0.98), queue=(0.9 * deep, deep))
    return done(
        sheet, "queue-too-long", "no-start", "Thousands wait at a usage above 0.9.", (), QUEUE_WRONG
    )


def queue_lpm(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, era="2024")
    sheet.start(free=5.8, schedule_policy="lpm")
    load(
        sheet,
        r.randint(35, 60),
        running=(130, 220),
        usage=(0.93, 0.98),
        queue=(4000, 12000),
        hit=(0.2, 0.5),
    )
    return done(
        sheet,
        "queue-too-long",
        "lpm",
        "Thousands wait and the policy sorts them by prefix in each step.",
        (),
        QUEUE_WRONG,
    )


def graph_small(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, H100_70B, A100_40, era=r.choice(("2025", "0.5.23")))
    limit = r.choice((8, 16, 32, 64))
    key = "cuda_graph_max_bs_decode" if sheet.era == "0.5.23" else "cuda_graph_max_bs"
    sheet.start(free=6.2, **{key: limit})
    load(
        sheet,
        r.randint(35, 75),
        running=(limit * 1.8, limit * 3.5),
        usage=(0.91, 0.97),
        queue=(60, 240),
        graph_limit=limit,
    )
    return done(
        sheet,
        "graph-miss",
        "small",
        f"Batches of more than {limit} requests run without graphs because the largest captured one has {limit}.",
        ((GRAPH, UP),),
        GRAPH_WRONG,
    )


def graph_off(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, era=r.choice(("2025", "0.5.23")))
    sheet.start(free=6.4, disable_cuda_graph=True)
    load(
        sheet, r.randint(40, 90), running=(8, 28), usage=(0.91, 0.95), queue=(50, 140), graph=False
    )
    return done(
        sheet,
        "graph-miss",
        "off",
        "Small batches run without graphs because graphs are switched off.",
        (("--disable-cuda-graph", "set"), ("--disable-cuda-graph", "decrease")),
        GRAPH_WRONG,
    )


def graph_no_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era="2025")
    load(
        sheet,
        r.randint(40, 90),
        running=(40, 64),
        usage=(0.91, 0.95),
        queue=(50, 140),
        graph_limit=32,
    )
    return done(
        sheet,
        "graph-miss",
        "no-start",
        "Without the start: `cuda graph: False` in every decode line at 40 to 64 requests.",
        ((GRAPH, UP),),
        GRAPH_WRONG,
    )


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


PAINTERS: tuple[Painter, ...] = (
    budget,
    budget_max_prefill,
    budget_no_start,
    blocking,
    blocking_no_start,
    queue,
    queue_no_start,
    queue_lpm,
    graph_small,
    graph_off,
    graph_no_start,
    blocking_giant,
    graph_light,
    graph_low_queue,
    queue_moderate,
)
