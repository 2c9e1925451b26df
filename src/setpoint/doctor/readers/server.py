"""Watches a running server of Setpoint, or of SGLang in any version: the moments that it keeps,
else its ``/metrics``, else its loads, which are polled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from setpoint.core.control import TierState
from setpoint.core.conversion import convert
from setpoint.core.errors import SourceError
from setpoint.core.moments import Moment
from setpoint.doctor.observations import Facts, Observations, Rank, Source
from setpoint.doctor.plausible import is_possible
from setpoint.doctor.readers.info import facts_of
from setpoint.doctor.readers.kept import live_observations, sentence
from setpoint.doctor.readers.metrics import watched_metrics
from setpoint.doctor.readers.pages import NotThereError, Pages

EVERY_S = 1.0
Loads = dict[str, Moment]
"""The present moment of each rank, by the rank's name."""


def watch_server(
    url: str, *, seconds: float, past_s: float = 0.0, api_key: str | None
) -> Observations:
    """What the server at this URL does for ``seconds``, and what it remembers of the ``past_s``
    seconds before. Raises SourceError if it cannot be reached or is neither of the two."""
    base = url.rstrip("/")
    with Pages(url, api_key=api_key) as pages:
        if _tells_moments(pages, base):
            return _kept(pages, base, seconds, past_s)
        info = _info(pages, base)
        facts = facts_of(info or {}, engine="sglang")
        try:
            seen = watched_metrics(
                pages, f"{base}/metrics", seconds=seconds, name=base, facts=facts if info else None
            )
        except SourceError:
            return _polled(pages, base, seconds, facts, is_known=info is not None)
        seen.sources[0].kind = "server"
        return seen


def _tells_moments(pages: Pages, base: str) -> bool:
    try:
        answer = pages.json(f"{base}/doctor?seconds=1&moments=true")
    except NotThereError:
        return False
    return isinstance(answer, Mapping) and "moments" in answer


def _kept(pages: Pages, base: str, seconds: float, past_s: float) -> Observations:
    """The observations of a Setpoint server, which keeps its moments: of the next seconds, and of
    those before."""
    time.sleep(seconds)
    answer = pages.json(f"{base}/doctor?seconds={seconds + past_s:g}&moments=true")
    try:
        moments, tiers = convert(answer["moments"], list[Moment]), answer.get("tiers")
        seen = live_observations(
            answer["server_info"],
            moments,
            name=base,
            death=answer["ended"],
            tiers=None if tiers is None else convert(tiers, TierState),
        )
    except (LookupError, TypeError, msgspec.ValidationError) as error:
        raise SourceError(
            f"{base}/doctor has another shape than this version's: {error}."
        ) from None
    seen.sources[0].kind = "server"
    return seen


def _info(pages: Pages, base: str) -> Mapping[str, Any] | None:
    """The answer to ``/server_info`` under its present or its old name; None without one."""
    for path in ("server_info", "get_server_info"):
        try:
            answer = pages.json(f"{base}/{path}")
        except NotThereError:
            continue
        if isinstance(answer, Mapping):
            return answer
    return None


def _polled(
    pages: Pages, base: str, seconds: float, facts: Facts, *, is_known: bool
) -> Observations:
    load = _loads_of(pages, base, facts)
    if load is None:
        what = "and shows no load" if is_known else "and has no /server_info, /metrics or /v1/loads"
        raise SourceError(
            f"{base} answers {what}: it is not a server of SGLang or Setpoint, or an old one that"
            " needs --enable-metrics."
        )
    source = Source(name=base, kind="server", generation=f"SGLang {facts.version or ''}".rstrip())
    source.notes.append(
        "Only the server's load was read, once a second. With --enable-metrics, or from its log, "
        "the doctor sees far more: retractions, prompts and latencies."
    )
    ranks: dict[str, Rank] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.time()
        time.sleep(min(EVERY_S, max(end - time.monotonic(), 0.0)))
        try:
            loads = load()
        except SourceError as error:
            source.notes.append(f"Watching ended early: {error}")
            break
        for name, moment in loads.items():
            moment.at, moment.seconds = began, time.time() - began
            moment.text = sentence(moment)
            ranks.setdefault(name, Rank(name=name)).moments.append(moment)
    if len(ranks) == 1:
        next(iter(ranks.values())).name = ""
    return Observations(sources=[source], facts=facts, ranks=[*ranks.values()])


def _loads_of(pages: Pages, base: str, facts: Facts) -> Callable[[], Loads] | None:
    """A function that asks this server for its loads; None if it has none."""

    def new() -> Loads:
        answer = pages.json(f"{base}/v1/loads")
        return {_rank(load): _load(load) for load in _each(answer["loads"])}

    def old() -> Loads:
        answer = pages.json(f"{base}/get_load")
        answer = answer if isinstance(answer, list) else [answer]
        return {_rank(load): _old_load(load, facts) for load in _each(answer)}

    for ask in (new, old):
        try:
            if ask():
                return ask
        except (NotThereError, LookupError, TypeError):
            continue
    return None


def _each(loads: Any) -> list[Mapping[str, Any]]:
    return [load for load in loads if isinstance(load, Mapping)]


def _rank(load: Mapping[str, Any]) -> str:
    return f"DP{load.get('dp_rank', 0)}"


def _load(load: Mapping[str, Any]) -> Moment:
    """A moment from SGLang's /v1/loads, which exists since 2026."""
    running = _number(load, "num_running_reqs")
    queue = _number(load, "num_waiting_reqs")
    usage = _number(load, "token_usage")
    return Moment(
        at=0.0,
        num_decode=int(bool(running)),
        running=running,
        running_max=running,
        queue=queue,
        queue_min=queue,
        queue_max=queue,
        pending_tokens=_number(load, "num_waiting_uncached_tokens"),
        usage=usage,
        usage_max=usage,
        tokens=_number(load, "num_used_tokens"),
        gen_throughput=_number(load, "gen_throughput"),
    )


def _old_load(load: Mapping[str, Any], facts: Facts) -> Moment:
    """A moment from /get_load of older versions, whose num_reqs and num_tokens count both running
    and waiting requests."""
    queue, total = _number(load, "num_waiting_reqs"), _number(load, "num_reqs")
    running = None if total is None else max(total - (queue or 0.0), 0.0)
    tokens = None if queue else _number(load, "num_tokens")
    pool = facts.max_total_num_tokens
    usage = min(tokens / pool, 1.0) if tokens is not None and pool else None
    return Moment(
        at=0.0,
        num_decode=int(bool(running)),
        running=running,
        running_max=running,
        queue=queue,
        queue_min=queue,
        queue_max=queue,
        usage=usage,
        usage_max=usage,
        tokens=tokens,
    )


def _number(values: Mapping[str, Any], name: str) -> float | None:
    """The figure of this name; None if it is missing. Raises SourceError for an impossible figure,
    because the others are then worth nothing."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not is_possible(value, is_share=name == "token_usage"):
        raise SourceError(f"The server says {name}={value:g}, which is impossible.")
    return float(value)
