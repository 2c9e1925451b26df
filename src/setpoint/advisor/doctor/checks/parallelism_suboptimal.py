"""parallelism-suboptimal: tensor parallelism where copies of the model would generate more."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, estimate, percent, said
from setpoint.advisor.doctor.checks.memory import total_gb
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut

FITS = 0.35
"""Share of one device that the whole model's weights may take: the rest is pool enough."""
LOADED = 0.5
"""Share of the loaded time in which requests wait: only then throughput is what matters."""


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
        summary=f"One device could hold the model ({weights * ranks:.1f} of {total:.0f} GB), but "
        f"its weights are spread over {ranks:.0f} devices, which wait for one another in every "
        "layer.",
        evidence=said(case, "tp_size") + said(case, "weights_gb"),
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
            f"{copies} copies without the exchange between devices; measured elsewhere: two copies "
            "3,216 tokens/s, two devices together 1,560",
        ),
        ruled_out=(
            RuledOut(
                "healthy",
                f"Requests wait in {percent(waiting)} of the time: throughput is what they wait "
                "for.",
            ),
        ),
        risk="One request alone gets slower, and each copy has a prefix cache of its own.",
        verify="The sum of gen throughput over the copies exceeds today's.",
        falsify="The time between tokens of single requests is what matters here.",
    )


CHECK = Check(
    cause="parallelism-suboptimal",
    title="Copies of the model would generate more than tensor parallelism",
    find=find,
    meaning="Tensor parallelism splits every layer over several devices, which exchange results "
    "twice in each layer. It is needed when the weights do not fit one device, and it makes single "
    "requests faster. Where throughput matters and the model fits, copies share nothing and wait "
    "for nobody.",
    rule=f"Requests wait in at least half of the loaded time, --tp-size is 2 or more without data "
    f"parallelism, and all weights together take at most {percent(FITS)} of fewer devices.",
    counter_evidence="Without a queue, latency may be the aim. Experts in parallel and attention "
    "data parallelism have reasons of their own.",
    guide="All guides: when there is enough memory, always favour data parallelism for throughput, "
    "with the router rather than --dp-size.",
    equation="value = the smallest power of two with weights x tp / value <= 0.35 x device",
    picture="""\
--tp-size 2          [half of each layer] <-> [half of each layer]
two copies           [whole model]            [whole model]""",
)
