"""The console's routes and its stream of events, on a fake engine (docs/console.md)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from conftest import Server, make_service
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.moments import Moment
from setpoint.frontend.console.broadcast import MAX_BEHIND_BYTES, Broadcast
from setpoint.frontend.console.event_feed import MAX_VIEWERS, ConsoleFeed
from setpoint.frontend.console.server_facts import facts_of
from setpoint.frontend.console.static_pages import STATIC
from setpoint.frontend.live_options import LiveOption
from setpoint.frontend.telemetry.watching import Lane
from setpoint.ipc.line import EngineLine
from setpoint_testing.fake_engine import FakeEngine
from setpoint_testing.server_process import PATIENCE_S, wait_until

REPOSITORY = Path(__file__).parents[2]
Serve = Callable[..., None]


class ScriptedWatch:
    def __init__(self, *moments: Moment) -> None:
        self.lanes: dict[int | None, Lane] = {None: Lane()}
        self.add(*moments)
        self.report: bytes | None = None
        self.num_followers = 0

    def add(self, *moments: Moment, rank: int | None = None) -> None:
        limits = ["seq-cap" if moment.at >= 2 else None for moment in moments]
        self.lanes.setdefault(rank, Lane()).add(moments, limits)

    @contextmanager
    def followed(self) -> Iterator[None]:
        self.num_followers += 1
        yield
        self.num_followers -= 1


@asynccontextmanager
async def feeding(watch: ScriptedWatch, **options: Any) -> AsyncIterator[ConsoleFeed]:
    engine = options.pop("engine", None) or FakeEngine()
    service = make_service(engine, server_info={"decisions": [], "version": "9"}, **options)
    service.engine.attach(EngineLine(engine))
    feed = ConsoleFeed(service, [service], watch)
    yield feed
    feed.broadcast.end()
    service.engine.close()
    await asyncio.sleep(0)


def events(chunk: bytes) -> list[tuple[str, Any]]:
    """The events in bytes of the stream, without comments."""
    found = []
    for block in chunk.decode().split("\n\n"):
        if block.startswith("event: "):
            name, data = block.removeprefix("event: ").split("\ndata: ")
            found.append((name, json.loads(data)))
    return found


def test_a_viewer_gets_the_past_and_then_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("setpoint.frontend.console.event_feed.EVERY_S", 0.01)

    async def main() -> None:
        watch = ScriptedWatch(Moment(at=1.0, running=3.0), Moment(at=2.0, usage=1 / 3))
        watch.report = b'{"verdict":"seq-cap"}'
        async with feeding(watch, served_model_name="org/tiny") as feed:
            viewer = await feed.join()
            first = events(await viewer.take())
            assert [name for name, _ in first] == ["state", "engines", "moment", "moment"]
            del first[1]
            assert first[0][1]["model"] == "org/tiny"
            assert first[0][1]["limits"]["max_running_requests"] == 1000
            assert first[1][1] == {"at": 1.0, "running": 3.0}
            assert first[2][1] == {"at": 2.0, "usage": 0.3333, "limit": "seq-cap"}
            found = events(await viewer.take())
            assert found[0] == ("doctor", {"verdict": "seq-cap"})
            assert watch.num_followers == 1
            watch.add(Moment(at=3.0))
            while not (found := events(await viewer.take())):
                pass
            assert found == [("moment", {"at": 3.0, "limit": "seq-cap"})]
            later = await feed.join()
            names = [name for name, _ in events(await later.take())]
            assert names == ["state", "engines", "moment", "moment", "moment", "doctor"]
            for each in (viewer, later):
                feed.broadcast.leave(each)
            await asyncio.sleep(0.05)
            assert watch.num_followers == 0, "nobody watches, so nothing is gathered"

    asyncio.run(main())


def test_several_engines_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("setpoint.frontend.console.event_feed.EVERY_S", 0.01)

    async def main() -> None:
        watch = ScriptedWatch(Moment(at=1.0, running=5.0))
        watch.add(Moment(at=1.25, running=3.0), rank=0)
        watch.add(Moment(at=1.5, running=2.0), rank=1)
        async with feeding(watch) as feed:
            client = feed._service.engine
            client.lives.recovers = True
            second = EngineLine(FakeEngine(), rank=1)
            client.attach(second)
            viewer = await feed.join()
            first = events(await viewer.take())
            moments = [content for name, content in first if name == "moment"]
            assert [each.get("dp_rank") for each in moments] == [None, 0, 1]
            (standings,) = [content for name, content in first if name == "engines"]
            assert [each["state"] for each in standings] == ["ready", "ready"]
            for line, states in (
                (second, ["ready", "restarting"]),
                (client.lines[0], ["restarting", "restarting"]),
            ):
                line.died("It was ended by SIGKILL.")
                found: list[tuple[str, Any]] = []
                while "engines" not in dict(found):
                    found += events(await viewer.take())
                standings = dict(found)["engines"]
                assert [each["state"] for each in standings] == states
                assert standings[1]["death"] == "It was ended by SIGKILL."
            # Who comes while no engine is ready sees what is known.
            late = await feed.join()
            assert dict(events(await late.take()))["state"]["model"] == "org/tiny"
            client.attach(EngineLine(FakeEngine(), rank=1))
            found = []
            while "engines" not in dict(found):
                found += events(await viewer.take())
            assert dict(found)["engines"][1]["num_restarts"] == 1
            for each in (viewer, late):
                feed.broadcast.leave(each)

    asyncio.run(main())


def test_the_facts_say_which_options_can_change_now() -> None:
    async def main() -> None:
        names = ("schedule_policy", "port")
        decisions = [{"field": name, "value": 1, "why": "default", "warn": False} for name in names]
        described = {"schedule_policy": LiveOption("Order of the queue.", ("fcfs", "lpm"))}
        service = make_service(
            FakeEngine(), server_info={"decisions": decisions}, described=described
        )
        service.engine.attach(EngineLine(FakeEngine()))
        policy, port = (await facts_of(service, [service]))["options"]
        assert policy["live"] == {"meaning": "Order of the queue.", "choices": ("fcfs", "lpm")}
        assert "live" not in port
        service.engine.close()

    asyncio.run(main())


def test_moments_that_the_watch_forgot_are_forgotten() -> None:
    async def main() -> None:
        watch = ScriptedWatch(*(Moment(at=float(at)) for at in range(10)))
        async with feeding(watch) as feed:
            feed.broadcast.leave(await feed.join())
            await asyncio.sleep(0)
            watch.lanes[None].moments = deque(Moment(at=float(at)) for at in range(8, 12))
            feed._look_at_moments()
            assert [at for at, _ in feed._moments[None]] == [8.0, 9.0, 10.0, 11.0]

    asyncio.run(main())


def test_there_is_a_most_number_of_viewers() -> None:
    async def main() -> None:
        async with feeding(ScriptedWatch()) as feed:
            for _ in range(MAX_VIEWERS):
                await feed.join()
            with pytest.raises(RequestError, match="open already"):
                await feed.join()

    asyncio.run(main())


def test_viewers_who_come_at_once_are_no_more_either() -> None:
    async def main() -> None:
        async with feeding(ScriptedWatch()) as feed:
            joins = (feed.join() for _ in range(MAX_VIEWERS + 20))
            results = await asyncio.gather(*joins, return_exceptions=True)
            assert len(feed.broadcast) == MAX_VIEWERS
            assert sum(isinstance(each, RequestError) for each in results) == 20
            assert feed._num_joining == 0

    asyncio.run(main())


def test_the_stream_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("setpoint.frontend.console.event_feed.EVERY_S", 0.01)

    async def main() -> None:
        async with feeding(ScriptedWatch()) as feed:
            viewer = await feed.join()
            feed._service.engine.shutdown()
            while await viewer.take():
                pass
            with pytest.raises(EngineDeadError):
                await feed.join()

    asyncio.run(main())


def test_a_viewer_who_reads_too_slowly_is_dropped() -> None:
    async def main() -> None:
        broadcast = Broadcast()
        slow, quick = broadcast.join(b"past"), broadcast.join()
        for _ in range(MAX_BEHIND_BYTES // 1000 + 1):
            broadcast.publish(b"x" * 1000)
            assert await quick.take()
        assert slow.is_over
        assert await slow.take() == b"", "what waited is not kept"
        assert len(broadcast) == 1

    asyncio.run(main())


def test_a_viewer_who_reads_nothing_loses_the_connection(
    http_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write that waits for this viewer would wait as long as its connection is there."""
    monkeypatch.setattr("setpoint.frontend.console.event_feed.EVERY_S", 0.01)
    monkeypatch.setattr(
        "setpoint.frontend.console.event_feed.ALIVE", b":" + b"x" * 200_000 + b"\n\n"
    )
    address = urlsplit(http_url(FakeEngine(), server_info={"decisions": []}))
    with socket.socket() as viewer:
        viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        viewer.connect((address.hostname, address.port))
        viewer.sendall(b"GET /console/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        viewer.recv(1)
        name = viewer.getsockname()

        def is_connected() -> bool:  # the server is in this process
            return any(each.raddr == name for each in psutil.Process().net_connections("tcp"))

        assert is_connected()
        wait_until(lambda: not is_connected(), every_s=0.1)


def test_the_page_has_its_files_and_a_strict_policy(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        page = await server.http.get("/console")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<script(?![^>]* src=)|\son\w+=|style=", page.text), "inline"
        named = set(re.findall(r'(?:src|href)="(/console/[^"]+)"', page.text))
        assert len(named) == 5
        for path in {*named, *(f"/console/{path.name}" for path in STATIC.iterdir())}:
            answer = await server.http.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == policy
            again = await server.http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        missing = await server.http.get("/console/dialect.py")
        assert missing.status_code == 404
        assert "The page is at /console" in missing.json()["error"]["message"]
        outside = await server.http.get("/console/..%2Fdialect.py")
        assert outside.status_code == 404

    serve(scenario)


def test_modules_import_what_there_is() -> None:
    for path in STATIC.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert (STATIC / name).exists(), f"{path.name} imports {name}"


def test_the_chart_library_is_what_the_page_about_it_says() -> None:
    page = (REPOSITORY / "docs/console.md").read_text()
    rows = re.findall(r"\| `(uPlot\.[\w.]+)` \| `(\w{64})` \|", page)
    assert {name for name, _ in rows} == {
        path.name for path in STATIC.glob("uPlot*") if path.suffix != ".txt"
    }
    version = re.findall(r"uPlot\) (\d\S+) \(MIT", page)[0]
    assert f"(v{version})" in (STATIC / "uPlot.iife.min.js").read_text().partition("\n")[0]
    for name, expected in rows:
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == expected, name
    assert "MIT" in (STATIC / "uPlot.LICENSE.txt").read_text()


def test_the_package_contains_the_page() -> None:
    import fnmatch
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["setpoint"]
    for path in STATIC.iterdir():
        name = str(path.relative_to(REPOSITORY / "src/setpoint"))
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_with_a_key_the_page_is_open_and_the_stream_is_not(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        for path in ("/console", "/console/app.js", "/console/uPlot.iife.min.js"):
            assert (await server.http.get(path)).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = await server.http.get("/console/stream", headers=headers)
            assert refused.status_code == 401
            assert "API key" in refused.json()["error"]["message"]
        assert (await server.http.get("/console/else")).status_code == 401

    serve(scenario, api_key="k")


def test_a_local_server_refuses_pages_of_other_sites(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        for path in ("/console", "/console/stream"):
            answer = await server.http.get(path, headers={"host": "rebound.example.com"})
            assert answer.status_code == 403

    serve(scenario, local_only=True)


def test_the_stream_over_http(http_url: Callable[..., str]) -> None:
    """A real connection: events arrive while it is open, and a viewer who leaves is forgotten."""
    url = http_url(FakeEngine(), server_info={"decisions": []}, api_key="k")
    headers = {"authorization": "Bearer k"}
    with httpx.stream(
        "GET", f"{url}/console/stream", headers=headers, timeout=PATIENCE_S
    ) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["cache-control"] == "no-store"
        lines = stream.iter_lines()
        assert next(lines) == "event: state"
        assert '"k"' not in next(lines)
        httpx.post(
            f"{url}/generate",
            headers=headers,
            json={"text": "secret", "rid": "r1", "sampling_params": {"max_new_tokens": 2}},
            timeout=PATIENCE_S,
        ).raise_for_status()
        seen = ""
        for line in lines:
            seen += line
            if "r1" in line:
                break
        assert "event: requests" in seen
        assert "secret" not in seen
