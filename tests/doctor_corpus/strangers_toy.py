"""A toy of a server with continuous batching, written from the formulas of SGLang's admission for
logs whose figures hang together in time: its own, not the project's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from strangers_labels import (
    BUDGET_WRONG,
    CAP,
    CAP_WRONG,
    CHUNK,
    CLIENT_WRONG,
    CONS,
    CONS_WRONG,
    DOWN,
    FULL_WRONG,
    OPT_WRONG,
    UP,
    WELL_WRONG,
    Painter,
    Written,
    done,
)
from strangers_paper import A10G, A100_40, H100_8B, L4_7B, Paper, paper


@dataclass(slots=True)
class Request:
    prompt: int
    output: int
    limit: int
    done: int = 0
    computed: int = 0


def held(requests: list[Request]) -> int:
    """Their tokens in the pool."""
    return sum(each.computed + each.done for each in requests)


def admit(
    waiting: list[Request], budget: int, free: int, room: float
) -> tuple[list[Request], Request | None, int]:
    """Requests that join with their whole prompt, the one that joins with a part, tokens left."""
    new: list[Request] = []
    while waiting and budget > 0 and len(new) < free:
        each = waiting[0]
        if each.prompt + each.done + min(each.limit - each.done, 4096) > room:
            break
        waiting.pop(0)
        each.computed = min(budget, each.prompt)
        budget -= each.computed
        room -= each.prompt + min(each.limit, 4096)
        if each.computed < each.prompt:
            return new, each, budget
        new.append(each)
    return new, None, budget


def retract(sheet: Paper, running: list[Request], ratio: float) -> tuple[list[Request], float]:
    """Throw back those with the fewest outputs until 20 steps fit; the new ratio."""
    used = held(running)
    gone = []
    while used + len(running) * 20 > sheet.pool and len(running) > 1:
        loser = min(running, key=lambda each: (each.done, -each.prompt))
        running.remove(loser)
        used -= loser.computed + loser.done
        gone.append(loser)
    outputs = sum(each.done for each in running) + 20 * len(running)
    later = min(1.0, outputs / (sum(each.limit for each in running) + 1))
    sheet.retract(len(gone), ratio, later)
    return gone, later


def run(
    sheet: Paper, seconds: float, arrive: Callable[[float, float, int], int], draw: Callable[[], Request], *,
    cap: int = 2048, chunk: int = 8192, care: float = 1.0, speed: float = 9000.0,
) -> None:  # fmt: skip
    """``arrive(now, seconds since the last step, requests in the server)``: how many come."""
    waiting: list[Request] = []
    running: list[Request] = []
    chunked: Request | None = None
    first = min(0.7 * care, 1.0)
    ratio, steps, generated, last = first, 0, 0, sheet.at
    before = end = sheet.at
    end += seconds
    while sheet.at < end:
        waiting += [
            draw() for _ in range(arrive(sheet.at, sheet.at - before, len(waiting) + len(running)))
        ]
        before = sheet.at
        used = held(running) + (chunked.computed if chunked else 0)
        room = (
            sheet.pool - used - sum(min(each.limit - each.done, 4096) * ratio for each in running)
        )
        budget, new = chunk, list[Request]()
        if chunked:
            part = min(budget, chunked.prompt - chunked.computed)
            chunked.computed += part
            budget -= part
            if chunked.computed == chunked.prompt:
                running.append(chunked)
                chunked = None
        continued = chunk - budget
        if chunked is None:
            free = cap - len(running)
            new, chunked, budget = admit(waiting, budget, free, room)
        if budget < chunk:
            tokens = chunk - budget
            count = len(new) + (continued > 0) + (chunked is not None and continued < chunk)
            sheet.at += 0.012 + tokens / speed
            sheet.prefill(count, tokens, 0, used / sheet.pool, len(running), len(waiting))
            running += new
            continue
        if not running:
            sheet.at += 0.05
            ratio = first
            continue
        if used + len(running) > sheet.pool and len(running) > 1:
            gone, ratio = retract(sheet, running, ratio)
            waiting += gone
            used = held(running)
        sheet.at += (0.011 + 0.00012 * len(running)) * sheet.random.uniform(0.95, 1.1)
        ratio = max(ratio - first * 0.86 / 600, first * 0.14)
        steps += 1
        generated += len(running)
        for each in running:
            each.done += 1
        if steps % 40 == 0:
            speed_now = generated / max(0.01, sheet.at - last)
            sheet.decode(len(running), used / sheet.pool, speed_now, len(waiting))
            generated, last = 0, sheet.at
        running = [each for each in running if each.done < each.output]


def users(count: int) -> Callable[[float, float, int], int]:
    return lambda now, gap, inside: max(0, count - inside)


def rate(r: Random, each: float) -> Callable[[float, float, int], int]:
    def come(now: float, gap: float, inside: int) -> int:
        expected = each * gap
        return int(expected) + (r.random() < expected - int(expected))

    return come


def toy_cap(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40)
    cap = r.choice((16, 24, 40))
    sheet.start(running=cap, max_running_requests=cap)
    run(
        sheet,
        60,
        users(cap * 3),
        lambda: Request(r.randint(200, 900), r.randint(80, 300), 512),
        cap=cap,
    )
    return done(
        sheet,
        "seq-cap",
        "toy",
        f"Three times as many users as the {cap} slots; the pool is nearly empty.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def toy_conservative(r: Random) -> Written:
    sheet = paper(r, A100_40)
    sheet.start(schedule_conservativeness=1.0)
    run(
        sheet,
        60,
        users(450),
        lambda: Request(r.randint(100, 500), r.randint(40, 160), 4096),
        chunk=sheet.machine.chunk,
    )
    return done(
        sheet,
        "kv-conservative",
        "toy",
        "Requests ask for 4,096 tokens and end after a hundred: the reserve keeps others out of a pool with room.",
        ((CONS, DOWN),),
        CONS_WRONG,
    )


def toy_optimistic(r: Random) -> Written:
    sheet = paper(r, A10G, L4_7B)
    sheet.start(schedule_conservativeness=1.0)
    run(
        sheet,
        90,
        users(90),
        lambda: Request(r.randint(100, 300), r.randint(850, 1000), 1024),
        chunk=sheet.machine.chunk,
        speed=4000,
    )
    return done(
        sheet,
        "kv-optimistic",
        "toy",
        "Outputs are as long as asked for, and the reserve decays to a tenth of them: waves of retractions.",
        ((CONS, UP),),
        OPT_WRONG,
    )


def toy_full(r: Random) -> Written:
    sheet = paper(r, A10G, L4_7B)
    sheet.start(free=1.7)
    run(
        sheet,
        110,
        rate(r, 1.5),
        lambda: Request(r.randint(1800, 3000), r.randint(300, 600), 640),
        chunk=sheet.machine.chunk,
        speed=5000,
    )
    return done(
        sheet,
        "kv-full",
        "toy",
        "Long prompts, outputs nearly as long as asked for: the estimate is right and the pool too small; the queue grows.",
        (),
        FULL_WRONG,
        ("kv-optimistic",),
    )


def toy_client(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40)
    sheet.start()
    run(
        sheet,
        60,
        rate(r, r.uniform(0.8, 2.0)),
        lambda: Request(r.randint(200, 900), r.randint(80, 300), 512),
    )
    return done(
        sheet,
        "client-bound",
        "toy",
        "One or two short requests a second for a large device.",
        (),
        CLIENT_WRONG,
    )


def toy_budget(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40)
    sheet.start(chunked_prefill_size=512)
    run(
        sheet,
        45,
        users(60),
        lambda: Request(r.randint(600, 1500), r.randint(2, 6), 16),
        chunk=512,
        speed=11000,
    )
    return done(
        sheet,
        "prefill-budget",
        "toy",
        "Prompts of a thousand tokens with outputs of a few, in chunks of 512.",
        ((CHUNK, UP),),
        BUDGET_WRONG,
    )


def toy_healthy(r: Random) -> Written:
    sheet = paper(r, A100_40)
    sheet.start(free=4.0)
    size = sheet.pool // 560
    run(
        sheet,
        80,
        users(int(size * 1.5)),
        lambda: Request(r.randint(200, 600), r.randint(180, 420), 512),
        care=1.0,
        chunk=sheet.machine.chunk,
        speed=20000,
    )
    return done(
        sheet,
        "healthy",
        "toy",
        "The pool is used well and half as many again wait.",
        (),
        WELL_WRONG,
    )


PAINTERS: tuple[Painter, ...] = (
    toy_cap,
    toy_conservative,
    toy_optimistic,
    toy_full,
    toy_client,
    toy_budget,
    toy_healthy,
)
