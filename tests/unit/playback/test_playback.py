"""A recording on the console's page: its requests and verdicts at any time, and its routes."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_runs import SHORT, run_for
from starlette.testclient import TestClient

from setpoint.core.errors import SourceError
from setpoint.core.moments import Moment
from setpoint.playback import request_timelines as timelines
from setpoint.playback.film import Film
from setpoint.playback.playback_routes import create_app


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four of 24 users run at a time, for a minute."""
    folder = tmp_path_factory.mktemp("capped")
    return run_for(60, folder, load=SHORT, users=24, max_running_requests=4).recording


@pytest.fixture(scope="module")
def film(capped: Path) -> Film:
    return Film(str(capped))


def moments(film: Film) -> list[Moment]:
    return film.seen.ranks[0].moments


def test_a_recording_that_is_damaged_at_its_beginning_says_so(capped: Path, tmp_path: Path) -> None:
    content = bytearray(capped.read_bytes())
    content[2000] ^= 1
    path = tmp_path / "damaged.rec"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"contains no step .*damaged after \d+ bytes"):
        Film(str(path))


def test_at_every_time_the_table_is_what_the_scheduler_did(film: Film) -> None:
    looked = 0
    for moment in moments(film)[5:-1]:
        at = round(moment.at + moment.seconds / 2)
        table = film.at(at)["requests"]
        # A second of means against one instant: requests come and go within it.
        assert table.num_running <= 4
        assert abs(table.num_queued - (moment.queue or 0)) <= 4
        running = [row for row in table.rows if row.state in ("running", "prefill")]
        waiting = [row for row in table.rows if row.state == "waiting"]
        assert len(running) == table.num_running
        assert [row.place for row in waiting] == [*range(1, table.num_queued + 1)]
        assert {row.why for row in waiting[:1]} <= {"no_slot", None}
        looked += bool(waiting and waiting[0].why)
    assert looked > 20


def test_requests_end_and_their_tokens_only_grow(film: Film) -> None:
    seen: dict[str, int] = {}
    ended: set[str] = set()
    for second in range(round(moments(film)[0].at), round(moments(film)[-1].at)):
        for row in film.at(second)["requests"].rows:
            assert row.output >= seen.get(row.rid, 0)
            seen[row.rid] = row.output
            assert row.state == "ended" or row.rid not in ended
            if row.state == "ended":
                ended.add(row.rid)
                assert row.end in ("stop", "length")
    assert len(ended) > 20


def test_the_doctor_says_at_each_time_what_it_knew_then(film: Film) -> None:
    begin = moments(film)[0].at
    assert film.at(begin)["doctor"]["verdict"] == "not-enough-evidence"
    assert film.at(begin + 55)["doctor"]["verdict"] == "seq-cap"
    limits = [told.get("limit") for told in film.recording()["moments"]]
    assert limits.count("seq-cap") > len(limits) / 2


def test_times_outside_of_the_recording_are_its_ends(film: Film) -> None:
    first, last = moments(film)[0], moments(film)[-1]
    assert film.at(0) == film.at(first.at)
    assert film.at(1e18) == film.at(last.at + last.seconds)


def test_the_number_of_requests_is_bounded(capped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_LIVES", 10)
    short = Film(str(capped))
    assert len(short.lives) == 10
    assert "requests are not in the table" in short.notes[-1]
    last = moments(short)[-1].at
    assert len(short.at(last)["requests"].rows) <= 10


def test_a_recording_that_was_cut_is_shown_up_to_there(capped: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.rec"
    content = capped.read_bytes()
    cut.write_bytes(content[: len(content) // 2 + 3])
    film = Film(str(cut))
    assert any("ignored" in note for note in film.notes)
    assert 10 < len(moments(film)) < 60


def test_what_is_no_recording_is_refused_in_a_sentence(tmp_path: Path) -> None:
    other = tmp_path / "server.log"
    other.write_text("Decode batch, #running-req: 1\n")
    for name in (str(other), str(tmp_path / "missing.rec")):
        with pytest.raises(SourceError):
            Film(name)


def test_routes(film: Film) -> None:
    client = TestClient(create_app(film), base_url="http://127.0.0.1:30100")
    page = client.get("/console")
    assert b'data-source="recording"' in page.content
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert client.get("/console/recorded.js").status_code == 200
    told = client.get("/console/recording").json()
    assert told["state"]["limits"]["max_running_requests"] == 4
    at = client.get("/console/recording/at", params={"time": told["moments"][30]["at"]}).json()
    assert at["requests"]["num_running"] <= 4
    assert set(at["doctor"]) >= {"verdict", "findings"}
    for time in ("x", "nan", "inf", ""):
        assert client.get("/console/recording/at", params={"time": time}).status_code in (400, 422)
    assert client.get("/console/../film.py").status_code == 404
    stranger = TestClient(create_app(film), base_url="http://evil.example")
    assert stranger.get("/console/recording").status_code == 400
