"""Ollama's routes over HTTP, with a fake engine (docs/ollama.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from answers import HI, says

from setpoint.core.messages import Finish
from setpoint.core.model import Pooling
from setpoint.frontend.apis.ollama.models import OLLAMA_VERSION
from setpoint.testing.fake_engine import FakeEngine
from setpoint.testing.specs import tiny_spec

Serve = Callable[..., None]
CHAT = "/api/chat"
GENERATE = "/api/generate"
BODY = {"model": "org/tiny", "messages": HI, "stream": False}
ASK = {"model": "org/tiny", "prompt": "hi", "stream": False}
POOLING = Pooling("last", normalize=True, size=4, lengths=(), why="")
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


async def post(server: Any, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def lines(server: Any, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def prompt_of(server: Any) -> str:
    ids = server.engine.submitted[-1].prompt().tolist()
    return bytes(token for token in ids if token < 256).decode()


def without(answer: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in keys}


def test_a_chat_comes_whole_with_counts_and_times(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await post(server, CHAT, BODY)
        assert datetime.fromisoformat(answer["created_at"]).tzinfo is not None
        assert without(answer, "created_at", *DURATIONS) == {
            "model": "org/tiny",
            "message": {"role": "assistant", "content": "Hello 🙂"},
            "done": True,
            "done_reason": "stop",
            "prompt_eval_count": len(server.engine.submitted[0].prompt()),
            "eval_count": len("Hello 🙂".encode()) + 1,
        }
        assert answer["load_duration"] == 0
        assert answer["prompt_eval_duration"] > 1e7, "a step takes 10 ms"
        assert answer["eval_duration"] > answer["prompt_eval_duration"]
        assert abs(
            answer["total_duration"] - answer["prompt_eval_duration"] - answer["eval_duration"]
        ) < (2)

    serve(scenario, says("Hello 🙂", step_s=0.01))


@pytest.mark.parametrize(
    ("route", "body", "content"),
    [
        (CHAT, BODY, lambda each: each["message"]["content"]),
        (GENERATE, ASK, lambda each: each["response"]),
    ],
)
def test_a_stream_is_the_default_and_adds_up_to_the_whole(
    serve: Serve, route: str, body: dict[str, Any], content: Callable[[Any], str]
) -> None:
    async def scenario(server: Any) -> None:
        whole = await post(server, route, body)
        *pieces, last = await lines(server, route, without(body, "stream"))
        assert [content(each) for each in pieces] == list("aü🙂z")
        assert content(whole) == "aü🙂z"
        assert [each["done"] for each in pieces] == [False] * 4
        assert content(last) == ""
        assert whole.keys() == last.keys()
        for key in ("done", "done_reason", "prompt_eval_count", "eval_count"):
            assert whole[key] == last[key]
        assert server.engine.submitted[1].stream

    serve(scenario, says("aü🙂z"))


def test_a_prompt_goes_through_the_template_unless_it_is_raw(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await post(server, GENERATE, ASK | {"system": "Be brief."})
        assert prompt_of(server) == "system\nBe brief.\nuser\nhi\nassistant\n"
        await post(server, GENERATE, ASK | {"raw": True})
        assert prompt_of(server) == "hi"

    serve(scenario)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": None}),
        ({"num_predict": 7}, {"max_new_tokens": 7}),
        ({"num_predict": -1}, {"max_new_tokens": None}),
        ({"num_predict": -2}, {"max_new_tokens": None}),
        ({"temperature": 0, "seed": 5}, {"temperature": 0.0, "sampling_seed": 5}),
        ({"top_k": 0, "top_p": 0.5}, {"top_k": -1, "top_p": 0.5}),
        ({"top_k": 40, "min_p": 0.1}, {"top_k": 40, "min_p": 0.1}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        (
            {"presence_penalty": 1, "frequency_penalty": -1},
            {"presence_penalty": 1.0, "frequency_penalty": -1.0},
        ),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"]}, {"stop": ("x", "y")}),
        ({"mirostat": 0, "typical_p": 1.0, "tfs_z": 1}, {}),
    ],
)
def test_options_become_sampling_parameters(
    serve: Serve, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    async def scenario(server: Any) -> None:
        for route, body in ((CHAT, BODY), (GENERATE, ASK)):
            answer = await post(server, route, body | {"options": options})
            sampling = server.engine.submitted[-1].sampling
            assert {name: getattr(sampling, name) for name in expected} == expected
            assert "warnings" not in answer

    serve(scenario, says("Hi"), sampling_defaults={"temperature": 0.2, "top_p": 0.9})


def test_at_most_2048_new_tokens_unless_the_client_asks_for_more(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await post(server, CHAT, BODY)
        assert server.engine.submitted[-1].sampling.max_new_tokens == 2048

    serve(scenario, says("Hi", context_len=4096))


def test_a_limit_beyond_the_context_ends_with_it(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for options in ({}, {"num_predict": 4000}, {"num_predict": -1}):
            answer = await post(server, CHAT, BODY | {"options": options})
            assert answer["done_reason"] == "length"
            assert answer["prompt_eval_count"] + answer["eval_count"] == 256

    serve(scenario, FakeEngine())


def test_what_has_no_effect_is_told(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        options = {"num_ctx": 8192, "num_gpu": 1, "num_thread": 4, "what": 3}
        body = BODY | {"options": options, "model": "llama3:latest", "keep_alive": "5m"}
        warnings = [
            "The key 'options.what' is unknown and was ignored.",
            "options: num_thread, num_gpu, num_ctx have no effect here; the context has 256"
            " tokens.",
            "The model org/tiny has answered.",
        ]
        told = (await post(server, CHAT, body))["warnings"]
        assert sorted(map(sorted, told)) == sorted(map(sorted, warnings))
        *_, last = await lines(server, CHAT, body | {"stream": True})
        assert last["warnings"] == told
        for name in ("org/tiny", "org/tiny:latest", "default"):
            body = BODY | {"model": name, "options": {"num_ctx": 256}}
            assert "warnings" not in await post(server, CHAT, body)

    serve(scenario, says("Hi"))


def test_tool_results_belong_to_calls(serve: Serve) -> None:
    call = {"function": {"name": "look", "arguments": {"at": "sky"}}}
    other = {"function": {"name": "hear"}}

    async def scenario(server: Any) -> None:
        messages = [
            *HI,
            {"role": "assistant", "thinking": "hm", "tool_calls": [call, other]},
            {"role": "tool", "tool_name": "hear", "content": "wind"},
            {"role": "tool", "content": "blue"},
        ]
        await post(server, CHAT, BODY | {"messages": messages})
        answer = await server.http.post(
            CHAT, json=BODY | {"messages": [*messages, {"role": "tool", "content": "?"}]}
        )
        assert (answer.status_code, answer.json()) == (
            400,
            {"error": "messages[4] is the result of a tool, but no call before it waits for one."},
        )

    serve(scenario)


def test_logprobs(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = ASK | {"logprobs": True, "top_logprobs": 2}
        whole = await post(server, GENERATE, body)
        first = whole["logprobs"][0]
        assert (first["token"], first["logprob"], len(first["top_logprobs"])) == ("a", -0.5, 2)
        pieces = await lines(server, GENERATE, body | {"stream": True})
        streamed = [entry for piece in pieces for entry in piece.get("logprobs", ())]
        assert streamed == whole["logprobs"]

    serve(scenario, says("aü"))


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": [], "keep_alive": "5m"}])
def test_an_empty_chat_loads_the_model(serve: Serve, body: dict[str, Any]) -> None:
    async def scenario(server: Any) -> None:
        answer = await post(server, CHAT, {"model": "default", "stream": False, **body})
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert answer["message"] == {"role": "assistant", "content": ""}
        (line,) = await lines(server, GENERATE, {"model": "default", "prompt": ""})
        assert (line["response"], line["done_reason"], line["done"]) == ("", "load", True)
        refused = await server.http.post(GENERATE, json={"model": "default", "keep_alive": 0})
        assert refused.status_code == 400
        assert refused.json()["error"].startswith("keep_alive 0 asks to unload the model")
        assert server.engine.submitted == []

    serve(scenario)


@pytest.mark.parametrize(
    ("route", "changes", "message"),
    [
        (CHAT, {"model": None}, "model must be a string, got null."),
        (CHAT, {"messages": "hi"}, "messages must be a list, got a string."),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role is missing."),
        (CHAT, {"messages": [{"role": "bot"}]}, "messages[0].role must be one of system,"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [1]}]},
            "messages[0].content must be a string, got a list.",
        ),
        (
            CHAT,
            {"messages": [*HI, {"role": "user", "content": "a", "images": ["aGk="]}]},
            "messages[1].images: this model reads text only.",
        ),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0] is the result of a"),
        (CHAT, {"tools": [{"function": {}}]}, "tools[0].function.name is missing."),
        (CHAT, {"tools": "f"}, "tools must be a list, got a string."),
        (CHAT, {"format": "xml"}, 'format must be "json" or a JSON schema.'),
        (CHAT, {"format": 5}, "format must be a string or an object, got a whole number."),
        (CHAT, {"think": "much"}, "think must not be 'much'"),
        (CHAT, {"think": True}, "think: this model does not think"),
        (CHAT, {"stream": "no"}, "stream must be true or false, got a string."),
        (CHAT, {"options": 5}, "options must be an object, got a whole number."),
        (CHAT, {"options": {"temperature": "hot"}}, "options.temperature must be a number, got"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature must be between 0 and"),
        (CHAT, {"options": {"repeat_penalty": 3}}, "options.repeat_penalty must be above 0"),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict must be a whole number >="),
        (CHAT, {"options": {"top_k": -5}}, "options.top_k must be between -1 and"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat is not supported by this server."),
        (CHAT, {"options": {"typical_p": 0.7}}, "options.typical_p is not supported"),
        (CHAT, {"options": {"stop": [""]}}, "A stop string must not be empty."),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs must be a whole number <= 20"),
        (GENERATE, {"prompt": 5}, "prompt must be a string, got a whole number."),
        (GENERATE, {"suffix": "b"}, "suffix is not supported by this server yet."),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template is not supported by this server yet."),
        (GENERATE, {"context": [1, 2]}, "context is not supported by this server yet."),
        (GENERATE, {"images": ["aGk="]}, "images is not supported by this server yet."),
        (GENERATE, {"prompt": "a" * 5000}, "longer than the model's context"),
        ("/api/embed", {"input": 5}, "input must be a string or a list, got a whole number."),
        ("/api/embed", {"input": "a"}, "start it with --is-embedding to get embeddings."),
        ("/api/show", {"model": None}, "model is missing."),
    ],
)
def test_a_bad_field_is_named(
    serve: Serve, route: str, changes: dict[str, Any], message: str
) -> None:
    async def scenario(server: Any) -> None:
        body = {CHAT: BODY, GENERATE: ASK}.get(route, {"model": "default"})
        answer = await server.http.post(route, json=body | changes)
        assert answer.status_code == 400, answer.text
        assert answer.json().keys() == {"error"}
        assert message in answer.json()["error"]
        assert server.engine.submitted == []

    serve(scenario)


def test_an_error_in_mid_stream_is_a_line(serve: Serve) -> None:
    aborted = Finish("abort", message="Aborted.")
    engine = FakeEngine()
    engine.refuse = lambda request: (
        aborted if any(each.num_sent > 2 for each in engine.running.values()) else None
    )

    async def scenario(server: Any) -> None:
        whole = await server.http.post(CHAT, json=BODY)
        assert (whole.status_code, whole.json()) == (400, {"error": "Aborted."})
        *_, last = await lines(server, CHAT, BODY | {"stream": True})
        assert last == {"error": "Aborted."}

    serve(scenario, engine)


def test_embeddings(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await post(server, "/api/embed", {"model": "default", "input": ["ab", "c"]})
        assert [len(each) for each in answer["embeddings"]] == [4, 4]
        assert (answer["model"], answer["prompt_eval_count"]) == ("org/tiny", 3)
        assert answer["total_duration"] > 0
        one = await post(server, "/api/embed", {"model": "default", "input": "ab", "dimensions": 2})
        assert [len(each) for each in one["embeddings"]] == [2]
        assert (await post(server, "/api/embed", {"model": "m", "input": []}))["embeddings"] == []
        old = await post(server, "/api/embeddings", {"model": "default", "prompt": "ab"})
        assert old == {"embedding": answer["embeddings"][0]}

    serve(scenario, pooling=POOLING)


def test_a_long_text_is_cut_or_refused(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"model": "default", "input": ["ab", "a" * 1000]}
        answer = await post(server, "/api/embed", body)
        assert answer["warnings"] == ["input[1] was cut to its first 250 tokens."]
        assert len(server.engine.submitted[1].prompt()) == 250
        refused = await server.http.post("/api/embed", json=body | {"truncate": False})
        assert refused.status_code == 400
        assert "longer than the model's context" in refused.json()["error"]

    serve(scenario, pooling=POOLING)


def test_what_clients_ask_about_the_model(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        (entry,) = (await server.http.get("/api/tags")).json()["models"]
        assert (entry["name"], entry["model"]) == ("org/tiny", "org/tiny")
        assert len(entry["digest"]) == 64
        assert entry["size"] == 2 * spec.num_parameters
        assert entry["details"] == {
            "parent_model": "",
            "format": "safetensors",
            "family": "llama",
            "families": ["llama"],
            "parameter_size": "1.0M",
            "quantization_level": "BF16",
        }
        shown = await post(server, "/api/show", {"model": "org/tiny:latest"})
        assert shown["details"] == entry["details"]
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        info = shown["model_info"]
        assert info["general.architecture"] == "llama"
        assert info["llama.context_length"] == 256
        assert info["general.parameter_count"] == spec.num_parameters
        missing = await server.http.post("/api/show", json={"name": "llama3"})
        assert missing.status_code == 404
        assert missing.json()["error"].startswith("model 'llama3' not found")
        (running,) = (await server.http.get("/api/ps")).json()["models"]
        assert (running["size_vram"], running["context_length"]) == (0, 256)
        assert running["size"] == round(0.875 * (1 << 30))
        assert datetime.fromisoformat(running["expires_at"]).year == 9999
        assert (await server.http.get("/api/version")).json()["version"] == OLLAMA_VERSION
        assert (await server.http.head("/")).status_code == 200

    spec = tiny_spec()
    serve(scenario, spec=spec, tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/pull"),
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:0"),
    ],
)
def test_models_are_not_changed(serve: Serve, method: str, path: str) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.request(method, path, json={"model": "llama3"})
        assert answer.status_code == 400
        assert "the one model that it was started with" in answer.json()["error"]

    serve(scenario)


def test_unknown_paths_are_told_in_ollamas_shape(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post("/api/chats", json={})
        assert (answer.status_code, answer.json()) == (
            404,
            {"error": "There is no route /api/chats; did you mean /api/chat?"},
        )

    serve(scenario)
