"""A web page must not drive a server of one's own machine; the machine's own programs and pages
may, as SGLang's clients do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., None]
EVIL = "https://evil.example"


async def ask(server: Any, **headers: str) -> list[int]:
    """Statuses of what a page might want: an answer, everybody's end, a cold cache, a look."""
    return [
        (await server.http.post("/generate", json={"text": "a"}, headers=headers)).status_code,
        (
            await server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        ).status_code,
        (
            await server.http.post("/abort_request", json={"abort_all": True}, headers=headers)
        ).status_code,
        (await server.http.post("/flush_cache", headers=headers)).status_code,
        (await server.http.get("/server_info", headers=headers)).status_code,
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL},
        {"origin": "http://evil.example:30000"},
        {"origin": "null"},
        {"origin": "http://localhost.evil.example"},
        {"origin": "http://127.0.0.1.evil.example"},
        {"origin": "http://[evil"},
        {"origin": "nonsense"},
        {"origin": "ftp://127.0.0.1"},
        {"origin": "HTTPS://evil.example"},
        {"origin": "http://[::1].evil.example"},
        {"origin": "http://localhost@evil.example"},
        {"host": "[::1].evil.example"},
        {"host": "localhost@evil.example"},
        {"host": "evil.example/.localhost"},
        {"origin": "http://203.0.113.5"},
        {"host": "rebound.evil.example:30000"},
        {"host": "rebound.evil.example:30000", "origin": "http://rebound.evil.example:30000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "[evil"},
        {"host": "evil.example."},
    ],
    ids=str,
)
def test_a_page_from_elsewhere_is_refused(serve: Serve, headers: dict[str, str]) -> None:
    """Red before: https://evil.example ran /generate, /abort_request and /flush_cache."""

    async def scenario(server: Any) -> None:
        assert await ask(server, **headers) == [403] * 5
        assert not server.engine.submitted
        response = await server.http.post("/generate", json={"text": "a"}, headers=headers)
        assert "--api-key" in response.json()["message"]
        assert "access-control-allow-origin" not in response.headers

    serve(scenario, local_only=True)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1:8080"},
        {"origin": "http://[::1]:8080"},
        {"origin": "http://ui.localhost"},
        {"origin": "app://obsidian.md"},
        {"origin": "chrome-extension://abcdefgh"},
        {"host": "localhost:30000"},
        {
            "host": "127.0.0.1:30000",
            "origin": "http://127.0.0.1:30000",
            "sec-fetch-site": "same-origin",
        },
        {"host": "[::1]:30000"},
        {"host": "host.docker.internal:30000"},
        {"host": "my-machine:30000"},
        {"host": "192.168.1.5:30000"},
    ],
    ids=str,
)
def test_this_machines_programs_and_pages_are_served(serve: Serve, headers: dict[str, str]) -> None:
    async def scenario(server: Any) -> None:
        assert await ask(server, **headers) == [200] * 5

    serve(scenario, local_only=True)


def test_a_preflight_from_elsewhere_fails_and_a_local_one_does_not(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        wanted = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
        }
        assert (
            await server.http.options("/generate", headers={"origin": EVIL, **wanted})
        ).status_code == 403
        local = await server.http.options(
            "/generate", headers={"origin": "http://localhost:3000", **wanted}
        )
        assert local.status_code == 200
        assert local.headers["access-control-allow-headers"] == "content-type"

    serve(scenario, local_only=True)


def test_a_picture_that_flushes_the_cache(serve: Serve) -> None:
    """A browser sends no Origin with it, but says that it is for another site. Red before:
    /console/stream opened a stream for it."""

    async def scenario(server: Any) -> None:
        foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert (await server.http.get("/flush_cache", headers=foreign)).status_code == 403
        for route in ("/model_info", "/console/stream", "/metrics"):
            assert (await server.http.get(route, headers=foreign)).status_code == 403
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await server.http.get("/flush_cache", headers=link)).status_code == 403
        assert (await server.http.get("/model_info", headers=link)).status_code == 200
        assert (
            await server.http.get("/flush_cache", headers={"sec-fetch-site": "none"})
        ).status_code == 200  # typed by the user

    serve(scenario, local_only=True)


def test_a_key_opens_the_server_to_every_page_that_has_it(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        headers = {"origin": EVIL, "host": "models.example.org"}
        assert await ask(server, **headers) == [401] * 5
        assert await ask(server, **headers, authorization="Bearer secret") == [200] * 5

    serve(scenario, local_only=True, api_key="secret")


@pytest.mark.parametrize("options", [{}, {"api_key": "secret"}], ids=str)
def test_no_origin_is_reflected_with_credentials(serve: Serve, options: dict[str, Any]) -> None:
    """Red before: allow-credentials, with whatever origin was sent."""

    async def scenario(server: Any) -> None:
        headers = {"origin": EVIL, "cookie": "a=b", "authorization": "Bearer secret"}
        response = await server.http.post("/generate", json={"text": "a"}, headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers

    serve(scenario, **options)
