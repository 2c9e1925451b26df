"""Bad input gets the right status code and the one shape of errors, nothing reaches the engine, and
the server keeps serving."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from setpoint_testing.byte_tokenizer import VOCAB_SIZE

Serve = Callable[..., None]
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def type_of(answer: dict[str, Any]) -> str:
    """The ``type`` of an error, which has one shape on every route: SGLang's flat keys, and the
    same under ``error`` as OpenAI has it, whose ``code`` is a word or null."""
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    assert isinstance(answer["code"], int)
    assert answer == {"object": "error", **error, "code": answer["code"], "error": error}
    return str(error["type"])


@pytest.mark.cases(21)
@pytest.mark.parametrize(
    "body",
    [
        {"text": ""},
        {"input_ids": []},
        {"text": []},
        {},
        {"text": "a", "input_ids": [1]},
        {"text": "a" * 256},
        {"text": "a" * 251},
        {"text": "a", "sampling_params": {"max_new_tokens": 256}},
        {"text": "a", "sampling_params": {"min_new_tokens": 256, "max_new_tokens": None}},
        {"input_ids": [VOCAB_SIZE]},
        {"input_ids": [-1]},
        {"input_ids": [10**30]},
        {"input_ids": ["a"]},
        {"input_ids": [[1], 2]},
        {"text": 5},
        {"text": "a", "stream": "yes"},
        {"text": "a", "sampling_params": {"no_such_key": 1}},
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        {"text": "a", "sampling_params": {"temperature": "hot"}},
        {"text": "a", "sampling_params": {"top_p": 0}},
        {"text": "a", "sampling_params": {"regex": 1}},
        {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}},
        {"text": "a", "sampling_params": {"stop": ["x"] * 300}},
        {"text": "a", "sampling_params": {"stop": [""]}},
        {"text": "a", "sampling_params": {"logit_bias": {"x": 1}}},
        {"text": "a", "sampling_params": {"top_k": 10**30}},
        {"text": "a", "sampling_params": {"n": 10**9}},
        {"text": ["a", "b"], "sampling_params": [{}]},
        {"text": ["a", "b"], "rid": ["x", "x"]},
        {"text": "a", "rid": ""},
        {"text": "a", "rid": ["x", "y"]},
        {"text": "a", "return_logprob": True, "top_logprobs_num": -1},
        {"text": "a", "return_logprob": True, "token_ids_logprob": [VOCAB_SIZE]},
        {"text": "a", "return_logprob": True, "token_ids_logprob": [1] * 1001},
        {"text": "a", "return_logprob": True, "token_ids_logprob": [[0]]},
        {"text": "a", "return_logprob": True, "token_ids_logprob": [[0], [1]]},
        {"text": "a", "return_logprob": True, "logprob_start_len": -2},
        {"text": "a", "return_logprob": True, "logprob_start_len": 10**30},
        {"text": "abc", "return_logprob": True, "logprob_start_len": 4},
        {"text": "a", "image_data": "x.png"},
        {"text": "a", "lora_path": "adapter"},
    ],
)
def test_generate_refuses(serve: Serve, body: dict[str, Any]) -> None:
    async def scenario(server: Any) -> None:
        for stream in (False, True):
            response = await server.http.post("/generate", json={"stream": stream, **body})
            assert response.status_code == 400, response.text
            assert type_of(response.json()) == "BadRequestError"
        assert server.engine.submitted == []
        assert (await server.generate(text="a", sampling_params={"max_new_tokens": 1}))[
            "text"
        ] == "a"

    serve(scenario)


@pytest.mark.cases(23)
@pytest.mark.parametrize(
    "path", ["/generate", CHAT, "/v1/completions", "/tokenize", "/abort_request"]
)
@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'"text"', b'{"text": "\xff"}', b'{"text": "\\ud800"}', b'{"text": "a", "x": NaN}', b"[" * 100_000,
        b'{"temperature": 1e999}',
    ],
)  # fmt: skip
def test_malformed_bodies(serve: Serve, path: str, content: bytes) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        is_openai = path.startswith("/v1")
        kind = "invalid_request_error" if is_openai else "BadRequestError"
        assert type_of(response.json()) == kind

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/generate",
            {"sampling_params": {"repetition_penalty": 1e-300}},
            "repetition_penalty must be above 0 (at least 1e-20) and at most 2",
        ),
        (
            "/generate",
            {"sampling_params": {"logit_bias": {"5": 10**400}}},
            "logit_bias of token 5 must be between -1e+30 and 1e+30, got a number",
        ),
        (
            "/generate",
            {"sampling_params": {"logit_bias": {"5": -1e308}}},
            "logit_bias of token 5 must be",
        ),
        (
            "/generate",
            {"sampling_params": {"max_new_tokens": 1 << 31}},
            "max_new_tokens must be between 0 and 2147483647, got 2147483648.",
        ),
        ("/generate", {"priority": 1 << 63}, "priority must be between"),
        ("/v1/completions", {"max_tokens": -1}, "max_tokens must be between 0 and"),
        (
            "/v1/completions",
            {"min_tokens": 9, "max_tokens": 3},
            "min_tokens must be in [0, max_tokens], got 9.",
        ),
        ("/v1/completions", {"seed": 1 << 63}, "seed must be between"),
        ("/v1/completions", {"logprobs": 1001}, "logprobs must be between 0 and 1000, got 1001."),
        ("/v1/completions", {"logit_bias": {"5": 1e308}}, "logit_bias of token 5 must be between"),
        (CHAT, {"max_completion_tokens": 1 << 40}, "max_completion_tokens must be between 0 and"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs must be in [0, 20]"),
    ],
)
def test_a_number_out_of_range_is_refused_by_the_name_that_the_client_gave_it(
    serve: Serve, path: str, body: dict[str, Any], message: str
) -> None:
    async def scenario(server: Any) -> None:
        whole = {
            "/generate": {"text": "a"},
            "/v1/completions": {"prompt": "a"},
            CHAT: {"messages": HI},
        }[path] | body
        response = await server.http.post(path, json=whole)
        assert response.status_code == 400
        assert response.json()["message"].startswith(message)

    serve(scenario)


@pytest.mark.parametrize("more", [{"n": 64}, {"text": ["a"] * 64}, {"n": 8, "text": ["a"] * 8}])
def test_more_logprobs_than_an_answer_can_hold_are_refused(
    serve: Serve, more: dict[str, Any]
) -> None:
    async def scenario(server: Any) -> None:
        sampling = {"max_new_tokens": 100, "n": more.get("n", 1)}
        body = {"text": more.get("text", "a"), "sampling_params": sampling, "return_logprob": True}
        response = await server.http.post("/generate", json=body | {"top_logprobs_num": 1000})
        assert response.status_code == 400
        assert response.json()["message"].startswith(
            "The answer could hold 6406400 logprobs; at most 524288 are allowed."
        )
        assert not server.engine.submitted
        await server.generate(**body, top_logprobs_num=20)

    serve(scenario)


def test_a_top_k_beyond_any_vocabulary_means_all_of_it(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for top_k in (1 << 30, 1 << 31, (1 << 63) - 1):
            await server.generate(text="a", sampling_params={"top_k": top_k, "max_new_tokens": 1})

    serve(scenario)


def test_nan_temperature(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for value in ("NaN", "Infinity", "1e999"):
            body = b'{"text": "a", "sampling_params": {"temperature": %s}}' % value.encode()
            response = await server.http.post(
                "/generate", content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400

    serve(scenario)


def test_http_level_errors_have_the_same_shape(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for response, code, kind in (
            (await server.http.get("/nothing/here"), 404, "NotFoundError"),
            (await server.http.post("/v1/nothing", json={}), 404, "invalid_request_error"),
            (await server.http.get("/v1/models/none"), 404, "invalid_request_error"),
            (await server.http.delete("/generate"), 405, "BadRequestError"),
            (await server.http.get(CHAT), 405, "invalid_request_error"),
            (await server.http.post("/load_lora_adapter", json={}), 501, "NotImplementedError"),
        ):
            assert response.status_code == code
            assert type_of(response.json()) == kind
        response = await server.http.post("/flush_cache?timeout=soon")
        assert (response.status_code, type_of(response.json())) == (400, "BadRequestError")

    serve(scenario)


BODIES = {
    CHAT: {"messages": HI},
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
    "/abort_request": {"abort_all": True},
    "/api/chat": {"model": "default", "messages": HI},
    "/v1/messages": {"model": "default", "messages": HI, "max_tokens": 2},
}
OTHER_TYPES = ["text/plain", "application/x-www-form-urlencoded", ""]


@pytest.mark.parametrize("content_type", OTHER_TYPES)
@pytest.mark.parametrize("sent", [{"origin": "http://a.example"}, {"sec-fetch-site": "cross-site"}])
def test_a_browser_must_say_that_a_body_is_json(
    serve: Serve, content_type: str, sent: dict[str, str]
) -> None:
    """A web page could otherwise send it without its browser's asking first."""

    async def scenario(server: Any) -> None:
        for route, fields in BODIES.items():
            body = json.dumps(fields).encode()
            headers = {"content-type": content_type, **sent}
            response = await server.http.post(route, content=body, headers=headers)
            assert response.status_code == 400, route
            assert "application/json" in response.text
            headers = {"content-type": "application/json; charset=utf-8", **sent}
            response = await server.http.post(route, content=body, headers=headers)
            assert response.status_code == 200
        assert len(server.engine.submitted) == 5

    serve(scenario)


@pytest.mark.parametrize("content_type", OTHER_TYPES)
def test_a_program_need_not_say_that_a_body_is_json(serve: Serve, content_type: str) -> None:
    """Red before: LiteLLM's client of Ollama's API, and curl without a header, were refused."""

    async def scenario(server: Any) -> None:
        for route, fields in BODIES.items():
            body, headers = json.dumps(fields).encode(), {"content-type": content_type}
            response = await server.http.post(route, content=body, headers=headers)
            assert response.status_code == 200, route
        response = await server.http.post("/generate", content=b"text=a")
        assert (response.status_code, type_of(response.json())) == (400, "BadRequestError")
        assert "not valid JSON" in response.text

    serve(scenario)


def test_what_sglangs_clients_send_without_a_body(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for method in ("GET", "POST"):
            assert (await server.http.request(method, "/flush_cache")).status_code == 200

    serve(scenario)


@pytest.mark.parametrize(
    "rid", ["a\n[2026-01-01 00:00:00] A line of the log.", "a\x1b[2J", "a\u202eb", "r" * 257, ""]
)
def test_a_rid_is_short_and_printable(serve: Serve, rid: str) -> None:
    async def scenario(server: Any) -> None:
        for route, body in {
            "/generate": {"text": "a", "rid": rid},
            "/v1/completions": {"prompt": "a", "rid": rid},
            CHAT: {"messages": HI, "rid": rid},
            "/abort_request": {"rid": rid},
        }.items():
            response = await server.http.post(route, json=body)
            if route == "/abort_request" and not rid:
                assert response.status_code == 200  # what SGLang's client sends for nothing
            else:
                assert response.status_code == 400
                assert "rid must" in response.text
        assert (
            await server.http.post("/generate", json={"text": ["a", "b"], "rid": ["ok", rid]})
        ).status_code == 400
        assert not server.engine.submitted
        long = "Zürich " * 36 + "🚀🚀🚀🚀"
        assert (await server.generate(text="a", rid=long))["meta_info"]["id"] == long

    serve(scenario)


@pytest.mark.parametrize("name", ["extra_key", "cache_salt", "routing_key"])
def test_keys_that_the_engine_keeps_are_short(serve: Serve, name: str) -> None:
    async def scenario(server: Any) -> None:
        for route, body in {"/generate": {"text": "a"}, "/v1/completions": {"prompt": "a"}}.items():
            response = await server.http.post(route, json=body | {name: "x" * 1025})
            assert response.status_code == 400
            assert name in response.text
            assert (
                await server.http.post(route, json=body | {name: "x" * 1024})
            ).status_code == 200

    serve(scenario)


def test_auto_truncate_shortens_and_says_so(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Any) -> None:
        result = await server.generate(text="ab" * 5_000, sampling_params={"max_new_tokens": 500})
        assert result["meta_info"]["prompt_tokens"] == 250
        assert result["meta_info"]["completion_tokens"] == 6

    serve(scenario, allow_auto_truncate=True)
    assert any("Truncated a prompt" in record.message for record in caplog.records)


def test_no_chat_template_is_a_400(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.service.answering.text._template = None
        response = await server.http.post(CHAT, json={"messages": HI})
        assert response.status_code == 400
        assert "chat template" in response.json()["message"]

    serve(scenario)


WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 5.0, "seed": 3.0, "n": 1.0},
    "/v1/completions": {"prompt": [[1.0, 2.0]], "max_tokens": 5.0, "logprobs": 1.0},
    "/v1/responses": {"input": "hi", "max_output_tokens": 5.0},
    "/v1/messages": {"messages": HI, "max_tokens": 5.0, "top_k": 2.0},
    "/generate": {
        "input_ids": [1.0, 2.0],
        "sampling_params": {"max_new_tokens": 5.0, "stop_token_ids": [9.0]},
        "bootstrap_room": 4.0,
    },
    "/api/generate": {
        "model": "m",
        "prompt": "a",
        "stream": False,
        "options": {"num_predict": 5.0},
    },
}


@pytest.mark.parametrize("route", WHOLE)
def test_whole_numbers_may_be_floats(serve: Serve, route: str) -> None:
    """Red before, on all routes but Ollama's: "got a number that is not whole"."""

    async def scenario(server: Any) -> None:
        answer = await server.http.post(route, json={"model": "default"} | WHOLE[route])
        assert answer.status_code == 200, answer.text
        assert server.engine.submitted[-1].sampling.max_new_tokens == 5
        text = json.dumps({"model": "default"} | WHOLE[route])
        answer = await server.http.post(route, content=text.replace("5.0", "5.5"))
        assert answer.status_code == 400
        assert "not whole" in answer.text

    serve(scenario)
