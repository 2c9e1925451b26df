"""What holds for every report, whatever the observations are."""

from __future__ import annotations

from typing import Any

import msgspec
from doctor_cases import decode, rank, seen
from hypothesis import given, settings
from hypothesis import strategies as st

from setpoint.core.moments import Moment
from setpoint.core.records import AdmissionRefusal
from setpoint.doctor.checks import BY_CAUSE, CHECKS
from setpoint.doctor.checks.diagnose import diagnose, opposed, rank_findings, without_contradictions
from setpoint.doctor.equations import conservativeness_against_retractions
from setpoint.doctor.findings import Action, Finding
from setpoint.doctor.observations import Event, Facts, Observations, Rank, Source

SHARES = st.one_of(st.none(), st.floats(0, 1), st.floats(0, 10))
COUNTS = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 8.0, 64.0, 300.0, 5000.0]))
WHOLE = st.integers(0, 20_000)


@st.composite
def moments(draw: st.DrawFn) -> Moment:
    return Moment(
        at=draw(st.floats(-1e3, 1e9)),
        seconds=draw(st.sampled_from([0.0, 0.0, 1.0])),
        num_prefill=draw(st.integers(0, 2)),
        num_decode=draw(st.integers(0, 2)),
        running=draw(COUNTS),
        queue=draw(COUNTS),
        preparing=draw(COUNTS),
        usage=draw(SHARES),
        other_usage=draw(st.dictionaries(st.sampled_from(["swa", "mamba", "x"]), st.floats(0, 1))),
        tokens=draw(COUNTS),
        gen_throughput=draw(COUNTS),
        new_seqs=draw(st.integers(0, 9)),
        new_tokens=draw(WHOLE),
        cached_tokens=draw(WHOLE),
        retractions=draw(st.integers(0, 2)),
        refusals=draw(st.dictionaries(st.sampled_from([*AdmissionRefusal]), st.integers(0, 50))),
        model_s=draw(SHARES),
        busy_s=draw(SHARES),
        cpu_s=draw(SHARES),
        quantiles=draw(st.dictionaries(st.just("itl_p50"), st.floats(0, 2))),
    )


VALUES = st.one_of(
    st.none(), st.integers(-1, 9000), st.floats(0, 2), st.booleans(), st.just("auto")
)
OPTIONS = (
    "max_running_requests",
    "schedule_conservativeness",
    "chunked_prefill_size",
    "mem_fraction_static",
    "schedule_policy",
    "dp_size",
    "pp_size",
    "prefill_max_requests",
    "max_total_tokens",
    "stream_interval",
    "disable_radix_cache",
)


@st.composite
def any_observations(draw: st.DrawFn) -> Observations:
    ranks = []
    for name in draw(st.sampled_from([[], [""], ["DP0", "DP1"]])):
        repeated = draw(st.integers(1, 12))
        row = draw(st.lists(moments(), max_size=4)) * repeated
        if draw(st.booleans()):
            rows = [msgspec.structs.replace(each, at=3.0 * i) for i, each in enumerate(row)]
        else:
            rows = sorted(row, key=lambda moment: moment.at)
        values: dict[str, float | str] = {"ratio_after": draw(st.floats(0, 1))}
        events = [Event("retraction", None, 0, "Retract requests.", values)]
        ranks.append(Rank(name, rows, events, {"retraction": draw(st.integers(0, 90))}))
    facts = Facts(
        options={name: draw(VALUES) for name in draw(st.sets(st.sampled_from(OPTIONS)))},
        max_total_num_tokens=draw(st.one_of(st.none(), WHOLE)),
        max_running_requests=draw(st.sampled_from([None, 0, 1, 8, 64, 4096])),
        chunked_prefill_size=draw(st.sampled_from([None, -1, 0, 512, 8192])),
        max_prefill_tokens=draw(st.sampled_from([None, 0, 512, 16384])),
        available_gb=draw(st.sampled_from([None, 0.0, 5.0, 20.0])),
        total_gb=draw(st.sampled_from([None, 0.0, 80.0])),
    )
    clock: Any = draw(st.sampled_from(["timestamps", "estimated", "none"]))
    return Observations([Source("s", "log", clock=clock)], facts, ranks)


@settings(max_examples=150)
@given(any_observations())
def test_every_report_is_consistent(observations: Observations) -> None:
    report = diagnose(observations)
    causes = [finding.cause for finding in report.findings]
    assert len(causes) == len(set(causes))
    assert set(causes) <= set(BY_CAUSE) - {"healthy", "not-enough-evidence"}
    if causes:
        assert report.verdict == causes[0]
    else:
        assert report.verdict in ("healthy", "not-enough-evidence")
    assert report.summary
    for finding in report.findings:
        assert 0 <= finding.confidence <= 1
        assert finding.share is None or 0 <= finding.share <= 1
        assert (finding.action.flag is None) == (finding.action.direction is None)
        effect = finding.effect
        assert effect is None or effect.low <= effect.expected <= effect.high
        assert finding.cause not in [each.cause for each in finding.ruled_out]
    ruled_out: set[str] = set()
    for finding in report.findings:
        assert finding.cause not in ruled_out
        ruled_out |= {each.cause for each in finding.ruled_out}
    for one in report.findings:
        assert not any(opposed(one.action, other.action) for other in report.findings)
    assert msgspec.json.decode(msgspec.json.encode(report))["verdict"] == report.verdict


def finding(cause: str, flag: str | None, direction: Any, confidence: float = 0.9) -> Finding:
    return Finding(cause, confidence, cause, (), Action("Do it.", flag, direction, 1), share=1.0)


def test_of_opposite_advice_the_less_certain_is_dropped_and_named() -> None:
    raise_it = finding("mem-underused", "--mem-fraction-static", "increase", 0.9)
    lower_it = finding("mem-headroom-low", "--mem-fraction-static", "decrease", 0.8)
    kept = without_contradictions(rank_findings([lower_it, raise_it]))
    assert [each.cause for each in kept] == ["mem-underused"]
    assert "mem-headroom-low" in [each.cause for each in kept[0].ruled_out]


def test_what_ended_the_server_comes_first_and_advice_last() -> None:
    order = rank_findings(
        [
            finding("rank-imbalance", None, None),
            finding("mem-headroom-low", None, None, 0.7),
            finding("kv-full", None, None),
            finding("queue-too-long", None, None, 0.5),
            finding("oom-decode", None, None, 0.3),
        ]
    )
    assert [each.cause for each in order] == [
        "oom-decode",
        "rank-imbalance",
        "queue-too-long",
        "kv-full",
        "mem-headroom-low",
    ]


def test_the_phases_of_a_benchmark() -> None:
    lines = [decode(1, 0, 0.0)]
    lines += [decode(20 * i, 300, 0.05 * i) for i in range(1, 10)]
    lines += [decode(200, 200, 0.95) for _ in range(30)]
    lines += [decode(200 - 10 * i, 0, 0.9 - 0.04 * i) for i in range(1, 20)]
    report = diagnose(seen(rank(lines)))
    assert [span.phase for span in report.phases[""]] == ["start-up", "ramp", "steady", "drain"]


def test_two_loads_with_silence_between() -> None:
    one = [decode(50, 0, 0.2) for _ in range(10)]
    two = [decode(50, 0, 0.2) for _ in range(10)]
    both = rank(one + two)
    for moment in both.moments[10:]:
        moment.at += 300
    report = diagnose(seen(both))
    assert [span.phase for span in report.phases[""]] == ["steady", "idle", "steady"]


def test_every_check_teaches() -> None:
    assert len({check.cause for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        for text in (check.title, check.meaning, check.rule, check.counter_evidence, check.guide):
            assert text
            assert "  " not in text
        for line in check.picture.splitlines():
            assert len(line) <= 72, check.cause


def test_ratios_and_a_conservativeness_of_0_do_not_divide() -> None:
    assert conservativeness_against_retractions(0.0, [0.0]) > 0
