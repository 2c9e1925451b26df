"""What ``--watch`` looks at: the last minutes, of a large log its ends, with the right numbers of
lines."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from doctor_runs import SHORT, run_for

from setpoint.core.moments import Moment
from setpoint.doctor.observations import Event, Facts, Observations, Rank, Source
from setpoint.doctor.readers import watched as watching
from setpoint.doctor.readers.sources import observe_sources
from setpoint.doctor.readers.watched import Watched, join_observations, recent

CASES = Path(__file__).parents[2] / "doctor_corpus" / "cases"


def seen(*times: float, events: tuple[float | None, ...] = ()) -> Observations:
    return Observations(
        [Source("x", "log")],
        Facts(),
        [
            Rank(
                "",
                [Moment(at=at, seconds=1) for at in times],
                [Event("retraction", at, 1, "") for at in events],
                {"retraction": len(events) + 10},
            )
        ],
    )


def test_the_last_minutes() -> None:
    (rank,) = recent(seen(0, 50, 100, 200, events=(10, 150, None)), 120).ranks
    assert [moment.at for moment in rank.moments] == [100, 200]
    assert [event.at for event in rank.events] == [150, None]
    assert rank.num_events == {"retraction": 12}
    nothing = seen()
    assert recent(nothing, 120) is nothing


def test_what_was_seen_before_stays() -> None:
    (rank,) = join_observations(seen(1, 2, events=(1,)), seen(3, events=(3,))).ranks
    assert [moment.at for moment in rank.moments] == [1, 2, 3]
    assert [event.at for event in rank.events] == [1, 3]
    assert rank.num_events == {"retraction": 22}


@pytest.mark.parametrize("kind", ["packed log", "recording", "saved metrics"])
def test_only_of_a_plain_log_the_ends_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "file"
    if kind == "packed log":
        path.write_bytes((CASES / "cap-16-of-many.log.gz").read_bytes())
    elif kind == "recording":
        path = run_for(20, tmp_path, load=SHORT, users=24, max_running_requests=4).recording
    else:
        path.write_text("# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{} 5\n")
    monkeypatch.setattr(watching, "_HEAD", 10)
    monkeypatch.setattr(watching, "_TAIL", 20)
    (seen,) = Watched([str(path)]).look(seconds=1)
    (whole,) = observe_sources([str(path)], seconds=1)
    assert seen.ranks == recent(whole, watching.WINDOW_S).ranks


def test_the_ends_of_a_large_log_have_the_right_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = gzip.decompress((CASES / "cap-16-of-many.log.gz").read_bytes())
    path = tmp_path / "server.log"
    path.write_bytes(text)
    monkeypatch.setattr(watching, "_HEAD", 12_000)
    monkeypatch.setattr(watching, "_TAIL", 8_000)
    assert len(text) > 20_000
    (ends,) = Watched([str(path)]).look(seconds=1)
    (whole,) = observe_sources([str(path)], seconds=1)
    assert ends.facts.max_running_requests == whole.facts.max_running_requests
    lines = text.decode().splitlines()
    for moment in ends.ranks[0].moments:
        assert lines[moment.line - 1].startswith(moment.text[:60])
    assert ends.ranks[0].moments[-1].line == whole.ranks[0].moments[-1].line
    assert len(ends.ranks[0].moments) < len(whole.ranks[0].moments)
