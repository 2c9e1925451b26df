"""prefill-budget: prompts wait for room in prefill batches."""

from __future__ import annotations

from typing import TypedDict

from setpoint.doctor.binding_limit import FULL, at_budget, binding_limit
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    acting,
    change,
    confidence,
    during,
    estimate,
    lines_on,
    per_minute,
    percent,
    quote,
    whole,
)
from setpoint.doctor.checks.long_prompts import (
    STALLED,
    chunks_of_one,
    is_full_chunk,
    stalling_chunks,
)
from setpoint.doctor.checks.memory import lower_fraction, scaled, total_gb
from setpoint.doctor.checks.prompts import is_cut
from setpoint.doctor.equations import PREFILL_KEPT_GB, prefill_size_for
from setpoint.doctor.findings import Action, Effect, Finding, RuledOut
from setpoint.doctor.load import Load
from setpoint.doctor.phases import waits
from setpoint.doctor.step_times import chunk_gains

MIN_SHARE = 0.4
MOST = 0.8
"""Share of the loaded time that full prefill batches take if decode starves …"""
STARVED = 3
"""… and how many of them there are for each line about decode steps."""
MIN_STALLED = 0.5
"""Least share of the loaded time if no request waits …"""
CPU_CHUNK = 256
"""From so many tokens on, a larger chunk does not compute faster on a CPU (docs/kernels.md)."""
LEAST_CHUNK = 128
"""No smaller chunk is advised: its fixed cost would show."""
MIN_FULL = 10
"""… and least number of full batches."""


class Outlook(TypedDict):
    """What an action risks, how to see that it helped, and what would show that it cannot."""

    risk: str
    verify: str
    falsify: str


CHUNK_WHY = (
    "each chunk reads the weights once, and a decode step follows most chunks of long prompts: "
    "fewer chunks have less of both"
)
LARGER = Outlook(
    risk="Larger prefill batches need more memory for activations (about 1.5 MB per token), and "
    "running requests wait longer for their next token while one is computed.",
    verify="Prefill lines show the new budget (#new-token), input throughput rises, and the queue "
    "(#queue-req) shrinks.",
    falsify="Input throughput stays the same with larger batches. Then the device already computes "
    "as fast as it can, and only more devices help.",
)
SMALLER = Outlook(
    risk="Long prompts take somewhat longer: each chunk has a fixed cost, and a decode step after "
    "it.",
    verify="The 99th percentile of the time between tokens falls.",
    falsify="Streams pause as long as before, so it is not chunks that they wait for.",
)
NO_OPTION = Outlook(
    risk="8-bit weights change answers a little.",
    verify="Input throughput rises, and requests wait less for their first token.",
    falsify="Requests wait just as long for their first token.",
)


def find(case: Case) -> Finding | None:
    if not case.has_load:
        return None
    bound = case.load.where(lambda moment: binding_limit(moment, case.limits) == "prefill-budget")
    share = sum(bound.weights) / (sum(case.load.weights) or 1.0)
    is_queue = share >= MIN_SHARE
    if not is_queue:
        bound, share = stalling(case)
    usage = case.decoding.median(lambda moment: moment.usage)
    is_full_pool = usage is not None and usage >= FULL
    if not share or (is_full_pool and _decodes(case) and not starves(case)):
        return None
    full = bound.where(lambda moment: at_budget(moment, case.limits))
    blocking, _ = chunks_of_one(case)
    if not is_queue:
        blocking, _ = stalling_chunks(case)
    if len(blocking) > 0.5 * len(full) > 0:
        return None
    action = prefill_action(case, stalls=not is_queue)
    queue = bound.median(lambda moment: moment.queue) or 1.0
    running = bound.median(lambda moment: moment.running) or 1.0
    size = case.limits.prefill_tokens
    full_at = (
        f"prefill batches are full ({size:,.0f} tokens)" if size else "prefill batches are full"
    )
    held_up = (
        f"about {acting(queue, 'request', 'wait')}"
        if is_queue
        else f"about {acting(running, 'running request', 'wait')} for the next token"
    )
    return Finding(
        cause="prefill-budget",
        confidence=confidence(case, min(1.0, share + 0.1), bound, 0.93 if is_queue else 0.8),
        summary=f"Prompts wait for room in prefill batches: {during(share)}, {full_at} and "
        f"{held_up}.",
        evidence=quote(full if len(full) else bound)
        + lines_on(case, "chunked_prefill_size", "max_prefill_tokens"),
        action=action,
        effect=prefill_effect(case, action),
        ruled_out=_alternatives(case, usage),
        share=round(share, 3),
        **outlook(action, LARGER),
    )


def stalling(case: Case) -> tuple[Load, float]:
    """The full prefill batches that take most of the time although no request waits (running ones
    stand still, and more requests would only wait), and their share of the time; 0 if they do not
    take most of it."""
    full = case.load.where(
        lambda moment: is_cut(moment, case) and (moment.running or 0.0) >= STALLED
    )
    share = sum(full.weights) / (sum(case.load.weights) or 1.0)
    return full, share if share >= MIN_STALLED and len(full) >= MIN_FULL else 0.0


def starves(case: Case) -> bool:
    """Whether full prefill batches take nearly all of the time while many requests run: between two
    decode lines, each of which stands for many steps, come several of them. Memory lets them in,
    whatever the usage is, and the running requests get next to no tokens."""
    full = case.load.where(
        lambda moment: (
            at_budget(moment, case.limits)
            and moment.new_seqs >= 2 * moment.num_prefill
            and (moment.running or 0.0) >= STALLED
            and waits(moment)
        )
    )
    share = sum(full.weights) / (sum(case.load.weights) or 1.0)
    num_decode = sum(moment.num_decode for moment in case.load.moments if not moment.num_prefill)
    is_logged = all(moment.line for moment in full.moments)
    return is_logged and share >= MOST and len(full) >= max(STARVED * num_decode, MIN_FULL)


def _decodes(case: Case) -> bool:
    """Whether decode steps have a part of the time. One runs only if no request can be admitted: at
    a full pool they show that memory is what lacks, and without them the budget is. So does a
    batch with room, in which a prompt ends and the next may not begin. How many chunks a prompt
    has shows neither."""
    telling = case.load.where(lambda moment: not is_full_chunk(moment, case))
    lacking = telling.where(
        lambda moment: moment.num_prefill == 0 or not at_budget(moment, case.limits)
    )
    return len(lacking) > 0.1 * len(telling)


def prefill_action(case: Case, *, stalls: bool = False) -> Action:
    """Raise the budget that binds, or make room for that if no memory is left for it. stalls: no
    request waits, but running ones do for their next token."""
    if case.facts.engine == "setpoint" and case.facts.device == "cpu":
        found = _on_our_cpu(case, stalls=stalls)
        if found is not None:
            return found
    chunk = case.facts.chunked_prefill_size
    chunk = chunk if chunk is not None else whole(case.number("chunked_prefill_size"))
    most = case.facts.max_prefill_tokens
    most = most if most is not None else whole(case.number("max_prefill_tokens"))
    per_batch = case.number("prefill_max_requests")
    seqs = case.load.quantile(lambda m: m.new_seqs / m.num_prefill if m.num_prefill else None, 0.5)
    if per_batch and seqs and seqs >= 0.9 * per_batch:
        return _raise("--prefill-max-requests", per_batch, int(2 * per_batch))
    size = case.limits.prefill_tokens or (chunk if chunk and chunk > 0 else most) or 8192
    waiting = case.load.median(lambda moment: moment.pending_tokens)
    kept = scaled(PREFILL_KEPT_GB, total_gb(case))
    value = prefill_size_for(size, waiting, case.facts.available_gb, kept)
    if value is None:
        first = f", because only {case.facts.available_gb:.2f} GB are free: larger prefill batches "
        return lower_fraction(case, kept, f"{first}need memory for activations.")
    by_total = most is not None and (chunk is None or chunk <= 0 or most < chunk)
    if by_total or _refused_by(case, "token_budget") > _refused_by(case, "chunk_budget"):
        return _raise("--max-prefill-tokens", size, value)
    start = case.facts.start_values.get("chunked_prefill_size")
    if isinstance(start, int) and start > size:
        text = change("increase", "--chunked-prefill-size", start, size)
        return Action(
            f"{text}, the value that the server started with: memory is planned for it.",
            "--chunked-prefill-size",
            "increase",
            start,
            live=True,
        )
    action = _raise("--chunked-prefill-size", size, value)
    if most is not None and most < value:
        note = f" Raise --max-prefill-tokens to {value} as well, or it becomes the next limit."
        return Action(
            action.text + note, action.flag, action.direction, action.value, live=action.live
        )
    return action


def _on_our_cpu(case: Case, *, stalls: bool) -> Action | None:
    """What helps where larger batches compute no faster, and a decode step follows each chunk of a
    long prompt; None if batches are so small that larger ones would."""
    size = case.limits.prefill_tokens
    if not size or size < CPU_CHUNK:
        return None
    flag = "--chunked-prefill-size"
    if stalls and size >= 2 * LEAST_CHUNK:
        value = int(size / 2)
        text = f"{change('decrease', flag, value, size)}: a decode step follows each chunk."
        return Action(text, flag, "decrease", value, live=True)
    return Action(
        "Give the server more cores, or 8-bit weights (--quantization w8a8_int8), or send it fewer "
        "prompt tokens: on a CPU larger prefill batches compute no faster."
    )


def _raise(flag: str, present: float, value: int) -> Action:
    text = change("increase", flag, value, present) + "."
    # A larger chunk needs memory that is planned at the start.
    return Action(text, flag, "increase", value, live=flag != "--chunked-prefill-size")


def _refused_by(case: Case, reason: str) -> int:
    return sum(moment.refusals.get(reason, 0) for moment in case.load.moments)


def prefill_effect(case: Case, action: Action) -> Effect | None:
    size, value = case.limits.prefill_tokens, action.value
    if action.direction == "increase" and case.facts.device == "cpu" and size and value:
        low, expected, high = chunk_gains(size, value)
        return estimate("input throughput", low, expected, high, CHUNK_WHY)
    if action.direction == "increase":
        return estimate(
            "input throughput",
            1.0,
            1.1,
            1.5,
            "each token costs the device the same in a larger batch; only the fixed cost of each "
            "step is saved (chunks four times as large gave about 10 % in sglang#29358)",
        )
    return smaller_effect(action)


def smaller_effect(action: Action) -> Effect | None:
    """The effect of smaller chunks; None if the action is another one."""
    if action.direction != "decrease" or action.flag != "--chunked-prefill-size":
        return None
    return estimate(
        "longest time between the tokens of a stream",
        0.4,
        0.55,
        0.8,
        "a stream waits for one chunk at a time, and half the tokens take about half as long (256 "
        "instead of 512 tokens gave 0.57 of it on two cores)",
    )


def outlook(action: Action, larger: Outlook) -> Outlook:
    """What to expect of an action about the size of chunks. larger: of larger ones."""
    if action.flag is None:
        return NO_OPTION
    return SMALLER if action.direction == "decrease" and action.live else larger


def _alternatives(case: Case, usage: float | None) -> tuple[RuledOut, ...]:
    why = []
    running = case.decoding.median(lambda moment: moment.running)
    if case.limits.slots and running is not None:
        why.append(
            RuledOut(
                "seq-cap",
                f"About {acting(running, 'request', 'run')}; "
                f"the limit is {case.limits.slots:,.0f}.",
            )
        )
    if usage is not None:
        why.append(RuledOut("kv-full", f"{percent(usage)} of the KV pool is in use (median)."))
    prefills = case.load.where(lambda moment: moment.num_prefill > 0)
    full = prefills.where(lambda moment: at_budget(moment, case.limits))
    why.append(
        RuledOut(
            "kv-conservative",
            f"{len(full):,} of {len(prefills):,} prefill batches are full. If the memory reserve "
            "kept requests out, they would be small.",
        )
    )
    blocking, _ = chunks_of_one(case)
    why.append(
        RuledOut(
            "long-prompt-blocking",
            f"{len(blocking):,} prefill batches are chunks of a single prompt.",
        )
    )
    why.append(RuledOut("kv-optimistic", f"There are {per_minute(case)}."))
    return tuple(why)


CHECK = Check(
    cause="prefill-budget",
    title="Prompts wait for room in prefill batches",
    find=find,
    meaning="A prefill batch takes at most --chunked-prefill-size and at most --max-prefill-tokens "
    "prompt tokens: its token budget. So many prompts arrive that every batch is full. Memory is "
    "free and more requests could run, but requests wait for their prompts to be computed. Prefill "
    "goes before decode, so the running requests wait, too.",
    rule="For at least 40 % of the time under load, requests wait while prefill batches use 90 % "
    "or more of their token budget, or lines between such batches show a queue (60 % of the "
    "prefill batches with a queue are full, and there are at least half as many of them as decode "
    "lines), and less than 90 % of the KV pool is in use. Or nobody waits, but at least two "
    "requests run and stand still while full prefill batches take at least half of the time: more "
    "requests from the clients would only wait. Setpoint's own records name the reasons "
    "(token_budget, chunk_budget).",
    counter_evidence="Full batches at the beginning of a load are its ramp. Full batches of a "
    "single prompt are long-prompt-blocking. If most lines are decode lines, something else keeps "
    "requests out, because a decode step runs only if no prefill batch can be formed.",
    advice="Raise the budget that binds, --chunked-prefill-size or --max-prefill-tokens, with "
    "the value; if no memory is free for it, lower --mem-fraction-static first, or add devices. On "
    "a CPU, for a Setpoint server, where larger chunks compute no faster: lower "
    "--chunked-prefill-size if it is running requests that wait, otherwise more cores or 8-bit "
    "weights.",
    guide="SGLang's tuning guide of 2026: compute long prompts in large chunks "
    "(--chunked-prefill-size 16384 for offline batches and long contexts). The older guides name "
    "the option only as a remedy when prefill runs out of memory: lower it to 4096 or 2048.",
    equation="new budget = 2 x the budget (4 x if more than 8 batches wait), but at most 32768, "
    "and at most what the free memory minus 3 GB (in proportion on devices below 80 GB) holds at "
    "1.5 MB per token",
    picture="""\
queue                      prefill batch, budget 8192 tokens
[ aaa bbb ccc ddd ... ] -> [aaaaabbbbbbbbccccccddd|  full every time
                             decode waits meanwhile""",
)
