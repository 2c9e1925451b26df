"""One notion of a window: the same run of the real scheduler, seen through its log, its recording,
its ``/metrics`` and its own moments, gives observations that agree, and the same verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_runs import LONG, POOL, SHORT, Run, run_for

from setpoint.core.moments import Moment, merge
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.observations import Observations
from setpoint.doctor.readers.kept import live_observations
from setpoint.doctor.readers.log.reader import read_chunks
from setpoint.doctor.readers.metrics import of_scrapes
from setpoint.doctor.readers.scrape import read_scrape
from setpoint.doctor.readers.sources import observe_sources
from setpoint_testing.traffic import Load


def info_of(run: Run) -> dict[str, Any]:
    return {
        "device": "cpu",
        "version": "1",
        "max_total_num_tokens": POOL,
        "max_running_requests": run.settings.max_running_requests,
        "chunked_prefill_size": run.settings.chunked_prefill_size,
        "max_prefill_tokens": run.settings.max_prefill_tokens,
        "schedule_conservativeness": run.settings.conservativeness,
    }


def seen_by_all(run: Run) -> dict[str, Observations]:
    live = live_observations(info_of(run), run.moments, name="live")
    scrapes = [read_scrape(page, at=at, name="page") for at, page in run.pages]
    (log,) = read_chunks("log", [run.log.encode()])
    (recording,) = observe_sources([str(run.recording)], seconds=1)
    return {
        "live": live,
        "log": log,
        "recording": recording,
        "metrics": of_scrapes(scrapes, name="page", facts=live.facts),
    }


def whole(seen: Observations) -> Moment:
    (rank,) = seen.ranks
    return merge(rank.moments)


@pytest.mark.parametrize(
    ("verdict", "load", "users", "settings"),
    [
        ("seq-cap", SHORT, 24, {"max_running_requests": 8}),
        ("client-bound", SHORT, 4, {}),
        ("kv-conservative", LONG, 30, {"conservativeness": 1.5}),
    ],
)
def test_all_readers_see_the_same_run(
    tmp_path: Path, verdict: str, load: Load, users: int, settings: dict[str, Any]
) -> None:
    run = run_for(60.0, tmp_path, load=load, users=users, **settings)
    seen = seen_by_all(run)
    live = whole(seen["live"])
    exact = whole(seen["recording"])
    for name in ("new_tokens", "cached_tokens", "output_tokens", "refusals", "ended", "num_decode"):
        assert getattr(exact, name) == getattr(live, name), name
    assert exact.running == pytest.approx(live.running)
    assert exact.quantiles.keys() >= {"ttft_p95", "itl_p50", "wait_p50"}
    scraped = whole(seen["metrics"])
    # The first second and the last are not between two scrapes.
    assert scraped.new_tokens == pytest.approx(live.new_tokens, rel=0.1)
    assert scraped.output_tokens == pytest.approx(live.output_tokens, rel=0.1)
    assert sum(scraped.refusals.values()) == pytest.approx(sum(live.refusals.values()), rel=0.1)
    logged = whole(seen["log"])
    assert logged.new_tokens == live.new_tokens
    for name, each in (("log", logged), ("metrics", scraped)):
        assert each.running == pytest.approx(live.running, rel=0.15, abs=0.5), name
        assert each.queue == pytest.approx(live.queue, rel=0.15, abs=0.5), name
        assert each.usage == pytest.approx(live.usage, rel=0.15, abs=0.02), name
    verdicts = {name: diagnose(each).verdict for name, each in seen.items()}
    assert verdicts == dict.fromkeys(verdicts, verdict)
