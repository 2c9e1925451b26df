"""``/set_internal_state`` and ``setpoint set``, on a fake engine."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from setpoint.cli import main
from setpoint.config.live_changes import LIVE
from setpoint.core.control import OptionChange
from setpoint.core.errors import ConfigError
from setpoint.core.settings import Settings
from setpoint.frontend.live_options import FrontendSettings, Proposal
from setpoint_testing.fake_engine import FakeEngine
from setpoint_testing.server_process import PATIENCE_S


@dataclass
class Options:
    """Two options, one of them the frontend's."""

    frontend: FrontendSettings = field(default_factory=FrontendSettings)
    stream_interval: int = 1

    def propose(self, values: Mapping[str, Any]) -> Proposal:
        unknown = values.keys() - {"stream_interval", "log_requests"}
        if unknown:
            raise ConfigError(f"unknown option {unknown.pop()}.")
        logs = values.get("log_requests", self.frontend.log_requests) in (True, "true")
        interval = int(values.get("stream_interval", self.stream_interval))
        pairs = (
            ("stream_interval", self.stream_interval, interval),
            ("log_requests", self.frontend.log_requests, logs),
        )

        def accept() -> None:
            self.stream_interval = interval
            self.frontend = FrontendSettings(
                log_requests=logs, options={"stream_interval": interval, "log_requests": logs}
            )

        return Proposal(
            Settings(max_running_requests=8, stream_interval=interval),
            [OptionChange(*pair) for pair in pairs if pair[1] != pair[2]],
            ["stream_interval=99 (rather high)"] if interval == 99 else [],
            accept,
        )


def test_several_options_change_in_one_message(serve: Callable[..., None]) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(
            "/set_internal_state",
            json={"server_args": {"stream_interval": 5, "log_requests": True}, "why": "a test"},
        )
        assert response.status_code == 200
        assert response.json() == [
            {
                "updated": True,
                "changes": [
                    {"option": "stream_interval", "old": 1, "new": 5},
                    {"option": "log_requests", "old": False, "new": True},
                ],
            }
        ]
        (change,) = server.engine.changes
        assert (change.settings.stream_interval, change.by, change.why) == (
            5,
            "127.0.0.1",
            "a test",
        )
        assert [each.option for each in change.options] == ["stream_interval", "log_requests"]
        info = (await server.http.get("/get_server_info")).json()
        assert (info["stream_interval"], info["log_requests"]) == (5, True)
        again = await server.http.put(
            "/set_internal_state", json={"server_args": {"stream_interval": 5}}
        )
        assert again.json() == [{"updated": True, "changes": []}]
        assert len(server.engine.changes) == 1, "nothing to tell the engine"
        warned = await server.http.post(
            "/set_internal_state", json={"server_args": {"stream_interval": 99}}
        )
        assert warned.json()[0]["warnings"] == ["stream_interval=99 (rather high)"]

    serve(scenario, live=Options(), server_info={"stream_interval": 1, "log_requests": False})


def test_a_refused_change_changes_nothing(serve: Callable[..., None]) -> None:
    async def scenario(server: Any) -> None:
        for body, message in (
            ({"server_args": {"stream_interval": 5, "nothing": 1}}, "unknown option nothing."),
            ({"server_args": [1]}, "server_args"),
            ({}, "server_args"),
        ):
            response = await server.http.post("/set_internal_state", json=body)
            assert response.status_code == 400
            assert message in response.json()["message"]
        assert server.engine.changes == []
        assert server.service.live.options.stream_interval == 1
        server.line.died("It was killed.")
        response = await server.http.post(
            "/set_internal_state", json={"server_args": {"stream_interval": 5}}
        )
        assert response.status_code == 503
        assert server.service.live.options.stream_interval == 1, "the engine has not heard of it"

    serve(scenario, live=Options())


def test_the_request_log_can_be_turned_on(
    serve: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: Any) -> None:
        async def received() -> int:
            caplog.clear()
            with caplog.at_level(logging.INFO):
                await server.generate(text="ab", sampling_params={"max_new_tokens": 2})
            return sum(record.message.startswith("Receive") for record in caplog.records)

        counts = []
        for value in (False, True, False):
            await server.service.live.change({"log_requests": value}, by="test")
            counts.append(await received())
        assert counts == [0, 1, 0]

    serve(scenario, live=Options())


def test_changes_take_turns(serve: Callable[..., None]) -> None:
    async def scenario(server: Any) -> None:
        await asyncio.gather(
            *(server.service.live.change({"stream_interval": n}, by="test") for n in range(2, 9))
        )
        found = [(each.options[0].old, each.options[0].new) for each in server.engine.changes]
        assert found == [(n, n + 1) for n in range(1, 8)]

    serve(scenario, live=Options())


def test_the_command_prints_old_and_new_values(
    http_url: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    url = http_url(engine, live=Options(), api_key="secret")
    call = ["set", url, "--why", "a=b", "stream_interval=5", "log_requests=true"]
    assert main(call) == 1
    assert "refused the API key" in capsys.readouterr().err
    call += ["--api-key", "secret"]
    assert main(call) == 0
    assert capsys.readouterr().out == "stream_interval: 1 -> 5\nlog_requests: false -> true\n"
    assert engine.changes[0].why == "a=b"
    assert main(call) == 0
    assert capsys.readouterr().out == "Nothing changes, because these are already the values.\n"
    assert main(["set", url, "--api-key", "secret", "nothing=1"]) == 1
    assert capsys.readouterr().err == "setpoint: error: unknown option nothing.\n"
    assert main(["set", url, "--api-key", "secret", "stream_interval=99"]) == 0
    assert "warning: stream_interval=99 (rather high)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set"], "name a server and what to change"),
        (["set", "--why", "x"], "name a server and what to change"),
        (["set"], "setpoint set URL lists the options that can change"),
        (["set", "127.0.0.1:1"], "did you mean http://127.0.0.1:1?"),
        (["top", "localhost:1"], "did you mean http://localhost:1?"),
        (["doctor", "127.0.0.1:1"], "did you mean http://127.0.0.1:1?"),
        (
            ["set", "http://127.0.0.1:1", "a"],
            "changes are written NAME=VALUE, and 'a' has no value.",
        ),
        (
            ["set", "--url", "http://127.0.0.1:1", "max_running_requests", "0"],
            "changes are written NAME=VALUE: max_running_requests=0.",
        ),
        (["set", "http://127.0.0.1:1", "a", "0"], "changes are written NAME=VALUE: a=0."),
        (["set", "foo"], "foo is not a URL: it must begin with http:// or https://."),
        (["chat", "--base-url", "foo"], "foo is not a URL: it must begin with http:// or https://"),
        (["doctor", "--explain"], "such as seq-cap, instead of diagnosing; --explain list lists"),
        (["set", "http://127.0.0.1:1", "a=1", "a=2"], "a is given twice."),
        (["set", "http://127.0.0.1:1", "a=1", "--whi", "x"], "--whi"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_url_may_stand_behind_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Red before: the first change was taken for a second URL."""
    assert main(["set", "--url", "http://127.0.0.1:1", "a=1", "b=2"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["set", "http://127.0.0.1:1", "a=1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_without_an_assignment_it_lists_what_can_be_set(
    http_url: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Red before: an error, and no command told the names."""
    values = {field.name: field.default for field in LIVE}
    values |= {"chunked_prefill_size": 512, "log_requests": True, "max_queued_requests": None}
    why = [{"field": "chunked_prefill_size", "value": 512, "why": "fits the cores", "warn": False}]
    url = http_url(FakeEngine(), live=Options(), server_info=values | {"decisions": why})
    assert main(["set", url]) == 0
    shown = capsys.readouterr().out
    listed = re.findall(r"^(\w+) = (.*)$", shown, re.MULTILINE)
    assert [name for name, _ in listed] == [field.name for field in LIVE]
    shown_size = dict(listed)["chunked_prefill_size"]
    assert shown_size == "512 (the default is none; fits the cores)"
    assert dict(listed)["log_requests"] == "true (the default is false)"
    assert dict(listed)["max_queued_requests"] == "none"
    assert dict(listed)["stream_interval"] == "1", "not marked: it has its default"
    paragraphs = {text.split(" = ")[0]: " ".join(text.split()) for text in shown.split("\n\n")}
    for name, allowed in (
        ("chunked_prefill_size", "A whole number of at least -1."),
        ("log_requests", "true or false."),
        ("log_level", "One of debug, info, warning, error, critical."),
        ("num_continuous_decode_steps", "A whole number from 1 to 1000."),
        ("prefill_delayer_token_usage_low_watermark", "A number from 0 to 1."),
        ("default_priority_value", "A whole number."),
    ):
        assert paragraphs[name].endswith(allowed), paragraphs[name]
        (field,) = (each for each in LIVE if each.name == name)
        assert " ".join(field.about.meaning.split()) in paragraphs[name]
    assert engine_changes(url) == why


def engine_changes(url: str) -> list[Any]:
    """The decisions that changes have left."""
    return list(httpx.get(f"{url}/server_info", timeout=PATIENCE_S).json().get("decisions", []))


class OtherServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"max_running_requests": 3}')

    def log_message(self, *args: Any) -> None: ...


def test_a_list_of_what_is_no_setpoint_server_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert main(["set", f"http://127.0.0.1:{server.server_port}"]) == 1
        thread.join()
    assert "is it a Setpoint server?" in capsys.readouterr().err
