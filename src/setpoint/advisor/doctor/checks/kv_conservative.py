"""kv-conservative: the reserve for outputs that may still come keeps requests out."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import (
    confidence,
    counted,
    per_minute,
    percent,
    quote,
    said,
    throughput_effect,
)
from setpoint.advisor.doctor.checks.kv_optimistic import retracts_often
from setpoint.advisor.doctor.equations import MIN_CONSERVATIVENESS, conservativeness_for
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.limits import FULL, at_budget, binding_limit
from setpoint.advisor.doctor.load import Load

MIN_SHARE = 0.5
"""Share of the loaded time in which only the reserve is left as the reason."""

CLEARLY_FREE = 0.85
"""From this usage on, what is held back is hardly worth a change."""
FEW = 0.05
"""Waiting requests for each running one below which letting them in changes nothing."""


def find(case: Case) -> Finding | None:
    if not case.has_load or case.limits.prefill_bound or retracts_often(case):
        return None
    held = case.decoding.where(
        lambda moment: binding_limit(moment, case.limits) == "kv-conservative"
    )
    share = sum(held.weights) / (sum(case.decoding.weights) or 1.0)
    usage = held.median(lambda moment: moment.usage)
    running = held.median(lambda moment: moment.running)
    if share < MIN_SHARE or usage is None or not running:
        return None
    queue = held.median(lambda moment: moment.queue) or 1.0
    if queue < FEW * running or usage >= CLEARLY_FREE:
        return None
    present = case.conservativeness
    value, growth = conservativeness_for(present, usage, running, queue)
    return Finding(
        cause="kv-conservative",
        confidence=confidence(case, share, held, 0.93),
        summary=f"The reserve for future outputs keeps requests out: about {queue:.0f} wait in "
        f"{percent(share)} of the loaded time although only {percent(usage)} of the KV pool is "
        "used.",
        evidence=quote(held) + said(case, "schedule_conservativeness", "max_running_requests"),
        action=_action(present, value),
        effect=throughput_effect(case, running, growth),
        ruled_out=_alternatives(case, held, running),
        risk="If outputs turn out longer than expected, the pool fills up and running requests are "
        "retracted; about one a minute costs little.",
        verify="Usage rises above 0.9, #queue-req falls, and retractions stay at about one a "
        "minute or fewer.",
        falsify="Usage does not move within some hundred decode steps: then something else keeps "
        "requests out, such as slots for adapters, or single requests with a huge max_new_tokens.",
        share=round(share, 3),
    )


def _action(present: float, value: float) -> Action:
    if present <= MIN_CONSERVATIVENESS:
        return Action(
            "Let the clients ask for a smaller max_new_tokens: --schedule-conservativeness is at "
            f"{present:g} already, and each waiting request is still charged its whole "
            "max_new_tokens (up to 4096) before it may run."
        )
    return Action(
        f"Start the server with --schedule-conservativeness {value:g} (now {present:g}).",
        "--schedule-conservativeness",
        "decrease",
        value,
        live=True,
    )


def _alternatives(case: Case, held: Load, running: float) -> tuple[RuledOut, ...]:
    why = []
    if case.limits.slots:
        why.append(
            RuledOut("seq-cap", f"About {running:.0f} of {case.limits.slots:.0f} slots are used.")
        )
    else:
        different = len({moment.running for moment in held.moments})
        why.append(
            RuledOut(
                "seq-cap",
                f"No cap is known, and the running requests do not stand at one number: "
                f"{counted(different, 'value')} in {counted(len(held), 'moment')}.",
            )
        )
    full = case.load.share(lambda moment: at_budget(moment, case.limits))
    why.append(
        RuledOut(
            "prefill-budget",
            f"Prefill batches at their budget make {percent(full)} of the time; decode steps run "
            "between them, which they do only if no request can be admitted.",
        )
    )
    high = held.share(lambda moment: (moment.usage or 0.0) >= FULL)
    why.append(RuledOut("kv-full", f"Usage is 0.9 or more in {percent(high)} of that time."))
    why.append(RuledOut("kv-optimistic", f"There are {per_minute(case)}."))
    return tuple(why)


CHECK = Check(
    cause="kv-conservative",
    title="The reserve for future outputs keeps requests out",
    find=find,
    meaning="Before a request is admitted, the scheduler sets memory aside for what the running "
    "requests may still generate: their max_new_tokens less what they have, times an estimate of "
    "how much of it they will use (the new-token ratio). Clients often ask for a large "
    "max_new_tokens and stop early. Then the reserve is never used: memory is free, requests wait.",
    rule="In at least half of the loaded time requests wait (one for 20 running ones, or "
    "more), usage is below 0.9 (median below 0.85), an average request more would fit, the running "
    "requests are below their cap, prefill batches are not at their budget, and there is at most "
    "about one retraction a minute.",
    counter_evidence="Low usage with a queue has other causes, which are looked at first: the cap "
    "of running requests, also one that was silently lowered or that no line names (seq-cap); the "
    "budget of prefill batches (prefill-budget); one long prompt at a time (long-prompt-blocking); "
    "grammars that are being compiled; a further pool, of sliding windows or of states, that is "
    "full; a retraction a short time ago, which has set the estimate anew; and the ramp of a load.",
    guide="SGLang's tuning guides of all years: if token usage < 0.9 and #queue-req > 0 "
    "frequently, the server is too conservative about taking in new requests; lower "
    "--schedule-conservativeness to a value like 0.3. It happens when many requests have a large "
    "max_new_tokens and stop early because of EOS or stop strings.",
    equation="free = 1 - usage is the reserve; it grows with c and with the running requests. "
    "With f times as many of them (f = 0.93 / usage, or what the queue has): "
    "c' = c x (1 - f x usage) / (f x (1 - usage)), between 0.1 and 0.9 c. "
    "Example: usage 0.82, c = 1: f = 1.13, c' = 0.34.",
    picture="""\
KV pool  [################################::::::::::::::::::::::::::::]
          in use 0.55                     reserved for max_new_tokens
          waiting: 120 requests, because nothing is left to promise""",
)
