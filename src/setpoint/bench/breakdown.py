"""Where the time of a step goes, and what this machine would need for it at least.

Works on the ``Work`` of each kind of operation, on measured limits of the machine, and on how an
engine's loop spent its turns on the same batch. A kind's bound is the larger of its bytes by the
read bandwidth and its operations by the multiplication rate.

The read bandwidth is that of as many bytes as pass before the same one is used again: those of the
whole step for weights, keys and values, those of one call for activations, which the next layer's
take the place of.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from setpoint.core.work import Work

Shape = tuple[int, int, int]
"""Batch size, tokens of a prompt, tokens of an answer."""
PHASES = ("prefill", "decode")
STREAMED = ("linear", "head", "attention")
"""Kinds whose bytes are used once per step."""
COMPUTED = (*STREAMED, "elementwise", "sampling")
FROM_ENGINE = ("scheduling", "messages")
"""Rows that were measured in a whole engine."""
UNITS = (("µs", 1e6, 0.01), ("ms", 1e3, 10.0), ("s", 1.0, float("inf")))
"""Name, how many make a second, and the seconds from which the next one is easier to read."""
UNLIKE = 1.5
"""Ratio of two runs of the same steps from which one was disturbed; a busy machine alone varies by
a tenth."""
LABELS = {"linear": "linear layers", "messages": "messages (IPC)"}


class Limits(Protocol):
    """The best this machine does with the engine's threads."""

    def read_bytes_per_s(self, num_bytes: int) -> float:
        """Reading that many bytes again and again."""
        ...

    def flops(self, product: str) -> float:
        """Products of that type (``Work.product``) in registers."""
        ...

    def measured(self) -> dict[str, Any]:
        """All of the above that was asked for, for the result."""
        ...


@dataclass(slots=True)
class Part:
    """One row."""

    seconds: float
    bound_s: float | None = None
    """None where nothing bounds it, or the limits are not known."""
    num_bytes: float = 0.0
    flops: float = 0.0


@dataclass(slots=True, frozen=True)
class Turns:
    """How an engine's loop spent its steps with a batch; seconds of one decode step, or of the
    prefill of all prompts."""

    seconds: float
    messages_s: float
    scheduling_s: float


def parts_of(
    counted: Sequence[Mapping[str, Work]],
    timed: Sequence[Mapping[str, Work]],
    totals_s: Sequence[float],
    limits: Limits | None,
    turns: Turns | None,
) -> dict[str, Part]:
    """``counted``: of each repetition, whatever it took; ``timed`` and ``totals_s``: the times of
    as many or of others.

    The last row, "step", is the sum of the others.
    """
    parts = {}
    means = {kind: _mean([works.get(kind, Work()) for works in counted]) for kind in COMPUTED}
    streamed = sum(means[kind].num_bytes for kind in STREAMED)
    for kind, mean in means.items():
        again = streamed if kind in STREAMED else mean.num_bytes // max(mean.num_calls, 1)
        bound = None if limits is None else _bound(mean, again, limits)
        seconds = statistics.median(
            works[kind].seconds if kind in works else 0.0 for works in timed
        )
        parts[kind] = Part(seconds, bound, mean.num_bytes, mean.flops)
    rests = (
        total - sum(work.seconds for work in works.values())
        for total, works in zip(totals_s, timed, strict=True)
    )
    parts["rest"] = Part(statistics.median(rests))
    if turns is not None:
        parts["scheduling"] = Part(turns.scheduling_s)
        parts["messages"] = Part(turns.messages_s)
    bounds = [part.bound_s for part in parts.values() if part.bound_s is not None]
    parts["step"] = Part(
        sum(part.seconds for part in parts.values()),
        sum(bounds) if bounds else None,
        sum(part.num_bytes for part in parts.values()),
        sum(part.flops for part in parts.values()),
    )
    return parts


def _mean(works: Sequence[Work]) -> Work:
    """Of the counts, which only grow with the context; without the times."""
    return Work(
        num_calls=round(statistics.fmean(work.num_calls for work in works)),
        num_bytes=round(statistics.fmean(work.num_bytes for work in works)),
        flops=round(statistics.fmean(work.flops for work in works)),
        product=works[0].product,
    )


def _bound(work: Work, again: int, limits: Limits) -> float:
    reading = work.num_bytes / limits.read_bytes_per_s(again) if work.num_bytes else 0.0
    multiplying = work.flops / limits.flops(work.product) if work.product else 0.0
    return max(reading, multiplying)


def table(title: str, parts: Mapping[str, Part], plain_s: float, turns: Turns | None) -> list[str]:
    """Markdown. ``plain_s``: the same without timers."""
    whole = parts["step"].seconds
    unit, per_s = next((unit, per_s) for unit, per_s, most_s in UNITS if whole < most_s)
    lines = [
        "",
        title,
        "",
        f"| part | {unit} | share | bound {unit} | of bound |",
        "|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        bound = (
            "– | –"
            if part.bound_s is None
            else f"{part.bound_s * per_s:,.2f} | {part.bound_s / max(part.seconds, 1e-12):.0%}"
        )
        lines.append(
            f"| {LABELS.get(name, name)} | {part.seconds * per_s:,.2f} | {part.seconds / whole:.1%}"
            f" | {bound} |"
        )
    engine = (
        ""
        if turns is None
        else f", and {turns.seconds * per_s:,.2f} {unit} as part of a whole engine"
    )
    lines += ["", f"Without timers and scheduling it took {plain_s * per_s:,.2f} {unit}{engine}."]
    timed = whole - sum(parts[name].seconds for name in FROM_ENGINE if name in parts)
    if not 1 / UNLIKE < plain_s / timed < UNLIKE:
        words = (
            f"{plain_s / timed:.1f} times as long as"
            if plain_s > timed
            else f"only {plain_s / timed:.0%} of the time that it took"
        )
        lines.append(
            f"WARNING: Without timers it took {words} with them, so this table may not describe a"
            " usual step. If other programs were busy, measure again without them."
        )
    return lines


def as_json(parts: Mapping[str, Part], turns: Turns | None) -> dict[str, Any]:
    return {
        "parts": {name: asdict(part) for name, part in parts.items()},
        "engine_s": None if turns is None else turns.seconds,
    }


def described(shape: Shape) -> str:
    return f"a batch of {shape[0]} ({shape[1]} tokens in, {shape[2]} out)"


def described_limits(measured: Mapping[str, Any]) -> str:
    """In one line."""
    reads = (
        f"{rate / 1e9:.1f} GB/s over {int(size) / 1e6:,.0f} MB"
        for size, rate in measured["read_bytes_per_s"].items()
    )
    rates = (f"{rate / 1e9:,.0f} GFLOP/s {product}" for product, rate in measured["flops"].items())
    return (
        f"Limits of this machine with {measured['threads']} threads: "
        + ", ".join([*reads, *rates])
        + "."
    )
