"""What a server writes down about requests: its log as JSON, its switch, and files of figures."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from setpoint.core.control import OptionChange
from setpoint.core.settings import Settings
from setpoint.frontend.live_options import FrontendSettings, Proposal
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.telemetry.request_export import RequestExport
from setpoint.observe.logline import LineFormatter
from setpoint_testing.fake_engine import FakeEngine
from setpoint_testing.server_process import wait_until

Serve = Callable[..., None]
NASTY = 'a "quoted"\nline\u2028\x1b[31m and é'


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines that are JSON, as the server's handler writes them."""
    formatter = LineFormatter("[now] %(levelprefix)s%(message)s")
    lines = [formatter.format(record) for record in caplog.records]
    return [json.loads(line) for line in lines if not line.startswith("[now]")]


@pytest.mark.parametrize("level", range(4))
def test_a_request_is_two_lines_of_json(
    serve: Serve, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        await server.generate(text=NASTY, rid=f"{level}", sampling_params={"max_new_tokens": 3})

    settings = {"log_requests": True, "log_requests_level": level, "log_requests_format": "json"}
    serve(scenario, FakeEngine(), **settings)
    received, finished = events(caplog)
    assert (received["event"], finished["event"]) == ("request.received", "request.finished")
    assert datetime.fromisoformat(received["timestamp"]) <= datetime.now().astimezone()
    assert received["obj"].get("text") == (NASTY if level >= 2 else None)
    assert received["obj"]["rid"] == [f"{level}"]
    assert ("sampling_params" in finished["obj"]) == (level >= 1)
    assert finished["out"]["meta_info"]["completion_tokens"] == 3
    assert ("text" in finished["out"]) == (level >= 2)


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_line_of_an_end_says_where_the_time_went(
    serve: Serve, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        await server.generate(text="abc", sampling_params={"max_new_tokens": 3})

    settings = {"log_requests": True, "log_requests_level": 0, "log_requests_format": form}
    serve(scenario, FakeEngine(num_cached=1), **settings)
    if form == "json":
        meta = events(caplog)[-1]["out"]["meta_info"]
    else:
        (line,) = (line for line in caplog.messages if line.startswith("Finish: "))
        meta = ast.literal_eval(line.partition(", out=")[2])["meta_info"]
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (3, 1, 3)
    assert meta["finish_reason"]["type"] == "length"
    assert meta["num_retractions"] == 0
    assert meta["queue_time"] == 0.25
    assert 0 < meta["first_token_latency"] <= meta["e2e_latency"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses", {"input": "SECRET", "instructions": "SECRET"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "SECRET"}], "max_tokens": 2}),
        ("/api/generate", {"prompt": "SECRET", "system": "SECRET"}),
        ("/v1/score", {"query": "SECRET", "items": ["SECRET"], "label_token_ids": [1]}),
    ],
)
def test_parameters_alone_hold_nothing_that_people_wrote(
    serve: Serve, caplog: pytest.LogCaptureFixture, route: str, body: Any
) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        await server.http.post(route, json=body | {"model": "m", "temperature": 0.5})

    settings = {"log_requests": True, "log_requests_level": 1, "log_requests_format": "json"}
    serve(scenario, FakeEngine(), **settings)
    received, *_ = events(caplog)
    assert received["obj"]["temperature"] == 0.5
    assert "SECRET" not in caplog.text


def test_json_is_one_line_whatever_it_holds() -> None:
    """No character of a client's begins a line or reaches the terminal."""
    record = logging.makeLogRecord({"msg": json.dumps({"text": NASTY}), "is_json": True})
    line = LineFormatter("[now] %(message)s").format(record)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == {"text": NASTY}


class Options:
    """The options of a server that can change those of its request log."""

    def __init__(self) -> None:
        self.frontend = FrontendSettings()
        self.asked: list[Any] = []

    def propose(self, values: Any) -> Proposal:
        self.asked.append(values)
        changes = [OptionChange(name, None, value) for name, value in values.items()]
        return Proposal(Settings(max_running_requests=1), changes, [], lambda: None)


def test_the_log_can_be_configured(serve: Serve) -> None:
    live = Options()

    async def scenario(server: Any) -> None:
        body = {"log_requests": True, "log_requests_level": 1, "log_level": "debug"}
        response = await server.http.post("/configure_logging", json=body)
        assert (response.status_code, response.content) == (200, b"")
        assert live.asked == [body, {}], "what is asked for, and what it was before"
        (change,) = server.engine.changes
        assert change.why == "/configure_logging"
        response = await server.http.post("/configure_logging", json={"log_request": True})
        assert "did you mean 'log_requests'" in response.json()["warnings"][0]

    serve(scenario, FakeEngine(), live=live)


@pytest.mark.parametrize(
    "body",
    [
        {"dump_requests_folder": "/tmp/x"},
        {"dump_requests_threshold": 10},
        {"crash_dump_folder": "/tmp/x"},
        {"dump_requests_exclude_meta_keys": ["a"]},
        {"log_requests": "maybe"},
        {"log_requests_level": "one"},
    ],
)
def test_what_cannot_be_configured_is_refused_by_name(serve: Serve, body: Any) -> None:
    live = Options()

    async def scenario(server: Any) -> None:
        response = await server.http.post("/configure_logging", json=body)
        assert response.status_code == 400
        assert next(iter(body)) in response.json()["message"]
        assert live.asked == []

    serve(scenario, FakeEngine(), live=live)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.iterdir())
        for line in path.read_text().splitlines()
    ]


def test_every_sequence_is_a_line_of_figures_in_the_file_of_its_hour(
    serve: Serve, tmp_path: Path
) -> None:
    hours = iter([9, 9, 10])

    def now() -> datetime:
        return datetime(2026, 11, 22, next(hours), 30)

    book = RequestBook()
    export = RequestExport(tmp_path, book, now=now)

    async def scenario(server: Any) -> None:
        sampling = {"max_new_tokens": 3, "n": 2, "top_p": 0.5, "stop": ["secret end"]}
        await server.generate(text="secret words", sampling_params=sampling)
        await server.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1})

    serve(scenario, FakeEngine(num_cached=1), book=book, readers=[export.finished])
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2 and len(lines(tmp_path)) == 3)
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == [f"sglang-request-metrics-20261122_{hour}.log" for hour in ("09", "10")]
    first, second, third = lines(tmp_path)
    assert {first["id"][-2:], second["id"][-2:]} == {"_0", "_1"}
    assert json.loads(first["request_parameters"])["sampling_params"]["top_p"] == 0.5
    assert (third["prompt_tokens"], third["completion_tokens"], third["cached_tokens"]) == (2, 1, 1)
    assert third["finish_reason"]["type"] == "length"
    assert third["queue_time"] == 0.25
    assert all("secret" not in path.read_text() for path in tmp_path.iterdir())


def test_a_folder_that_goes_away_costs_lines_and_nothing_else(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, book = tmp_path / "gone", RequestBook()
    export = RequestExport(folder, book)

    async def scenario(server: Any) -> None:
        for _ in range(3):
            await server.generate(text="ab", sampling_params={"max_new_tokens": 1})
        wait_until(lambda: book.lost_exports == 3)
        folder.mkdir()
        await server.generate(text="ab", sampling_params={"max_new_tokens": 1})
        wait_until(lambda: bool(lines(folder)))
        wait_until(lambda: "can be written again" in caplog.text)

    serve(scenario, FakeEngine(), readers=[export.finished])
    assert caplog.text.count("Lines are lost") == 1
    assert book.lost_exports == 3
