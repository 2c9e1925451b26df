"""Ollama's routes over HTTP, with a fake engine (docs/ollama.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from answers import HI, says
from ollama_answers import ASK, BODY, CHAT, GENERATE, lines, post

from setpoint.core.messages import Finish
from setpoint_testing.byte_tokenizer import EOS_ID
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


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
        assert server.engine.submitted[1].options.stream

    serve(scenario, says("aü🙂z"))


def test_a_prompt_goes_through_the_template_unless_it_is_raw(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await post(server, GENERATE, ASK | {"system": "Be brief."})
        assert prompt_of(server) == "system\nBe brief.\nuser\nhi\nassistant\n"
        await post(server, GENERATE, ASK | {"raw": True})
        assert prompt_of(server) == "hi"

    serve(scenario)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
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
]


def test_options_become_sampling_parameters(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for options, expected in OPTIONS:
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
            "The model 'llama3:latest' is not served here; org/tiny answered.",
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
            {"error": "messages[4] is a tool result, but no earlier call is waiting for a result."},
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
        assert refused.json()["error"].startswith("The model cannot be unloaded")
        assert server.engine.submitted == []

    serve(scenario)


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
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
        "messages[1].images: this model reads only text.",
    ),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0] is a tool result"),
    (CHAT, {"tools": [{"function": {}}]}, "tools[0].function.name is missing."),
    (CHAT, {"tools": "f"}, "tools must be a list, got a string."),
    (CHAT, {"format": "xml"}, 'format must be "json" or a JSON schema.'),
    (CHAT, {"format": {"a": "b" * (1 << 18)}}, "format must have at most"),
    (CHAT, {"format": 5}, "format must be a string or an object, got a whole number."),
    (CHAT, {"think": "much"}, "think must be 'high', 'low' or 'medium', not 'much'"),
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
    (GENERATE, {"suffix": "b"}, "suffix is not supported by this server yet; leave it out."),
    (
        GENERATE,
        {"template": "{{ .Prompt }}"},
        "template is not supported by this server yet; leave it out.",
    ),
    (GENERATE, {"context": "a"}, "context must be a list, got a string."),
    (GENERATE, {"context": [1, "a"]}, "context[1] must be a whole number"),
    (GENERATE, {"context": [1.5]}, "context[0] must be a whole number"),
    (GENERATE, {"context": [-1]}, "context"),
    (GENERATE, {"context": [1 << 40]}, "context"),
    (GENERATE, {"context": [97] * 300}, "longer than the model's context"),
    (GENERATE, {"context": [97] * 250}, "longer than the model's context"),
    (GENERATE, {"context": [97], "raw": True}, "context cannot be combined with raw."),
    (GENERATE, {"images": ["aGk="]}, "images is not supported by this server yet; leave it out."),
    (GENERATE, {"prompt": "a" * 5000}, "longer than the model's context"),
    ("/api/embed", {"input": 5}, "input must be a string or a list, got a whole number."),
    ("/api/embed", {"input": "a"}, "start it with --is-embedding to get embeddings."),
    ("/api/show", {"model": None}, "model is missing."),
]


def test_a_bad_field_is_named(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for route, changes, message in BAD_FIELDS:
            body = {CHAT: BODY, GENERATE: ASK}.get(route, {"model": "default"})
            answer = await server.http.post(route, json=body | changes)
            assert answer.status_code == 400, (route, changes, answer.text)
            assert answer.json().keys() == {"error"}
            assert message in answer.json()["error"], (route, changes)
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


LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
CALLS = (
    "I shall look.</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "the süd 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)


def test_thinking_and_whole_calls_whole_and_streamed(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = BODY | {"tools": [LOOK], "think": True, "options": {"num_predict": 1000}}
        whole = (await post(server, CHAT, body))["message"]
        assert whole["thinking"].strip() == "I shall look."
        assert whole["content"].strip() == "Let me see."
        calls = [call["function"] for call in whole["tool_calls"]]
        assert calls == [
            {"index": 0, "name": "look", "arguments": {"at": "the süd 🙂"}},
            {"index": 1, "name": "look", "arguments": {}},
        ]
        messages = [each["message"] for each in await lines(server, CHAT, body | {"stream": True})]
        for key in ("thinking", "content"):
            assert "".join(message.get(key, "") for message in messages) == whole[key]
        streamed = [
            call["function"] for message in messages for call in message.get("tool_calls", ())
        ]
        assert streamed == calls

    serve(scenario, says(CALLS, context_len=4096), reasoning_parser="deepseek-r1")


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        (None, None),
        ("", None),
        ("json", {"type": "object"}),
        ({"type": "string"}, {"type": "string"}),
        ({}, {}),
    ],
)
def test_a_format_is_a_schema(serve: Serve, given: Any, schema: Any) -> None:
    async def scenario(server: Any) -> None:
        for route, body in ((CHAT, BODY), (GENERATE, ASK)):
            await post(server, route, body | {"format": given})
            sent = server.engine.submitted[-1].sampling.json_schema
            assert (sent if sent is None else json.loads(sent)) == schema

    serve(scenario, says("{}"))


def test_numbers_may_be_floats_of_whole_value(serve: Serve) -> None:
    """Red before: 400, "options.num_predict must be a whole number"."""

    async def scenario(server: Any) -> None:
        options = {"num_predict": 5.0, "top_k": 1.0, "seed": 3.0, "num_ctx": 256.0, "top_p": 1}
        body = {"model": "default", "prompt": "a", "stream": False, "options": options}
        answer = await server.http.post("/api/generate", json=body | {"top_logprobs": 2.0})
        assert answer.status_code == 200, answer.text
        sampling = server.engine.submitted[0].sampling
        assert (sampling.max_new_tokens, sampling.top_k) == (5, 1)
        for wrong in (5.5, 1e300, "5"):
            refused = {**body, "options": {"num_predict": wrong}}
            answer = await server.http.post("/api/generate", json=refused)
            assert answer.status_code == 400, wrong

    serve(scenario)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/api/generate", {"prompt": "a", "stream": False}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}),
        ("/api/pull", {}),
    ],
)
def test_a_name_that_is_not_served_is_logged_once(
    serve: Serve, caplog: pytest.LogCaptureFixture, route: str, body: dict[str, Any]
) -> None:
    """Red before: only the answer said so, which many clients do not show."""

    async def scenario(server: Any) -> None:
        name = f"never-{route}"
        for model in (name, name, "default"):
            answer = await server.http.post(route, json={**body, "model": model})
            assert answer.status_code == 200, answer.text
        told = [each for each in caplog.messages if name in each]
        assert len(told) == 1
        assert "org/tiny answers" in told[0]

    serve(scenario, says("ok"))


def test_a_context_continues_the_conversation(serve: Serve) -> None:
    """Red before: no context in the answer, and 400 for one in the request."""

    async def scenario(server: Any) -> None:
        first = await post(server, GENERATE, ASK)
        begun = server.engine.submitted[0].prompt().tolist()
        assert first["context"] == [*begun, *b"Hello", EOS_ID]
        *_, last = await lines(server, GENERATE, without(ASK, "stream"))
        assert last["context"] == first["context"]
        again = ASK | {"prompt": "more", "context": [float(each) for each in first["context"]]}
        second = await post(server, GENERATE, again)
        sent = server.engine.submitted[-1].prompt().tolist()
        assert sent[: len(first["context"])] == first["context"]
        rest = bytes(token for token in sent[len(first["context"]) :] if token < 256).decode()
        assert rest.endswith("user\nmore\nassistant\n")
        assert "EARLIER" not in rest
        assert second["context"][: len(sent)] == sent
        assert "context" not in await post(server, GENERATE, ASK | {"raw": True})
        assert "context" not in await post(server, CHAT, BODY)

    serve(scenario, says("Hello"))


def test_a_marker_between_context_and_turn_stands_once(serve: Serve) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% endfor %}"
    )

    async def scenario(server: Any) -> None:
        await post(server, GENERATE, ASK | {"prompt": "b", "context": [97, EOS_ID]})
        assert server.engine.submitted[-1].prompt().tolist() == [97, EOS_ID, 98]
        await post(server, GENERATE, ASK | {"prompt": "b", "context": [97]})
        assert server.engine.submitted[-1].prompt().tolist() == [97, EOS_ID, 98]

    serve(scenario, says("Hello"), chat_template=template)
