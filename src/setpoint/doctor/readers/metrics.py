"""Reads ``/metrics``: a page that is scraped again and again, or a saved one. Each pair of scrapes
is a moment: it has the gauges of the second scrape, and what was added to counters in between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from setpoint.core.control import TierState
from setpoint.core.errors import SourceError
from setpoint.core.moments import Moment
from setpoint.doctor.observations import Facts, Observations, Rank, Source
from setpoint.doctor.readers.kept import add_events, sentence
from setpoint.doctor.readers.pages import MAX_BYTES, Pages
from setpoint.doctor.readers.scrape import Scrape, Values, pages_in, quantiles, read_scrape

EVERY_S = 1.0
TIER_OFF = "cache_tier_off"
COUNTER = "realtime_tokens"
RESTARTED = "The server restarted while it was watched. The report is about the time after that."


def read_saved(name: str) -> Observations:
    """The observations of a saved page, or of several in one file, between which the times are not
    known. Raises SourceError."""
    try:
        with Path(name).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror}.") from None
    if len(content) > MAX_BYTES:
        raise SourceError(
            f"{name} is longer than {MAX_BYTES >> 20} MiB; save fewer pages of metrics into a file."
        )
    text = content.decode("utf-8", "replace")
    scrapes = [read_scrape(page, at=0.0, name=name) for page in pages_in(text)]
    seen = of_scrapes(scrapes, name=name)
    (source,) = seen.sources
    source.clock = "none"
    for rank in seen.ranks:
        for place, moment in enumerate(rank.moments):
            moment.at = float(place)
    if len(scrapes) == 1:
        source.notes.append(
            "One saved page is one moment, and counters mean nothing without a second one. Give the"
            " URL of the page, or save it several times, one after the other, into one file."
        )
    return seen


def watch_metrics(url: str, *, seconds: float, api_key: str | None) -> Observations:
    """Watch the page at a URL for ``seconds``. Raises SourceError if it cannot be read at first."""
    with Pages(url, api_key=api_key) as pages:
        return watched_metrics(pages, url, seconds=seconds, name=url)


def watched_metrics(
    pages: Pages, url: str, *, seconds: float, name: str, facts: Facts | None = None
) -> Observations:
    """Like ``watch_metrics``, over an open connection. name: that of the source. facts: what else
    is known about the server."""
    scrapes: list[Scrape] = []
    note, end = "", time.monotonic() + seconds
    while True:
        began = time.monotonic()
        try:
            scrapes.append(read_scrape(pages.text(url), at=time.time(), name=url))
        except SourceError as error:
            if not scrapes:
                raise
            note = f"Watching ended early: {error}"
            break
        if began >= end:
            break
        time.sleep(max(min(began + EVERY_S, end) - time.monotonic(), 0.0))
    seen = of_scrapes(scrapes, name=name, facts=facts)
    seen.sources[0].notes += [note] if note else []
    return seen


def of_scrapes(scrapes: Sequence[Scrape], *, name: str, facts: Facts | None = None) -> Observations:
    """The observations of the scrapes of one server, at least one, in their order."""
    source = Source(name=name, kind="metrics")
    pairs = enumerate(pairwise(scrapes), start=1)
    begins = [place for place, (before, after) in pairs if _restarted(before, after)]
    if begins:
        source.notes = [RESTARTED]
        scrapes = scrapes[begins[-1] :]
    impossible = [each for scrape in scrapes for each in scrape.impossible]
    if impossible:
        source.notes.append(
            f"Impossible values were ignored: {len(impossible)}, the first of them {impossible[0]}."
        )
    last = scrapes[-1]
    source.generation = "Setpoint" if last.engine == "setpoint" else "SGLang"
    ranks = []
    for rank_name in sorted(last.ranks) or [""]:
        rank = Rank(name=rank_name if len(last.ranks) > 1 else "")
        for before, after in pairwise(scrapes):
            rank.moments.append(_moment(before, after, rank_name))
        if len(scrapes) == 1:
            rank.moments.append(_present(last.ranks.get(rank_name, Values()), last.at, 0.0))
        for moment in rank.moments:
            moment.text = sentence(moment)
            add_events(rank, moment)
        ranks.append(rank)
    return Observations(
        sources=[source],
        facts=facts or _facts(last),
        ranks=ranks,
        tiers=_tiers(scrapes[0], last),
    )


def _tiers(first: Scrape, last: Scrape) -> tuple[TierState, ...]:
    """What the cache tiers of each rank have done between two scrapes."""
    found = []
    for name, new in last.ranks.items():
        old = first.ranks.get(name, Values())
        if new.one(TIER_OFF) is None:
            continue
        seconds = {
            part: _added_where(old, new, "cache_tier_seconds", "part", part) or 0.0
            for part in ("load", "save", "earned")
        }
        found.append(
            TierState(
                backend=None,
                off="its log, or GET /hicache/storage-backend, says why"
                if new.one(TIER_OFF)
                else "",
                saves_selectively=bool(new.one("cache_tier_thrifty")),
                loaded_tokens=int(_added(old, new, "prefetched_tokens") or 0),
                saved_tokens=int(_added(old, new, "backuped_tokens") or 0),
                load_s=seconds["load"],
                save_s=seconds["save"],
                earned_s=seconds["earned"],
                age_s=last.at - first.at,
            )
        )
    return tuple(found)


def _restarted(before: Scrape, after: Scrape) -> bool:
    """Whether a counter went back."""
    pairs = [(before.requests, after.requests)]
    pairs += [(values, after.ranks.get(rank, values)) for rank, values in before.ranks.items()]
    return any(
        (old := earlier.one(name)) is not None
        and (new := later.one(name)) is not None
        and new < old
        for earlier, later in pairs
        for name in (COUNTER, "num_requests", "generation_tokens", "prompt_tokens")
    )


def _present(values: Values, at: float, seconds: float) -> Moment:
    """The gauges."""
    total, free = values.one("max_total_num_tokens"), values.one("kv_available_tokens")
    evictable = values.one("kv_evictable_tokens")
    pool = {"total": total, "free": free, "evictable": evictable}
    usage = values.one("full_token_usage", "token_usage")
    others = {"swa": values.one("swa_token_usage"), "mamba": values.one("mamba_usage")}
    running, queue = values.one("num_running_reqs"), values.one("num_queue_reqs")
    return Moment(
        at=at,
        seconds=seconds,
        running=running,
        running_max=running,
        queue=queue,
        queue_min=queue,
        queue_max=queue,
        preparing=values.one("num_grammar_queue_reqs"),
        usage=usage,
        usage_max=usage,
        other_usage={name: value for name, value in others.items() if value},
        tokens=values.one("num_used_tokens", "kv_used_tokens"),
        pool={name: int(value) for name, value in pool.items() if value is not None},
        gen_throughput=values.one("gen_throughput"),
        new_token_ratio=values.one("new_token_ratio"),
    )


def _moment(before: Scrape, after: Scrape, rank: str) -> Moment:
    old, new = before.ranks.get(rank, Values()), after.ranks.get(rank, Values())
    moment = _present(new, before.at, after.at - before.at)
    alone = len(after.ranks) <= 1
    _add_tokens(moment, old, new)
    if alone and moment.output_tokens is None:
        _add_tokens_of_requests(moment, before.requests, after.requests)
    _add_steps(moment, old, new)
    retracted = _added(old, new, "num_retracted_requests")
    moment.retracted = int(new.one("num_retracted_reqs") or 0 if retracted is None else retracted)
    moment.retractions = int(moment.retracted > 0)
    moment.refusals = _added_by(old, new, "queue_refusals", "reason")
    moment.ended = _added_by(old, new, "ended_requests", "how")
    moment.new_seqs = int(_added(old, new, "queue_time_seconds_count") or 0)
    _add_times(moment, old, new)
    moment.quantiles = {
        **quantiles(before.requests, after.requests, ("time_to_first_token_seconds",), "ttft"),
        **quantiles(
            before.requests,
            after.requests,
            ("inter_token_latency_seconds", "time_per_output_token_seconds"),
            "itl",
        ),
        **quantiles(old, new, ("queue_time_seconds",), "wait"),
    }
    return moment


def _add_tokens(moment: Moment, old: Values, new: Values) -> None:
    computed = _added_where(old, new, COUNTER, "mode", "prefill_compute")
    cached = _added_where(old, new, COUNTER, "mode", "prefill_cache")
    generated = _added_where(old, new, COUNTER, "mode", "decode")
    if computed is None or generated is None:
        return
    moment.new_tokens, moment.cached_tokens = int(computed), int(cached or 0)
    moment.output_tokens = int(generated)
    _add_rates(moment)


def _add_tokens_of_requests(moment: Moment, old: Values, new: Values) -> None:
    """Add the tokens of requests: older versions count tokens when a request ends."""
    prompts = _added(old, new, "prompt_tokens")
    cached = int(_added(old, new, "cached_tokens") or 0)
    if prompts is not None:
        moment.new_tokens, moment.cached_tokens = max(int(prompts) - cached, 0), cached


def _add_rates(moment: Moment) -> None:
    seconds = max(moment.seconds, 1e-9)
    moment.gen_throughput = (moment.output_tokens or 0) / seconds
    moment.input_throughput = moment.new_tokens / seconds


def _add_steps(moment: Moment, old: Values, new: Values) -> None:
    """Add the numbers of steps. If an engine does not count them, each kind that occurs counts as
    one."""
    name = "cuda_graph_passes"
    prefills = _added_where(old, new, name, "mode", "prefill")
    if prefills is None:
        moment.num_decode = int(bool(moment.running or moment.output_tokens))
        graph = new.one("is_cuda_graph")
        if moment.num_decode and graph is not None:
            moment.graph_hits, moment.graph_misses = int(graph > 0), int(graph <= 0)
    else:
        moment.num_prefill = int(prefills)
        moment.graph_misses = int(_added_where(old, new, name, "mode", "decode_none") or 0)
        steps = int(_added_where(old, new, name, "mode", "decode") or 0)
        moment.graph_hits = max(steps - moment.graph_misses, 0)
        moment.num_decode = steps
    if moment.graph_misses:
        moment.missed_running = moment.running


def _add_times(moment: Moment, old: Values, new: Values) -> None:
    moment.model_s = _added(old, new, "forward_execution_seconds")
    idle = _added(old, new, "scheduler_idle_seconds")
    if idle is not None:
        moment.busy_s = max(moment.seconds - idle, 0.0)


def _added(old: Values, new: Values, name: str) -> float | None:
    before, after = old.one(name), new.one(name)
    return None if after is None else max(after - (before or 0.0), 0.0)


def _added_where(old: Values, new: Values, name: str, label: str, beginning: str) -> float | None:
    after = new.where(name, label, beginning)
    if after is None:
        return None
    return max(after - (old.where(name, label, beginning) or 0.0), 0.0)


def _added_by(old: Values, new: Values, name: str, label: str) -> dict[str, int]:
    before = old.by(name, label)
    added = {
        each: int(count - before.get(each, 0.0)) for each, count in new.by(name, label).items()
    }
    return {each: count for each, count in added.items() if count > 0}


def _facts(scrape: Scrape) -> Facts:
    values = next(iter(scrape.ranks.values()), Values())

    def count(name: str) -> int | None:
        found = values.one(name)
        return None if found is None else int(found)

    return Facts(
        engine=scrape.engine,
        model=scrape.model,
        max_total_num_tokens=count("max_total_num_tokens"),
        context_len=count("context_len"),
        weights_gb=values.one("weight_memory_usage_gb"),
        kv_gb=values.one("kv_cache_memory_usage_gb"),
        graph_gb=values.one("graph_memory_usage_gb"),
    )
