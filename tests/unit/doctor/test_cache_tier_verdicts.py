"""What the doctor says about cache tiers: off, too dear, or worth keeping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_cases import decode, rank, seen

from setpoint.core.control import TierState
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.findings import Finding, Report
from setpoint.doctor.readers.log.reader import read_log
from setpoint.doctor.readers.metrics import of_scrapes
from setpoint.doctor.readers.scrape import read_scrape


def judge(mode: str = "null", **values: Any) -> Report:
    moments = [decode(30, 5, 0.5) for _ in range(40)]
    options = {"disaggregation_mode": mode}
    observations = seen(rank(moments), max_running_requests=64, options=options)
    observations.tiers = (TierState(**{"backend": "file", "age_s": 200.0, **values}),)
    return diagnose(observations)


def of_tier(report: Report) -> Finding | None:
    return next((each for each in report.findings if each.cause == "cache-tier"), None)


def notes(report: Report) -> str:
    return " ".join(report.sources[0].notes)


def test_a_tier_that_is_off_says_why() -> None:
    found = of_tier(judge(off="storage: 3 errors in a row, the last one: the disk is gone."))
    assert found is not None
    assert found.summary.startswith("The tier 'storage' is off: 3 errors in a row")
    assert "the disk is gone." in found.summary
    assert ".." not in found.summary


@pytest.mark.parametrize("saves_selectively", [False, True])
def test_a_tier_that_costs_and_saves_nothing(saves_selectively: bool) -> None:
    report = judge(
        save_s=12.0, load_s=0.4, saved_tokens=90_000, saves_selectively=saves_selectively
    )
    found = of_tier(report)
    assert found is not None
    assert "costs 6 % of the time of a core and saves nothing" in found.summary
    assert found.action.value == (None if saves_selectively else "write_through_selective")
    assert "Keep it" not in notes(report)


def test_a_decode_server_saves_for_others() -> None:
    assert of_tier(judge("decode", save_s=30.0, saved_tokens=90_000)) is None


def test_a_tier_that_pays_is_praised() -> None:
    report = judge(load_s=2.0, save_s=3.0, earned_s=40.0, loaded_tokens=90_000)
    assert of_tier(report) is None
    assert "loads prefixes 20 times faster than they are computed" in notes(report)
    assert "Keep it." in notes(report)
    gone = judge(load_s=2.0, earned_s=40.0, loaded_tokens=90_000, has_tier=False, backend=None)
    assert "Keep it." not in notes(gone), "red before: it was detached"
    assert of_tier(judge(save_s=50.0, has_tier=False)) is None


@pytest.mark.parametrize(
    "values",
    [
        {"save_s": 12.0, "age_s": 30.0},
        {"save_s": 3.0},
        {"save_s": 30.0, "earned_s": 40.0, "load_s": 2.0, "loaded_tokens": 5},
    ],
    ids=["young", "cheap", "earned"],
)
def test_a_tier_that_may_yet_pay_is_left_alone(values: dict[str, float]) -> None:
    assert of_tier(judge(**values)) is None


def page(seconds: float, loaded: int, off: int = 0) -> str:
    return "\n".join(
        (
            'sglang:num_running_reqs{model_name="m",dp_rank="0"} 7.0',
            f'setpoint:cache_tier_off{{model_name="m",dp_rank="0"}} {off}',
            f'setpoint:cache_tier_seconds_total{{part="save",model_name="m",dp_rank="0"}} {seconds}',
            f'setpoint:cache_tier_seconds_total{{part="load",model_name="m",dp_rank="0"}} {seconds}',
            f'setpoint:cache_tier_seconds_total{{part="earned",model_name="m",dp_rank="0"}} {loaded}',
            f'sglang:prefetched_tokens_total{{model_name="m",dp_rank="0"}} {loaded}',
            "",
        )
    )


def test_pages_of_metrics_tell_what_tiers_did_in_between() -> None:
    scrapes = [
        read_scrape(page(5, 100), at=1000.0, name="m"),
        read_scrape(page(11, 150, off=1), at=1100.0, name="m"),
    ]
    (tiers,) = of_scrapes(scrapes, name="m").tiers
    assert (tiers.load_s, tiers.save_s, tiers.earned_s) == (6.0, 6.0, 50.0)
    assert (tiers.loaded_tokens, tiers.age_s) == (50, 100.0)
    assert "says why" in tiers.off


def test_a_log_says_that_a_tier_is_off(tmp_path: Path) -> None:
    """Red before: the doctor read nothing from this line."""
    log = tmp_path / "server.log"
    log.write_text(
        "[2026-11-26 12:00:00] Cache tier storage is off: redis://h does not answer.\n"
        "[2026-11-26 12:00:01] The server is fired up and ready to roll!\n"
    )
    (observations,) = read_log(str(log))
    found = of_tier(diagnose(observations))
    assert found is not None
    assert found.summary == "The tier 'storage' is off: redis://h does not answer."
    assert found.evidence[0].line == 1
