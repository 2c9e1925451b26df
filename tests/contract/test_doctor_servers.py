"""The doctor at a server's URL: Setpoint's, SGLang's of several versions, and what is none."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_doctor_route import INFO, capped

from setpoint.core.errors import SourceError
from setpoint.doctor.observations import Observations
from setpoint.doctor.readers import pages
from setpoint.doctor.readers.sources import observe_sources
from setpoint.doctor.readers.watched import Watched
from setpoint.launch.parent.doctor import ServerDoctor
from setpoint_testing.fake_engine import FakeEngine

Page = tuple[int, str] | Callable[[int], str]
"""A status and a body, or the body of the n-th answer."""


@contextmanager
def server(routes: dict[str, Page], *, key: str = "") -> Iterator[str]:
    """Answers so on a port of its own; 404 for all else, 401 without the key."""
    counts: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            page = routes.get(path, (404, "Not Found"))
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                page = (401, "Unauthorized")
            counts[path] = counts.get(path, -1) + 1
            status, body = page if isinstance(page, tuple) else (200, page(counts[path]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments: object) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def watched(url: str, seconds: float = 0.2) -> Observations:
    (seen,) = observe_sources([url], seconds=seconds)
    return seen


SGLANG = {
    "version": "0.5.2",
    "model_path": "m",
    "device": "cuda",
    "max_running_requests": 48,
    "max_total_num_tokens": 5000,
    "chunked_prefill_size": 8192,
    "schedule_conservativeness": 1.0,
    "internal_states": [{"memory_usage": {"weight": 15.1, "kvcache": 30.0, "graph": 0.7}}],
}


def metrics_page(number: int) -> str:
    return (
        f'sglang:num_running_reqs{{tp_rank="0"}} {40 + number}\nsglang:num_queue_reqs 12\n'
        f'sglang:token_usage{{tp_rank="0"}} 0.5\n'
    )


def test_a_setpoint_server_tells_its_moments(http_url: Callable[..., str]) -> None:
    engine = FakeEngine(max_running=2, moments=capped(60))
    url = http_url(engine, server_info=INFO, make_doctor=ServerDoctor)
    seen = watched(url, seconds=0.5)
    (source,) = seen.sources
    assert (source.kind, source.generation) == ("server", "Setpoint 1.2.3")
    assert seen.facts.max_total_num_tokens == 1000
    assert seen.ranks[0].moments[-1].refusals == {"no_slot": 50, "blocked": 650}


def test_a_watch_begins_with_what_the_server_remembers(http_url: Callable[..., str]) -> None:
    engine = FakeEngine(max_running=2, moments=capped(60))
    watch = Watched([http_url(engine, server_info=INFO, make_doctor=ServerDoctor)])
    for _ in range(2):
        (seen,) = watch.look(seconds=0.1)
        assert [moment.at for moment in seen.ranks[0].moments] == [each.at for each in capped(60)]
    engine.moments += capped(1, at=1060.0)
    (seen,) = watch.look(seconds=0.1)
    assert len(seen.ranks[0].moments) == 61


def test_an_sglang_server_with_metrics() -> None:
    routes: dict[str, Page] = {
        "/get_server_info": (200, json.dumps(SGLANG)),
        "/metrics": metrics_page,
    }
    with server(routes) as url:
        seen = watched(url, seconds=2.1)
        page = watched(f"{url}/metrics")
    assert [source.kind for source in seen.sources] == ["server"]
    assert seen.facts.max_running_requests == 48
    assert (seen.facts.weights_gb, seen.facts.version) == (15.1, "0.5.2")
    assert 2 <= len(seen.ranks[0].moments) <= 4
    assert [moment.running for moment in seen.ranks[0].moments][:2] == [41, 42]
    assert [source.kind for source in page.sources] == ["metrics"]


def test_an_sglang_server_without_metrics_tells_its_loads() -> None:
    load = {
        "dp_rank": 0,
        "num_running_reqs": 48,
        "num_waiting_reqs": 7,
        "num_used_tokens": 2500,
        "token_usage": 0.5,
        "gen_throughput": 900.0,
    }
    routes: dict[str, Page] = {
        "/server_info": (200, json.dumps(SGLANG)),
        "/v1/loads": (200, json.dumps({"loads": [load]})),
    }
    with server(routes) as url:
        seen = watched(url, seconds=1.2)
    moments = seen.ranks[0].moments
    assert len(moments) == 2
    assert (moments[0].running, moments[0].queue, moments[0].usage) == (48, 7, 0.5)
    assert "--enable-metrics" in seen.sources[0].notes[0]


def test_an_older_one_tells_them_at_another_place() -> None:
    load = [
        {"dp_rank": rank, "num_reqs": 50, "num_waiting_reqs": waiting, "num_tokens": 2500}
        for rank, waiting in ((0, 2), (1, 0))
    ]
    routes: dict[str, Page] = {
        "/get_server_info": (200, json.dumps(SGLANG)),
        "/get_load": (200, json.dumps(load)),
    }
    with server(routes) as url:
        seen = watched(url, seconds=0.1)
    found = {rank.name: rank.moments[0] for rank in seen.ranks}
    assert (found["DP0"].running, found["DP0"].queue, found["DP0"].usage) == (48, 2, None)
    assert (found["DP1"].running, found["DP1"].usage) == (50, 0.5)


def test_a_key_is_asked_for_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    routes: dict[str, Page] = {"/metrics": metrics_page}
    with server(routes, key="secret") as url:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(SourceError, match=r"needs an API key.*OPENAI_API_KEY") as raised:
            watched(url)
        assert "secret" not in str(raised.value)
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert watched(f"{url}/metrics").ranks


def test_a_server_that_goes_away_leaves_what_was_seen() -> None:
    def page(number: int) -> str:
        return metrics_page(number) if number < 2 else "gone"

    with server({"/metrics": page}) as url:
        seen = watched(f"{url}/metrics", seconds=3.0)
    assert len(seen.ranks[0].moments) == 1
    assert "Watching ended early: " in seen.sources[0].notes[0]


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ({}, "not a server of SGLang or Setpoint"),
        ({"/doctor": (200, "<html>")}, "does not answer with JSON"),
        ({"/doctor": (500, "oops")}, "answered with status 500"),
        ({"/server_info": (200, "{}")}, "shows no load"),
        ({"/doctor": (200, '{"moments": 3}')}, "another shape"),
        ({"/doctor": (200, "[" * 100_000)}, "does not answer with JSON"),
    ],
)
def test_what_is_no_such_server_is_named_in_one_sentence(
    routes: dict[str, Page], words: str
) -> None:
    with server(routes) as url, pytest.raises(SourceError, match=words) as raised:
        watched(url)
    assert "\n" not in str(raised.value)
    assert url in str(raised.value)


def test_nobody_there_and_nobody_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for source in (url, f"{url}/metrics"):
            with pytest.raises(SourceError, match=r"did not answer within 0\.2 s"):
                watched(source)
    with pytest.raises(SourceError, match="cannot be reached"):
        watched(url)
    for wrong in ("http://", "http://[1", "https://exa mple/metrics"):
        with pytest.raises(SourceError, match="is not a URL"):
            watched(wrong)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_a_server_that_drips_does_not_hold_the_doctor(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "TIMEOUT_S", 0.3)

    gone = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        try:
            while True:
                writer.write(b"#\n" if head.endswith(b"\n") else b"#")
                await writer.drain()
                await asyncio.sleep(0.05)
        except ConnectionError:
            writer.close()
            gone.set()

    async def main() -> None:
        dripping = await asyncio.start_server(drip, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{dripping.sockets[0].getsockname()[1]}/metrics"
        with pytest.raises(SourceError, match=r"did not answer within"):
            await asyncio.to_thread(watched, url)
        await asyncio.wait_for(gone.wait(), 20)
        dripping.close()

    asyncio.run(main())
