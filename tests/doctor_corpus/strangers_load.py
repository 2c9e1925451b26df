"""Logs of servers under load, painted by hand: a state and its figures, no scheduler behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from strangers_paper import (
    A10G,
    A100_40,
    A100_80,
    A100_TP2,
    H100_8B,
    H100_70B,
    H200_V3,
    L4,
    L4_7B,
    RTX_4090,
    Paper,
    load,
    paper,
)

Change = tuple[str, str]
CONS, CAP, MEM = "--schedule-conservativeness", "--max-running-requests", "--mem-fraction-static"
CHUNK, PREFILL, GRAPH = "--chunked-prefill-size", "--max-prefill-tokens", "--cuda-graph-max-bs"
UP, DOWN = "increase", "decrease"


@dataclass(frozen=True, slots=True)
class Written:
    cause: str
    variant: str
    text: bytes
    why: str
    actions: tuple[Change, ...] = ()
    forbidden: tuple[Change, ...] = ()
    acceptable: tuple[str, ...] = ()
    era: str = ""


Painter = Callable[[Random], Written]


def _done(
    sheet: Paper,
    cause: str,
    variant: str,
    why: str,
    actions: tuple[Change, ...] = (),
    forbidden: tuple[Change, ...] = (),
    acceptable: tuple[str, ...] = (),
) -> Written:
    return Written(cause, variant, sheet.text(), why, actions, forbidden, acceptable, sheet.era)


# client-bound

CLIENT_WRONG = ((CONS, UP), (CONS, DOWN), (MEM, UP), (MEM, DOWN), (CAP, DOWN), (CHUNK, DOWN))


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
    return _done(
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
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "client-bound",
        "blips",
        "Now and then one or two wait for the length of a prefill; else the queue is empty.",
        (),
        CLIENT_WRONG,
        ("healthy",),
    )


# seq-cap

CAP_WRONG = ((CONS, DOWN), (CONS, UP), (CAP, DOWN), (MEM, DOWN))


def cap_set(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, H100_70B, L4, A100_TP2)
    cap = r.choice((8, 16, 24, 32, 48, 64, 100, 128))
    sheet.start(running=cap, max_running_requests=cap)
    load(
        sheet, r.randint(30, 90), running=(cap - 1, cap), cap=cap, usage=(0.2, 0.5), queue=(20, 300)
    )
    return _done(
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
    return _done(
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
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "seq-cap",
        "dp",
        "Both ranks run as many requests as each may, and both have a queue over a pool two thirds empty.",
        ((CAP, UP),),
        CAP_WRONG,
    )


# kv-conservative

CONS_WRONG = ((CONS, UP), (CAP, DOWN), (MEM, DOWN), (CHUNK, DOWN))


def conservative(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_TP2, H100_70B, L4)
    value = r.choice((1.0, 1.0, 1.2, 1.5))
    sheet.start(schedule_conservativeness=value)
    load(sheet, r.randint(40, 85), running=(50, 110), usage=(0.45, 0.72), queue=(80, 500))
    return _done(
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
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "kv-conservative",
        "one-retraction",
        "One retraction in minutes; else the pool has room and hundreds wait.",
        ((CONS, DOWN),),
        CONS_WRONG,
    )


# kv-optimistic

OPT_WRONG = ((CONS, DOWN), (CAP, UP), (MEM, DOWN))


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
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "kv-optimistic",
        "no-start",
        "Without the start's lines: usage of nearly 1 and retractions between most decode lines.",
        ((CONS, UP),),
        OPT_WRONG,
    )


# kv-full

FULL_WRONG = ((CONS, DOWN), (CAP, UP), (MEM, DOWN))


def full(r: Random) -> Written:
    sheet = paper(r, A10G, RTX_4090, L4_7B, A100_80)
    sheet.fraction = round(min(0.93, max(sheet.fraction, 0.89)), 2)
    sheet.start(free=r.uniform(1.6, 3.2) if sheet.machine.gb < 30 else r.uniform(4, 6))
    load(sheet, r.randint(40, 85), running=(5, 11), usage=(0.96, 1.0), queue=(150, 500))
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "kv-full",
        "most-careful",
        "Conservativeness is past its effective maximum and requests are still retracted: only a larger pool helps.",
        (),
        ((CONS, UP), *FULL_WRONG),
    )


# prefill-budget

BUDGET_WRONG = ((CONS, DOWN), (CONS, UP), (CHUNK, DOWN), (PREFILL, DOWN), (CAP, UP), (CAP, DOWN))


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
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "prefill-budget",
        "no-start",
        f"Without the start: {chunk} tokens in each prefill batch of several prompts, a queue, a pool that is mostly free.",
        ((CHUNK, UP), (PREFILL, UP)),
        BUDGET_WRONG,
    )


# long-prompt-blocking

BLOCK_WRONG = ((CONS, DOWN), (CONS, UP), (CAP, UP), (CAP, DOWN))


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
    return _done(
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
    return _done(
        sheet,
        "long-prompt-blocking",
        "no-start",
        "One sequence at a time fills batch after batch with its chunks while the queue grows; then the queue is empty at once.",
        (),
        BLOCK_WRONG,
    )


# queue-too-long

QUEUE_WRONG = ((CONS, DOWN), (CAP, DOWN), (MEM, DOWN), (CHUNK, DOWN))


def queue(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_TP2, H100_70B)
    sheet.start(free=5.8)
    deep = r.randint(3000, 16000)
    load(sheet, r.randint(40, 75), running=(110, 240), usage=(0.92, 0.99), queue=(0.8 * deep, deep))
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "queue-too-long",
        "lpm",
        "Thousands wait and the policy sorts them by prefix in each step.",
        (),
        QUEUE_WRONG,
    )


# graph-miss

GRAPH_WRONG = ((GRAPH, DOWN), (CONS, DOWN), (CONS, UP), (MEM, UP), (CAP, DOWN))


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
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "graph-miss",
        "no-start",
        "Without the start: `cuda graph: False` in every decode line at 40 to 64 requests.",
        ((GRAPH, UP),),
        GRAPH_WRONG,
    )


# memory at the ready line

UNDER_WRONG = ((MEM, DOWN), (CONS, DOWN), (CAP, UP), (CAP, DOWN))


def underused(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, H100_70B, H200_V3, era=r.choice(("2025", "0.5.23")))
    lowest = sheet.machine.weights / sheet.machine.gb
    sheet.fraction = round(r.uniform(max(0.5, lowest + 0.05), max(0.6, lowest + 0.08)), 2)
    sheet.start()
    load(sheet, r.randint(35, 75), running=(14, 40), usage=(0.95, 1.0), queue=(40, 180))
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "mem-underused",
        "rare-retractions",
        "As before, with a retraction every few minutes.",
        ((MEM, UP),),
        UNDER_WRONG,
    )


HEAD_WRONG = ((MEM, UP), (CHUNK, UP), (CAP, UP))


def headroom(r: Random) -> Written:
    sheet = paper(
        r, H100_8B, A100_TP2, H100_70B, H200_V3, A100_40, era=r.choice(("2025", "0.5.23"))
    )
    sheet.fraction = round(r.uniform(0.94, 0.97), 2)
    sheet.start(free=r.uniform(0.25, 1.2))
    load(sheet, r.randint(35, 75), running=(70, 160), usage=(0.91, 0.96), queue=(60, 240))
    return _done(
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
    return _done(
        sheet,
        "mem-headroom-low",
        "no-queue",
        "Nobody waits, but a few hundred megabytes are free on a large device.",
        ((MEM, DOWN),),
        HEAD_WRONG,
    )


# prefix-miss

PREFIX_WRONG = ((CONS, UP), (CONS, DOWN), (CAP, DOWN))


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
    return _done(
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
    return _done(
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
    return _done(
        sheet,
        "prefix-miss",
        "disabled-long",
        "One system prompt of 6,000 tokens before every question, and --disable-radix-cache.",
        (),
        PREFIX_WRONG,
        ("prefill-budget",),
    )


PAINTERS: tuple[Painter, ...] = (
    client_few, client_middle, client_no_start, client_blips, cap_set, cap_reduced, cap_no_args, cap_no_start, cap_dp,
    conservative, conservative_no_start, conservative_low, conservative_one_retraction, optimistic, optimistic_default,
    optimistic_no_start, full, full_growing, full_careful, budget, budget_max_prefill, budget_no_start, blocking,
    blocking_no_start, queue, queue_no_start, queue_lpm, graph_small, graph_off, graph_no_start, underused, underused_guide,
    underused_retracting, headroom, headroom_idle, prefix_disabled, prefix_thrash, prefix_disabled_long,
)  # fmt: skip
