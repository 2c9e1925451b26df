"""kv-conservative: the memory reserve for future output keeps requests out."""

from __future__ import annotations

import itertools

from setpoint.doctor.binding_limit import FULL, at_budget, binding_limit
from setpoint.doctor.case import Case, trades_memory
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    acting,
    change,
    confidence,
    counted,
    during,
    fixed_share_of,
    lines_on,
    per_minute,
    percent,
    quote,
    throughput_effect,
)
from setpoint.doctor.checks.kv_optimistic import retracts_often
from setpoint.doctor.checks.memory import is_held_small
from setpoint.doctor.checks.prefix_miss import switched_off
from setpoint.doctor.equations import MIN_CONSERVATIVENESS, conservativeness_for
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.load import Load

MIN_SHARE = 0.5
"""Least share of the loaded time in which only the reserve explains the queue."""

CLEARLY_FREE = 0.85
"""From this usage on, what is held back is hardly worth a change."""
PEAKS = 0.1
"""Share of the time in which the reserve is in use, if it is needed at all."""
FEW = 0.15
"""With fewer waiting requests for each running one, letting them in would change nothing."""
MIN_EXCERPT, MIN_NAMED = 6, 4
"""Least number of decode lines of an excerpt, if no line names the cap, and if one does."""
MIN_SPREAD = 0.04
"""If no line names the cap, the number of running requests must vary by at least this share of the
largest …"""
MIN_STEPS = 0.2
"""… and in at least this share of the lines."""


def find(case: Case) -> Finding | None:
    if not case.has_load or case.limits.prefill_bound or retracts_often(case):
        return None
    held = case.decoding.where(
        lambda moment: binding_limit(moment, case.limits) == "kv-conservative"
    )
    share = sum(held.weights) / (sum(case.decoding.weights) or 1.0)
    usage = held.median(lambda moment: moment.usage)
    running = held.median(lambda moment: moment.running)
    if share < MIN_SHARE or usage is None or not running or not _varies(case, held):
        return None
    if case.option("disable_radix_cache") is True and switched_off(case) is not None:
        return None  # each request waits for a prompt that a cache would hold: prefix-miss
    queue = held.median(lambda moment: moment.queue) or 1.0
    if queue < FEW * running or usage >= CLEARLY_FREE or is_used_up(case):
        return None
    present = case.conservativeness
    value, growth = conservativeness_for(present, usage, running, queue)
    return Finding(
        cause="kv-conservative",
        confidence=confidence(case, share, held, 0.93),
        summary=f"The memory reserve for future output keeps requests waiting: {during(share)}, "
        f"about {acting(queue, 'request', 'wait')} although only {percent(usage)} of the "
        "KV pool is in use.",
        evidence=quote(held) + lines_on(case, "schedule_conservativeness", "max_running_requests"),
        action=_action(present, value),
        effect=throughput_effect(fixed_share_of(case, running), growth),
        ruled_out=_alternatives(case, held, running),
        risk="If outputs are longer than expected, the KV pool fills up and running requests are "
        "retracted: they go back to the queue and are computed again. About one retraction a "
        "minute costs little.",
        verify="KV pool usage (token usage) rises above 0.9, the queue (#queue-req) shrinks, and "
        "there is at most about one retraction a minute.",
        falsify="KV pool usage (token usage) does not rise within a few hundred decode steps. Then "
        "something else keeps requests waiting, such as the limit on loaded adapters, or single "
        "requests with a huge max_new_tokens.",
        share=round(share, 3),
    )


def is_used_up(case: Case) -> bool:
    """Whether the running requests come to need what was reserved for them: usage goes up and down
    as many of them begin and end together, and with a smaller reserve the pool would overflow."""
    return (peak_usage(case) or 0.0) >= FULL


def peak_usage(case: Case) -> float | None:
    """The usage that the tops of its waves reach. Of a pool that an option keeps small the highest
    counts, however short it lasts: a larger one is a remedy without a risk."""
    share = 0.0 if is_held_small(case) else PEAKS
    return case.decoding.quantile(lambda moment: moment.usage_max or moment.usage, 1 - share)


def _varies(case: Case, held: Load) -> bool:
    """Whether the number of running requests varies, as it does where memory decides. If it is
    constant, a cap that no line names keeps requests out. A few lines do not show which of the two
    it is, unless more requests run whenever fewer tokens are in use."""
    if trades_memory(held):
        return True
    running = [round(moment.running or 0) for moment in held.moments if moment.num_decode]
    if case.is_excerpt and len(running) < (MIN_NAMED if case.slots_named else MIN_EXCERPT):
        return False
    if case.slots_named or case.limits.reasons:
        return True
    steps = sum(one != other for one, other in itertools.pairwise(running))
    return len(running) < 2 or (
        max(running) - min(running) >= MIN_SPREAD * max(running)
        and steps >= MIN_STEPS * len(running)
    )


def _action(present: float, value: float) -> Action:
    if present <= MIN_CONSERVATIVENESS:
        return Action(
            "Have the clients send a smaller max_new_tokens. --schedule-conservativeness is "
            f"already at {present:g}, and before a request may run, the server still reserves all "
            "of its max_new_tokens (up to 4096)."
        )
    return Action(
        change("decrease", "--schedule-conservativeness", value, present) + ".",
        "--schedule-conservativeness",
        "decrease",
        value,
        live=True,
    )


def _alternatives(case: Case, held: Load, running: float) -> tuple[RuledOut, ...]:
    why = []
    if case.limits.slots:
        why.append(
            RuledOut(
                "seq-cap",
                f"About {acting(running, 'request', 'run')}; "
                f"the limit is {case.limits.slots:,.0f}.",
            )
        )
    else:
        different = len({moment.running for moment in held.moments})
        why.append(
            RuledOut(
                "seq-cap",
                "No limit on running requests is known, and their number is not constant: it takes "
                f"{counted(different, 'value')} in {counted(len(held), 'moment')}.",
            )
        )
    full = case.load.share(lambda moment: at_budget(moment, case.limits))
    why.append(
        RuledOut(
            "prefill-budget",
            f"Prefill batches that fill their token budget take {percent(full)} of the time. "
            "Decode steps run between them, which happens only if no request can be admitted.",
        )
    )
    high = held.share(lambda moment: (moment.usage or 0.0) >= FULL)
    why.append(
        RuledOut(
            "kv-full",
            f"90 % or more of the KV pool is in use for only {percent(high)} of the time.",
        )
    )
    why.append(RuledOut("kv-optimistic", f"There are {per_minute(case)}."))
    return tuple(why)


CHECK = Check(
    cause="kv-conservative",
    title="The memory reserve for future output keeps requests waiting",
    find=find,
    meaning="Before the scheduler admits a request, it reserves memory for what the running "
    "requests may still generate: the rest of their max_new_tokens, times an estimate of how much "
    "of it they will use (the new-token ratio). Clients often ask for a large max_new_tokens and "
    "stop early. Then most of the reserve is never used: memory is free, and yet requests wait.",
    rule="For at least half of the time under load, requests wait (at least 15 for every 100 that "
    "run), less than 90 % of the KV pool is in use (median below 85 %), one more average request "
    "would fit, fewer requests run than the limit allows, prefill batches do not fill their token "
    "budget, usage does not reach 90 % for a tenth of the time, or at all if "
    "--max-total-tokens keeps the pool small (then the reserve is needed), and there is at most "
    "about one retraction a minute. If no line names the limit on running requests, their number "
    "must vary: one that stands still is a limit (seq-cap). In an "
    "excerpt, at least six decode lines must show this (four, if the limit is named), or more "
    "requests run whenever fewer tokens are in use: what is in use and what is reserved then add "
    "up to the same sum.",
    counter_evidence="A queue beside a KV pool with room has other causes, which are checked "
    "first: the limit on running requests, even if the server lowered it silently or no line names "
    "it (seq-cap); the token budget of prefill batches (prefill-budget); a long prompt that blocks "
    "others (long-prompt-blocking); grammars that are being compiled (grammar-queue); a second "
    "memory pool that is full (other-pool-full); a recent retraction, which raised the estimate; "
    "and a load that is still ramping up.",
    advice="Lower --schedule-conservativeness, with the value; at its minimum, have the "
    "clients send a smaller max_new_tokens.",
    guide="SGLang's tuning guides of all years: if token usage < 0.9 and #queue-req > 0 are "
    "frequent, the server is too cautious about admitting requests; lower "
    "--schedule-conservativeness to a value such as 0.3. This happens when many requests ask for a "
    "large max_new_tokens but stop early at EOS or a stop string.",
    equation="The free share of the pool, 1 - usage, is the reserve. It is proportional to the "
    "conservativeness c and to the running requests. To run f times as many of them (f = 0.93 / "
    "usage, or as many as wait): c' = c x (1 - f x usage) / (f x (1 - usage)), between 0.1 and "
    "0.9 c. Example: usage 0.82 and c = 1 give f = 1.13 and c' = 0.34.",
    picture="""\
KV pool  [################################::::::::::::::::::::::::::::]
          55 % in use                     reserved for max_new_tokens
          120 requests wait: all of the rest is reserved""",
)
