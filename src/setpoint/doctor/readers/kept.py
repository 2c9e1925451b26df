"""Makes observations from the moments that Setpoint's own engines keep: of a running server, of a
recording, or of the server that this code runs in."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from setpoint.core.control import TierState
from setpoint.core.moments import Moment
from setpoint.doctor.observations import (
    Event,
    EventKind,
    Facts,
    Observations,
    Rank,
    Source,
)
from setpoint.doctor.readers.info import facts_of

MAX_EVENTS = 64
"""Most events of a kind that are kept."""


def live_observations(
    info: Mapping[str, Any],
    moments: Iterable[Moment],
    *,
    name: str,
    death: str = "",
    note: str = "",
    tiers: TierState | None = None,
) -> Observations:
    """The observations of a server that is running, or has just ended. info: its ``/server_info``,
    with or without the present state. name: its name in the report. death: why its engine has
    ended, if it has. note: what the user should know about these moments. tiers: what its cache
    tiers have done, if it has some."""
    facts = facts_of(info, engine="setpoint")
    end = f"The engine has ended: {death}" if death else ""
    notes = [each for each in (end, note) if each]
    seen = rank_observations(facts, moments, name=name, kind="live", notes=notes)
    seen.tiers = () if tiers is None else (tiers,)
    if death:
        (rank,) = seen.ranks
        at = rank.moments[-1].at + rank.moments[-1].seconds if rank.moments else None
        rank.events.append(Event("killed", at, 0, end))
        rank.num_events["killed"] = 1
        seen.ended = True
    return seen


def together(seen: Mapping[int, Observations]) -> Observations:
    """The observations of a server with several engines, from those of each, by rank. The facts are
    those of the first, as the engines of a server are alike."""
    if len(seen) == 1:
        return next(iter(seen.values()))
    first = next(iter(seen.values()))
    for number, each in seen.items():
        for rank in each.ranks:
            rank.name = f"DP{number}"
        if each is not first:
            first.ranks += each.ranks
            first.tiers += each.tiers
    first.sources[0].notes = [
        f"DP{number}: {note}" for number, each in seen.items() for note in [*each.sources[0].notes]
    ]
    return first


def rank_observations(
    facts: Facts,
    moments: Iterable[Moment],
    *,
    name: str,
    kind: Literal["live", "server", "recording"],
    notes: Sequence[str] = (),
) -> Observations:
    """The observations of one rank with these moments, and the events that they show."""
    told = [_with_sentence(moment) for moment in moments]
    source = Source(
        name=name,
        kind=kind,
        generation=f"Setpoint {facts.version}" if facts.version else "Setpoint",
        notes=list(notes),
    )
    rank = Rank(name="", moments=told)
    for moment in told:
        add_events(rank, moment)
    return Observations(sources=[source], facts=facts, ranks=[rank])


_REASONS = {
    "no_slot": "the limit on running requests is reached",
    "no_memory": "the KV pool has no room for them",
    "token_budget": "the prefill batch is full",
    "chunk_budget": "the prefill chunk is full",
    "prefill_limit": "the prefill batch has enough prompts",
    "delayed": "admission waits for a larger batch",
    "decode_turn": "it is the turn of decode",
}
"""The admission's reasons (core.records.AdmissionRefusal) in words. "blocked" only repeats the
reason of the first request."""


def sentence(moment: Moment) -> str:
    """The figures of a moment in words, as evidence."""
    figures = []
    if moment.running is not None:
        figures.append(f"{moment.running:.1f} requests run")
    if moment.queue is not None:
        figures.append(f"{moment.queue:.1f} wait")
    if moment.usage is not None:
        figures.append(f"{100 * moment.usage:.0f} % of the KV pool in use")
    if moment.gen_throughput:
        figures.append(f"{moment.gen_throughput:,.1f} output tokens/s")
    if moment.new_tokens:
        figures.append(f"{moment.new_tokens:,} prompt tokens computed")
    if moment.cached_tokens:
        figures.append(f"{moment.cached_tokens:,} found in the prefix cache")
    if moment.retracted:
        figures.append(f"{moment.retracted:,} requests retracted")
    why = sorted(moment.refusals.items(), key=lambda each: -each[1])
    reasons = [_REASONS[name] for name, _ in why if name in _REASONS][:2]
    if reasons:
        figures.append(f"requests wait because {' and because '.join(reasons)}")
    clock = time.strftime("%H:%M:%S", time.localtime(moment.at))
    return f"{clock}, {moment.seconds:.1f} s: {', '.join(figures) or 'nothing happened'}"


def _with_sentence(moment: Moment) -> Moment:
    return moment if moment.text else msgspec.structs.replace(moment, text=sentence(moment))


def add_events(rank: Rank, moment: Moment) -> None:
    if moment.retractions:
        values: dict[str, float | str] = {"num": float(moment.retracted), **moment.other}
        text = f"The KV pool was full, and requests were retracted: {moment.retracted}."
        _add(rank, "retraction", moment, text, moment.retractions, values)
    for how, count in moment.ended.items():
        kind = _ENDS.get(how)
        if kind is not None:
            _add(rank, kind, moment, f"Requests that ended with {how}: {count}.", count, {})


_ENDS: dict[str, EventKind] = {"abort": "aborted", "500": "access-error", "503": "queue-full"}
"""How a request ended -> the kind of event. 503: the queue was full, or the request waited too long
in it."""


def _add(
    rank: Rank,
    kind: EventKind,
    moment: Moment,
    text: str,
    count: int,
    values: dict[str, float | str],
) -> None:
    known = rank.num_events.get(kind, 0)
    rank.num_events[kind] = known + count
    if known < MAX_EVENTS:
        rank.events.append(Event(kind, moment.at, 0, text, values))
