"""Lasting states of a server: figures that drift, and the lines that show them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from strangers_paper import Paper


@dataclass(slots=True)
class Drift:
    """A figure that moves slowly between two bounds, as real ones do."""

    random: Random
    low: float
    high: float
    value: float = 0.0
    inertia: float = 0.85

    def __post_init__(self) -> None:
        self.value = self.random.uniform(self.low, self.high)

    def next(self) -> float:
        aim = self.random.uniform(self.low, self.high)
        self.value = self.inertia * self.value + (1 - self.inertia) * aim
        return self.value


Range = tuple[float, float]


def load(
    sheet: Paper, count: int, *, running: Range, usage: Range, queue: Range, hit: Range = (0.0, 0.15), graph: bool = True,
    graph_limit: int | None = None, batch: int | None = None, prefill_share: float = 1.0, retract: float = 0.0, ratio: Range = (0.12, 0.45), cap: int | None = None,
) -> None:  # fmt: skip
    """Three quarters of ``count`` decode lines of a lasting state with their prefill lines; the sizes of requests
    follow from running requests and usage. ``retract``: retractions for each decode line;
    ``batch``: tokens of every prefill batch."""
    r = sheet.random
    runs, uses, queues, hits = (Drift(r, *pair) for pair in (running, usage, queue, hit))
    queues.inertia = 0.93
    for _ in range(max(1, 3 * count // 4)):
        now, used, waiting = (
            int(runs.next()),
            uses.next(),
            max(0, round(queues.next() + r.gauss(0, 0.02) * queues.value)),
        )
        if cap is not None:
            now = cap if r.random() < 0.8 else cap - r.randint(1, max(1, cap // 16))
        if not queue[1]:
            waiting = 0
        now = max(1, now)
        each = used * sheet.pool / now
        prompt, output = 0.75 * each, max(20.0, 0.5 * each)
        step = 0.011 + 0.00012 * now
        finished = now * 40 / output * prefill_share
        batches = min(5, int(finished) if finished < 3 else 1 + int(finished / 4))
        batches += r.random() < finished - int(finished) if finished < 3 else 0
        for _ in range(batches):
            new = max(1, round(finished / max(1, batches)))
            share = hits.next()
            tokens = max(3, int(new * prompt * r.uniform(0.6, 1.4) * (1 - share)))
            limit = batch or sheet.machine.chunk
            tokens = limit if batch and r.random() < 0.85 else min(tokens, limit)
            cached = int(tokens * share / max(0.01, 1 - share)) if share > 0.01 else 0
            sheet.at += tokens / 18000
            sheet.prefill(new, tokens, cached, used - 0.01 * r.random(), max(0, now - new), waiting)
        sheet.at += 40 * step * r.uniform(0.95, 1.1)
        if r.random() < retract:
            after = r.uniform(*ratio)
            sheet.retract(r.choice((1, 1, 1, 2, 3)), after * r.uniform(0.5, 0.95), after)
        is_graph = graph and (graph_limit is None or now <= graph_limit)
        sheet.decode(now, used, now / step * r.uniform(0.78, 0.98), waiting, is_graph)
