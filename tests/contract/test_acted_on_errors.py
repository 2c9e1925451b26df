"""Errors have the words on which clients act: they shorten a conversation, change the transport, or
ask for another key or model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from answers import says

from setpoint.core.messages import Finish

Serve = Callable[..., None]
LONG = [{"role": "user", "content": "a" * 300}]
PROMPTS = {
    "/v1/chat/completions": {"messages": LONG},
    "/v1/completions": {"prompt": "a" * 300},
    "/v1/responses": {"input": "a" * 300},
    "/generate": {"text": "a" * 300},
    "an output that is too long": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 250,
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", PROMPTS)
def test_a_context_that_is_too_long_has_openais_code(serve: Serve, case: str, stream: bool) -> None:
    """Red before: the code was the number 400."""

    async def scenario(server: Any) -> None:
        route = case if case.startswith("/") else "/v1/chat/completions"
        answer = await server.http.post(route, json={**PROMPTS[case], "stream": stream})
        assert (answer.status_code, answer.json()["code"]) == (400, 400)
        assert answer.json()["error"]["code"] == "context_length_exceeded"

    serve(scenario)


def test_openais_client_sees_the_code(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await server.openai.chat.completions.create(model="default", messages=LONG)
        assert caught.value.code == "context_length_exceeded"
        assert "context_length_exceeded" in str(caught.value)  # what LangChain looks for

    serve(scenario)


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(("length", "words"), [(300, "prompt is too long: "), (9000, "at least")])
def test_a_prompt_that_is_too_long_has_anthropics_words(
    serve: Serve, route: str, length: int, words: str
) -> None:
    """Red before: none of these words, and a count of 9,000 letters was refused in other ones. A
    count of 300 was and is given."""

    async def scenario(server: Any) -> None:
        messages = [{"role": "user", "content": "a" * length}]
        body = {"model": "default", "max_tokens": 9, "messages": messages}
        answer = await server.http.post(route, json=body)
        if answer.status_code == 200:  # a count has no limit of its own
            assert route.endswith("count_tokens")
            return
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith("prompt is too long: ")
        number, _, rest = (
            error["message"].removeprefix("prompt is too long: ").partition(" tokens > ")
        )
        assert int(number) > int(rest.partition(" maximum")[0]) == 250
        assert words in error["message"]

    serve(scenario, says("ok"))


def test_codes_that_follow_from_the_status(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        async def code(method: str, path: str, **more: Any) -> Any:
            answer = await server.http.request(method, path, **more)
            return answer.status_code, answer.json()["error"]["code"]

        key = {"authorization": "Bearer right"}
        body = {"messages": [{"role": "user", "content": "a"}]}
        path = "/v1/chat/completions"
        assert await code("POST", path, json=body) == (401, "invalid_api_key")
        assert await code("GET", "/v1/models/nosuch", headers=key) == (404, "model_not_found")
        assert await code("GET", "/v1/nosuch", headers=key) == (404, "unknown_url")
        assert await code("POST", path, json={}, headers=key) == (400, None)
        server.engine.refuse = lambda request: Finish("abort", message="full", status_code=503)
        assert await code("POST", path, json=body, headers=key) == (503, None)
        server.engine.refuse = lambda request: Finish("abort", message="much", status_code=429)
        assert await code("POST", path, json=body, headers=key) == (429, "rate_limit_exceeded")

    serve(scenario, api_key="right")


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/chat/completions", "/generate", "/api/chat"]
)
def test_a_websocket_is_told_to_use_http(serve: Serve, path: str) -> None:
    """Red before: 405, after which Codex tries the WebSocket again."""

    async def scenario(server: Any) -> None:
        handshake = {
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        answer = await server.http.get(path, headers=handshake)
        assert answer.status_code == 426
        assert answer.headers["upgrade"] == "HTTP/1.1"
        assert "WebSocket" in answer.text
        assert (await server.http.get(path)).status_code == 405
        assert (await server.http.get("/v1/nosuch", headers=handshake)).status_code == 404

    serve(scenario)


def test_models_in_anthropics_form(serve: Serve) -> None:
    """Red before: OpenAI's form, which Anthropic's clients cannot read."""

    async def scenario(server: Any) -> None:
        version = {"anthropic-version": "2023-06-01"}
        listed = (await server.http.get("/v1/models", headers=version)).json()
        (card,) = listed.pop("data")
        assert listed == {"has_more": False, "first_id": "org/tiny", "last_id": "org/tiny"}
        assert card.pop("created_at").endswith("Z")
        assert card == {
            "type": "model",
            "id": "org/tiny",
            "display_name": "org/tiny",
            "max_input_tokens": 250,
            "max_tokens": 256,
        }
        one = (await server.http.get("/v1/models/org/tiny", headers=version)).json()
        assert (one["type"], one["id"]) == ("model", "org/tiny")
        missing = await server.http.get("/v1/models/nosuch", headers=version)
        assert missing.status_code == 404
        assert (missing.json()["type"], missing.json()["error"]["type"]) == (
            "error",
            "not_found_error",
        )
        assert (await server.http.get("/v1/models")).json()["object"] == "list"

    serve(scenario)


def test_a_message_has_a_refusal(serve: Serve) -> None:
    """OpenAI's specification requires the key of a whole message, not of a stream's parts. Red
    before: no such key."""

    async def scenario(server: Any) -> None:
        body = {"messages": [{"role": "user", "content": "a"}]}
        answer = await server.http.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["refusal"] is None

    serve(scenario, says("ok"))


@pytest.mark.parametrize("logprobs", [0, 1, 3])
def test_the_sampled_token_is_among_the_top_logprobs(serve: Serve, logprobs: int) -> None:
    """OpenAI: there may be one more than asked for. Red before, with 0
    alone: an empty object."""

    async def scenario(server: Any) -> None:
        body = {"prompt": "ab", "logprobs": logprobs, "max_tokens": 3, "echo": True}
        answer = await server.http.post("/v1/completions", json=body)
        shown = answer.json()["choices"][0]["logprobs"]
        for token, value, top in zip(
            shown["tokens"][1:], shown["token_logprobs"][1:], shown["top_logprobs"][1:], strict=True
        ):
            assert token in top
            assert top[token] >= value
            assert logprobs <= len(top) <= logprobs + 1

    serve(scenario)
