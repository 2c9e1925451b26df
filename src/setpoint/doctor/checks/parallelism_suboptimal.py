"""parallelism-suboptimal: tensor parallelism is used where copies of the model would give more
throughput."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    confidence,
    counted,
    during,
    estimate,
    lines_on,
    percent,
)
from setpoint.doctor.checks.memory import total_gb
from setpoint.doctor.findings import Action, Finding, RuledOut

FITS = 0.35
"""Largest share of one device for the weights of the whole model: the rest is enough for a pool."""
LOADED = 0.5
"""Least share of the loaded time in which requests wait: only then throughput matters."""


def find(case: Case) -> Finding | None:
    ranks, copies = case.number("tp_size"), case.number("dp_size") or 1
    weights, total = case.facts.weights_gb, total_gb(case)
    if not ranks or ranks < 2 or copies > 1 or weights is None or not total:
        return None
    if case.option("enable_dp_attention") is True or (case.number("ep_size") or 1) > 1:
        return None
    if (case.number("nnodes") or 1) > 1 or not case.has_load or case.facts.device == "cpu":
        return None
    waiting = case.load.share(lambda moment: bool(moment.queue))
    value = int(ranks)
    while value > 1 and weights * ranks / (value / 2) <= FITS * total:
        value //= 2
    if value == ranks or waiting < LOADED:
        return None
    copies = int(ranks) // value
    return Finding(
        cause="parallelism-suboptimal",
        confidence=min(confidence(case, waiting, case.load), 0.7),
        summary="Separate copies of the model would give more throughput: "
        f"{counted(value, 'device')} of {total:.0f} GB could hold the {weights * ranks:.1f} GB of "
        f"weights, but they are spread over {ranks:.0f} devices, which wait for one another in "
        "every layer.",
        evidence=lines_on(case, "tp_size") + lines_on(case, "weights_gb"),
        action=Action(
            f"Run {copies} copies with --tp-size {value} behind a router (or --dp-size {copies}) "
            f"instead of one with --tp-size {ranks:.0f}.",
            "--tp-size",
            "decrease",
            value,
        ),
        effect=estimate(
            "output throughput",
            1.1,
            1.4,
            float(copies),
            f"{copies} copies do not exchange data between devices (measured elsewhere: 3,216 "
            "tokens/s with two copies, 1,560 tokens/s with two devices together)",
        ),
        ruled_out=(
            RuledOut(
                "healthy",
                f"Requests wait {during(waiting)}, so throughput is what they need.",
            ),
        ),
        risk="A single request gets its tokens more slowly, and each copy has its own prefix "
        "cache.",
        verify="The sum of the copies' output throughput (gen throughput) exceeds today's.",
        falsify="The time between the tokens of a single request matters more here than output "
        "throughput.",
    )


CHECK = Check(
    cause="parallelism-suboptimal",
    title="Separate copies of the model would give more throughput",
    find=find,
    meaning="Tensor parallelism splits every layer over several devices, which exchange results "
    "twice per layer. It is needed if the weights do not fit on one device, and it makes single "
    "requests faster. If the model fits and throughput matters, several copies of the model do "
    "better, because they exchange nothing.",
    rule="Requests wait for at least half of the time under load, --tp-size is 2 or more without "
    f"data parallelism, and fewer devices could hold all weights in {percent(FITS)} of their "
    "memory.",
    counter_evidence="Without a queue, low latency may be the aim. Expert parallelism and "
    "attention data parallelism have other reasons to use several devices.",
    advice="Run several copies with a smaller --tp-size behind a router.",
    guide="All guides: if there is enough memory, always prefer data parallelism for throughput, "
    "with the router rather than --dp-size.",
    equation="value = the smallest power of two for which all weights / value take at most 0.35 x "
    "the memory of a device",
    picture="""\
--tp-size 2          [half of each layer] <-> [half of each layer]
two copies           [whole model]            [whole model]""",
)
