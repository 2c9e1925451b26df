"""What people meet first: wrong paths, methods and headers are answered with what to do instead;
HEAD is answered like GET."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., None]
CHAT = "/v1/chat/completions"
CHATS = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "a\x01\u200bb"}}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/messages", "/v1/messages"),
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/v1/chat/complete", CHAT),
        ("/completions", "/v1/completions"),
        ("/v1/completion", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/model", "/v1/models"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/generate", "/generate"),
        ("/generat", "/generate"),
        ("/healthz", "/health"),
        ("/v1/health", "/health"),
    ],
)
def test_a_missing_route_names_the_one_that_was_meant(serve: Serve, path: str, meant: str) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(path, json={})
        assert response.status_code == 404
        assert (
            response.json()["error"]["message"]
            == f"There is no route {path}; did you mean {meant}?"
        )

    serve(scenario)


@pytest.mark.parametrize(
    "path", ["/nothing/here", "/v1/audio/speech", "/favicon.ico", "/%0aforged"]
)
def test_a_missing_route_like_no_other_names_the_way(serve: Serve, path: str) -> None:
    async def scenario(server: Any) -> None:
        message = (await server.http.get(path)).json()["error"]["message"]
        assert message.startswith("There is no route /")
        assert message.endswith(f". Chats go to {CHAT}; /docs lists every route.")
        assert message.isprintable()

    serve(scenario)


def test_a_wrong_method_names_the_right_one(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.get(CHAT)
        assert (response.status_code, response.json()["error"]["message"]) == (
            405,
            f"{CHAT} does not take GET; use POST.",
        )
        assert (await server.http.delete("/generate")).json()[
            "message"
        ] == "/generate does not take DELETE; use POST or PUT."

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "method", "allow"),
    [
        ("/flush_cache", "OPTIONS", "GET, POST"),
        ("/flush_cache", "DELETE", "GET, POST"),
        ("/generate", "GET", "POST, PUT"),
        ("/v1/models", "POST", "GET, HEAD"),
        ("/v1/models/tiny", "PUT", "GET, HEAD"),
        ("/console", "POST", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_answered_with_all_that_the_path_has(
    serve: Serve, path: str, method: str, allow: str
) -> None:
    """Red before: the answer had those of one route of the path."""

    async def scenario(server: Any) -> None:
        response = await server.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allow)

    serve(scenario)


def test_a_page_may_be_asked_for_its_head(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for path in ("/console", "/console/style.css"):
            found = await server.http.get(path)
            head = await server.http.head(path)
            assert (head.status_code, head.headers["etag"]) == (200, found.headers["etag"])

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/server_info/", "/server_info"),
        ("/server_info//?a=b%20c", "/server_info?a=b%20c"),
        ("/console/", "/console"),
    ],
)
def test_a_slash_too_many_leads_to_the_route_on_the_same_server(
    serve: Serve, path: str, place: str
) -> None:
    """Red before: it led to the host that the client had named, and from https to http."""

    async def scenario(server: Any) -> None:
        response = await server.http.get(path, headers={"host": "evil.com"})
        assert (response.status_code, response.headers["location"]) == (307, place)
        assert (await server.http.get("http://test//evil.com/server_info/")).status_code == 404

    serve(scenario)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/ready",
        "/ping",
        "/model_info",
        "/server_info",
        "/v1/models",
        "/v1/models/org/tiny",
    ],
)
def test_head_is_answered_like_get(serve: Serve, path: str) -> None:
    async def scenario(server: Any) -> None:
        head, get = await server.http.head(path), await server.http.get(path)
        assert head.status_code == get.status_code == 200
        assert head.headers.get("content-type") == get.headers.get("content-type")

    serve(scenario)


def test_a_page_without_a_content_type_is_told_which_to_add(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        headers = {"content-type": "text/plain", "origin": "http://a.example"}
        response = await server.http.post(CHAT, content=b'{"messages": []}', headers=headers)
        assert (
            response.json()["error"]["message"]
            == "Add the header 'Content-Type: application/json' to the request: a browser sent it"
            " with the content type text/plain, as a page of any site can make it do."
        )

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "a\x01\u200bb", "content": "x"}]}),
        (CHAT, {"messages": CHATS, "response_format": {"type": "a\x01\u200bb"}}),
        (CHAT, {"messages": CHATS, "tools": [TOOL]}),
        ("/generate", {"text": "x", "sampling_params": {"a\x01\u200bb": 1}}),
        ("/v1/responses", {"input": "x", "previous_response_id": "a\x01\u200bb"}),
    ],
)
def test_what_a_client_wrote_is_escaped_once(serve: Serve, path: str, body: Any) -> None:
    """Red before: twice, and a third time by JSON."""

    async def scenario(server: Any) -> None:
        response = await server.http.post(path, json=body)
        assert response.status_code == 400
        assert r"'a\x01\u200bb'" in response.json()["error"]["message"]

    serve(scenario)
