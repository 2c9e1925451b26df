"""Questions of several checks about the memory of a device. Sizes are in GB (2^30 bytes)."""

from __future__ import annotations

from setpoint.core.moments import Moment
from setpoint.doctor.case import Case
from setpoint.doctor.checks.common import change, events, survived
from setpoint.doctor.findings import Action
from setpoint.doctor.load import Test
from setpoint.doctor.observations import Event

GUIDE_DEVICE_GB = 80.0
"""The device that the guides' figures are about."""
WANTED_FREE_GB = 6.5
"""The middle of the 5 to 8 GB that the guides want free when the server is ready."""
LOGITS_MIB = 10.0
"""Largest allocation of a decode step, for each running request: the logits of a vocabulary of
260,000 tokens in 32-bit floats take 1 MiB, and ten times as much with ten tokens of speculation."""
LEAST_MIB = 64.0
PROMPT_TOKEN_MIB = 1.5
"""Memory that a prefill may ask for at a time, for each of its tokens: all of its activations."""
SURVIVES_S = 30.0
"""Decode batches this long after a failed allocation show that the server survived it."""
MAX_FRACTION = 0.97
MIN_FRACTION = 0.3


def total_gb(case: Case) -> float | None:
    """The memory of one device: as a line says, else the sum of what is known to be on it."""
    facts = case.facts
    for event in events(case, "oom"):
        if isinstance(total := event.values.get("total_mib"), float) and total > 0:
            return total / 1024
    if facts.total_gb is not None:
        return facts.total_gb
    parts = (facts.weights_gb, facts.kv_gb, facts.available_gb)
    if any(part is None for part in parts):
        return None
    return sum(part or 0.0 for part in parts) + (facts.graph_gb or 0.0)


def scaled(figure_gb: float, total: float | None) -> float:
    """A figure of the guides for a device of this size, proportionally smaller on smaller ones."""
    return figure_gb if total is None else figure_gb * min(total / GUIDE_DEVICE_GB, 1.0)


def fraction(case: Case) -> float | None:
    """--mem-fraction-static as it was given or chosen, else the share of weights and pool."""
    given = case.number("mem_fraction_static")
    if given is not None and 0 < given < 1:
        return given
    facts, total = case.facts, total_gb(case)
    if total and facts.weights_gb is not None and facts.kv_gb is not None:
        return round(min((facts.weights_gb + facts.kv_gb) / total, 0.99), 3)
    return None


def fraction_that_leaves(case: Case, free_gb: float) -> float | None:
    """The --mem-fraction-static with which this much is free when the server is ready: every GB is
    1 / total of the fraction."""
    present, total, available = fraction(case), total_gb(case), case.facts.available_gb
    if present is None or not total or available is None:
        return None
    return within(present + (available - free_gb) / total)


def within(value: float) -> float:
    return round(min(max(value, MIN_FRACTION), MAX_FRACTION), 2)


def ooms(case: Case, *places: str) -> list[Event]:
    """The failed allocations in these places, in the order of the log. Those that the server
    survived do not count: it went on to decode for SURVIVES_S seconds or more."""
    found = [event for event in events(case, "oom") if place_of(case, event) in places]
    found = [event for event in found if not survived(case, event, SURVIVES_S)]
    return sorted(found, key=lambda event: event.line)


def place_of(case: Case, event: Event) -> str:
    """Where an allocation failed: as the message or its traceback says. If only the order of the
    lines tells, the size is a witness as well: a decode step asks for the logits of its requests,
    and a newer server writes the line about a prefill after it, so that the line of the prefill
    that failed is missing. An older one wrote that line first, so that the prefill can only be the
    last one that is there."""
    where = str(event.values.get("where", ""))
    tried, ran = event.values.get("tried_mib"), running_before(case, event)
    if where != "decode" or event.values.get("by") != "order" or ran is None:
        return where
    if not isinstance(tried, float) or tried <= max(LOGITS_MIB * ran, LEAST_MIB):
        return where
    return "prefill" if _may_be_prefill(case, event, tried) else where


def _may_be_prefill(case: Case, event: Event, tried: float) -> bool:
    """Whether a prefill may have asked for so much: one whose line is missing, or the last one."""
    last = _last(case, event, lambda moment: moment.num_prefill > 0)
    written = [source.generation for source in case.seen.sources]
    is_old = any("2024" in name or "2025" in name for name in written)
    if not is_old:
        return True
    return last is not None and last.largest_prefill * PROMPT_TOKEN_MIB >= tried


def running_before(case: Case, event: Event) -> float | None:
    """The running requests in the last decode line before the error, or in the last one of all."""
    last = last_decode(case, event)
    if last is None:
        moments = [moment for rank in case.ranks for moment in rank.moments if moment.num_decode]
        last = max(moments, key=lambda moment: moment.line, default=None)
    return None if last is None else last.running_max or last.running


def last_decode(case: Case, event: Event) -> Moment | None:
    return _last(case, event, lambda moment: moment.num_decode > 0)


def _last(case: Case, event: Event, test: Test) -> Moment | None:
    moments = [
        moment
        for rank in case.ranks
        for moment in rank.moments
        if test(moment) and moment.line < event.line
    ]
    return max(moments, key=lambda moment: moment.line, default=None)


def first_oom(case: Case, *places: str) -> tuple[Event, str] | None:
    """The first allocation that failed in one of these places, and "an allocation of 0.76 GB"."""
    found = ooms(case, *places)
    if not found:
        return None
    size = tried_gb(found[0])
    return found[0], "an allocation" + ("" if size is None else f" of {size:.2f} GB")


def tried_gb(event: Event) -> float | None:
    tried = event.values.get("tried_mib")
    return tried / 1024 if isinstance(tried, float) else None


def lower_fraction(case: Case, by_gb: float, rest: str) -> Action:
    """The action that takes memory from the pool. rest: the end of its sentence."""
    present, total = fraction(case), total_gb(case)
    value = None
    if present is not None:
        step = max(by_gb / total if total else 0.05, 0.02)
        value = min(within(present - step), round(present - 0.01, 2))
    flag = "--mem-fraction-static"
    lower = f"Lower {flag}" if value is None else change("decrease", flag, value, present)
    return Action(f"{lower}{rest}", flag, "decrease", value)


def larger_workspace(flag: str) -> Action:
    """The action if FlashInfer's workspace is full. flag: the option that makes its use smaller."""
    return Action(
        "Give FlashInfer's workspace more room (SGLANG_FLASHINFER_WORKSPACE_SIZE, in bytes; twice "
        f"the failed size is a good start), or lower {flag}. It is a buffer of a fixed size: the "
        "memory of the device has not run out."
    )


def is_held_small(case: Case) -> bool:
    """Whether --max-total-tokens limits the pool, and not the memory."""
    asked, tokens = case.number("max_total_tokens"), case.facts.max_total_num_tokens
    return bool(asked and tokens and tokens >= 0.98 * asked)
