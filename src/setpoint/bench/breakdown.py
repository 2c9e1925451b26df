"""How the time of a step is divided, and the least time that this machine would need for it.

Works on the ``Work`` of each kind of operation, on measured limits of the machine, and on how an
engine's loop spent its turns on the same batch. A kind's bound is the larger of its bytes divided
by the read bandwidth and its operations divided by the multiplication rate.

The read bandwidth is measured over as many bytes as are read before the same byte is read again:
for weights, keys and values, the bytes of the whole step; for activations, whose memory the next
layer uses again, the bytes of one call.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from setpoint.core.work import Work

Shape = tuple[int, int, int]
"""(batch size, tokens of a prompt, tokens of an answer)"""
PHASES = ("prefill", "decode")
STREAMED = ("linear", "head", "attention")
"""Kinds of operations whose bytes are read once per step."""
COMPUTED = (*STREAMED, "elementwise", "sampling")
FROM_ENGINE = ("scheduling", "messages")
"""Rows whose times were measured in a whole engine."""
UNITS = (("µs", 1e6, 0.01), ("ms", 1e3, 10.0), ("s", 1.0, float("inf")))
"""(name of a unit, units per second, number of seconds from which the next unit is easier to
read)"""
UNLIKE = 1.5
"""If two runs of the same steps differ by more than this ratio, one of them was disturbed; on a
busy machine alone times vary by a tenth."""
LABELS = {"linear": "linear layers", "messages": "messages (IPC)"}


class PeakRates(Protocol):
    """The highest rates that this machine reaches with the engine's threads."""

    def read_bytes_per_s(self, num_bytes: int) -> float:
        """The bandwidth of reading that many bytes again and again."""
        ...

    def flops(self, product: str) -> float:
        """The rate of operations in registers on numbers of that type (``Work.product``)."""
        ...

    def measured(self) -> dict[str, Any]:
        """All limits that were asked for, for the result."""
        ...


@dataclass(slots=True)
class StepShare:
    """One row of the table."""

    seconds: float
    bound_s: float | None = None
    """None if nothing bounds it, or the limits are not known."""
    num_bytes: float = 0.0
    flops: float = 0.0


@dataclass(slots=True, frozen=True)
class LoopTimes:
    """How an engine's loop spent its steps with a batch: seconds of one decode step, or of the
    prefill of all prompts."""

    seconds: float
    messages_s: float
    scheduling_s: float


def parts_of(
    counted: Sequence[Mapping[str, Work]],
    timed: Sequence[Mapping[str, Work]],
    totals_s: Sequence[float],
    limits: PeakRates | None,
    turns: LoopTimes | None,
) -> dict[str, StepShare]:
    """The rows of the table. ``counted``: the work of each repetition, measured without regard to
    time. ``timed`` and ``totals_s``: times of as many repetitions, or of others.

    The last row, "step", is the sum of the others.
    """
    parts = {}
    means = {kind: _mean([works.get(kind, Work()) for works in counted]) for kind in COMPUTED}
    streamed = sum(means[kind].num_bytes for kind in STREAMED)
    for kind, mean in means.items():
        again = streamed if kind in STREAMED else mean.num_bytes // max(mean.num_calls, 1)
        bound = None if limits is None else bound_s(mean, again, limits)
        seconds = statistics.median(
            works[kind].seconds if kind in works else 0.0 for works in timed
        )
        parts[kind] = StepShare(seconds, bound, mean.num_bytes, mean.flops)
    rests = (
        total - sum(work.seconds for work in works.values())
        for total, works in zip(totals_s, timed, strict=True)
    )
    parts["rest"] = StepShare(statistics.median(rests))
    if turns is not None:
        parts["scheduling"] = StepShare(turns.scheduling_s)
        parts["messages"] = StepShare(turns.messages_s)
    bounds = [part.bound_s for part in parts.values() if part.bound_s is not None]
    parts["step"] = StepShare(
        sum(part.seconds for part in parts.values()),
        sum(bounds) if bounds else None,
        sum(part.num_bytes for part in parts.values()),
        sum(part.flops for part in parts.values()),
    )
    return parts


def _mean(works: Sequence[Work]) -> Work:
    """The mean of the counts, which only grow with the context, without the times."""
    return Work(
        num_calls=round(statistics.fmean(work.num_calls for work in works)),
        num_bytes=round(statistics.fmean(work.num_bytes for work in works)),
        flops=round(statistics.fmean(work.flops for work in works)),
        product=works[0].product,
    )


def bound_s(work: Work, again: int, limits: PeakRates) -> float:
    """The least seconds for this work, whose bytes are read again after ``again`` bytes."""
    reading = work.num_bytes / limits.read_bytes_per_s(again) if work.num_bytes else 0.0
    multiplying = work.flops / limits.flops(work.product) if work.product else 0.0
    return max(reading, multiplying)


def table(
    title: str, parts: Mapping[str, StepShare], untimed_s: float, turns: LoopTimes | None
) -> list[str]:
    """The table in Markdown. ``untimed_s``: times of the same steps without timers."""
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
    lines += ["", f"Without timers and scheduling it took {untimed_s * per_s:,.2f} {unit}{engine}."]
    timed = whole - sum(parts[name].seconds for name in FROM_ENGINE if name in parts)
    if not 1 / UNLIKE < untimed_s / timed < UNLIKE:
        words = (
            f"{untimed_s / timed:.1f} times as long as"
            if untimed_s > timed
            else f"only {untimed_s / timed:.0%} of the time that it took"
        )
        lines.append(
            f"WARNING: Without timers it took {words} with them, so this table may not describe a"
            " usual step. If other programs were busy, measure again without them."
        )
    return lines


def as_json(parts: Mapping[str, StepShare], turns: LoopTimes | None) -> dict[str, Any]:
    return {
        "parts": {name: asdict(part) for name, part in parts.items()},
        "engine_s": None if turns is None else turns.seconds,
    }


def shape_text(shape: Shape) -> str:
    return f"a batch of {shape[0]} ({shape[1]} tokens in, {shape[2]} out)"


def limits_text(measured: Mapping[str, Any]) -> str:
    """The limits in one line."""
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
