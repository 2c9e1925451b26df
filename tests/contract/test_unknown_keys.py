"""A key that a route does not know is told to the client, or refused; names in an answer are those
that the client sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from setpoint_testing.byte_tokenizer import VOCAB_SIZE
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
LIMIT = {"sampling_params": {"max_new_tokens": 2}}


@pytest.mark.parametrize(
    ("body", "warning"),
    [
        (
            {"max_new_tokens": 4},
            (
                "The key 'max_new_tokens' is unknown and was ignored; did you mean"
                " 'sampling_params.max_new_tokens'?"
            ),
        ),
        (
            {"max_tokens": 4},
            (
                "The key 'max_tokens' is unknown and was ignored; did you mean"
                " 'sampling_params.max_new_tokens'?"
            ),
        ),
        (
            {"temprature": 1},
            (
                "The key 'temprature' is unknown and was ignored; did you mean"
                " 'sampling_params.temperature'?"
            ),
        ),
        (
            {"return_logprobs": True},
            "The key 'return_logprobs' is unknown and was ignored; did you mean 'return_logprob'?",
        ),
        ({"guided_json": {"type": "object"}}, "The key 'guided_json' is unknown and was ignored."),
        ({"a\nforged line": 1}, "The key 'a\\nforged line' is unknown and was ignored."),
    ],
)
def test_generate_tells_of_keys_it_does_not_know(
    serve: Serve, body: dict[str, Any], warning: str
) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.generate(text="ab", **LIMIT, **body))["meta_info"]["warnings"] == [
            warning
        ]
        many = await server.generate(text=["ab", "c"], **LIMIT, **body)
        assert [each["meta_info"]["warnings"] for each in many] == [[warning]] * 2
        response = await server.http.post(
            "/generate", json={"text": "ab", "stream": True, **LIMIT, **body}
        )
        assert json.loads(response.text.split("\n\n")[0].removeprefix("data: "))["meta_info"][
            "warnings"
        ] == [warning]

    serve(scenario)


def test_keys_that_ask_for_nothing_are_not_worth_a_word(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.generate(
            text="ab", **LIMIT, audio=None, modality=[], nothing="", lists=[None, []]
        )
        assert "warnings" not in answer["meta_info"]

    serve(scenario)


@pytest.mark.parametrize("value", [False, 0, 0.0, [False]])
def test_a_value_of_false_or_zero_says_something(serve: Serve, value: Any) -> None:
    """Red before: an unknown key was passed over if its value was falsy."""

    async def scenario(server: Any) -> None:
        answer = await server.generate(text="ab", **LIMIT, include_thoughts=value)
        (warning,) = answer["meta_info"]["warnings"]
        assert warning == "The key 'include_thoughts' is unknown and was ignored."

    serve(scenario)


def test_what_does_not_exist_here_may_be_switched_off(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for key in ("return_routed_experts", "use_beam_search"):
            off = await server.generate(text="ab", **LIMIT, **{key: False})
            assert "warnings" not in off["meta_info"]
        on = await server.generate(text="ab", **LIMIT, use_beam_search=True)
        assert "'use_beam_search' is unknown" in on["meta_info"]["warnings"][0]

    serve(scenario)


def test_many_unknown_keys_are_counted(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        warnings = (
            await server.generate(text="ab", **LIMIT, **{f"zzz{index}": 1 for index in range(20)})
        )["meta_info"]["warnings"]
        assert (len(warnings), warnings[-1]) == (9, "12 more keys are unknown.")
        assert ["zzz0'" in warnings[0], "zzz7'" in warnings[7]] == [
            True,
            True,
        ], "in the order of the body"
        (warning,) = (await server.generate(text="ab", **LIMIT, **{"q" * 5000: 1}))["meta_info"][
            "warnings"
        ]
        assert len(warning) < 150

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "warning"),
    [
        (
            {"temprature": 1},
            "The key 'temprature' is unknown and was ignored; did you mean 'temperature'?",
        ),
        (
            {"max_new_tokens": 4},
            "The key 'max_new_tokens' is unknown and was ignored; did you mean 'max_tokens'?",
        ),
        (
            {"include_usage": True},
            (
                "The key 'include_usage' is unknown and was ignored; did you mean"
                " 'stream_options.include_usage'?"
            ),
        ),
        ({"steering": {"a": 1}}, "The key 'steering' is unknown and was ignored."),
        (
            {"structured_outputs": {"regexp": "a"}},
            (
                "The key 'structured_outputs.regexp' is unknown and was ignored; did you mean"
                " 'regex'?"
            ),
        ),
        ({"model": "gpt-4"}, "The model 'gpt-4' is not served here; org/tiny answered."),
    ],
)
def test_openai_answers_tell_in_a_list(serve: Serve, body: dict[str, Any], warning: str) -> None:
    async def scenario(server: Any) -> None:
        for route, content in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "a"})):
            given = {**content, "max_tokens": 3, **body}
            answer = (await server.http.post(route, json=given)).json()
            assert (answer["warnings"], answer["model"]) == ([warning], "org/tiny")
            stream = (await server.http.post(route, json={**given, "stream": True})).text
            first, *others, _ = [
                json.loads(line.removeprefix("data: "))
                for line in stream.strip().split("\n\n")[:-1]
            ]
            assert first["warnings"] == [warning]
            assert all("warnings" not in other for other in others)

    serve(scenario)


def test_nested_keys_count_too(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {
            "messages": HI,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usages": True},
        }
        first = (await server.http.post(CHAT, json=body)).text.split("\n\n")[0]
        (warning,) = json.loads(first.removeprefix("data: "))["warnings"]
        assert warning.startswith("The key 'stream_options.include_usages' is unknown")
        assert "'stream_options.include_usage'" in warning

    serve(scenario)


def test_no_warning_without_a_reason(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for model in ("default", "org/tiny", ""):
            answer = (
                await server.http.post(CHAT, json={"model": model, "messages": HI, "max_tokens": 2})
            ).json()
            assert answer["metadata"] == {"weight_version": "default"}
            assert "warnings" not in answer
            assert answer["model"] == "org/tiny"

    serve(scenario)


def test_other_routes_tell_too(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        tokens = (
            await server.http.post("/tokenize", json={"prompt": "a", "add_special_token": True})
        ).json()
        assert tokens["warnings"] == [
            "The key 'add_special_token' is unknown and was ignored; did you mean"
            " 'add_special_tokens'?"
        ]
        assert (
            "warnings" not in (await server.http.post("/detokenize", json={"tokens": [97]})).json()
        )
        aborted = await server.http.post("/abort_request", json={"rids": ["x"]})
        assert aborted.json()["warnings"] == [
            "The key 'rids' is unknown and was ignored; did you mean 'rid'?"
        ]
        assert (await server.http.post("/abort_request", json={"rid": "x"})).content == b""

    serve(scenario)


def test_they_can_be_refused(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for route, body in (
            ("/generate", {"text": "a", "temprature": 1}),
            (CHAT, {"messages": HI, "temprature": 1}),
            ("/v1/completions", {"prompt": "a", "temprature": 1}),
            ("/tokenize", {"prompt": "a", "temprature": 1}),
        ):
            response = await server.http.post(route, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["message"].startswith("The key 'temprature' is unknown")
        assert server.engine.submitted == []

    serve(scenario, refuse_unknown_keys=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": -1}, "max_tokens must be between 0 and 2147483647, got -1."),
        ({"max_completion_tokens": -1}, "max_completion_tokens must be between 0 and 2147483647, got -1."),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens must be in [0, max_tokens], got 9."),
        ({"seed": 1 << 70}, "seed must be between -9223372036854775808 and 9223372036854775807, got 1180591620717411303424."),
        ({"temperature": "hot"}, "temperature must be a number, got a string."),
        ({"stop": ["a", 1]}, "stop[1] must be a string, got a whole number."),
        ({"messages": [1]}, "messages[0] must be an object, got a whole number."),
        ({"messages": "hi"}, "messages must be a list, got a string."),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role must be one of system, developer, user, assistant, tool; "
                                                        "got 'bot'."),
        ({"messages": [{"role": 1, "content": ""}]}, "messages[0].role must be one of system, developer, user, assistant, tool; "
                                                     "got a whole number."),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string or a list of parts, got a whole number."),
    ],
)  # fmt: skip
def test_an_error_names_what_the_client_sent(
    serve: Serve, body: dict[str, Any], message: str
) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(CHAT, json={"messages": HI, **body})
        error = response.json()["error"]
        assert (response.status_code, error["message"]) == (400, message)
        assert error["param"] == message.split()[0], "OpenAI's place for the name of the field"

    serve(scenario)


def test_the_name_default_is_a_model(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.openai.models.retrieve("default")).id == "org/tiny"

    serve(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/generate", {"text": "hi"}),
    ],
)
def test_stop_tokens_that_no_vocabulary_has_are_told(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    """SGLang ignores them: a model can never generate one."""
    ids = [ord("c"), VOCAB_SIZE, 1 << 40]
    told = f"stop_token_ids: the vocabulary has no {VOCAB_SIZE}, {1 << 40}; these have no effect."

    async def scenario(server: Any) -> None:
        params = {"max_new_tokens": 3, "min_new_tokens": 1, "stop_token_ids": ids}
        more = {"sampling_params": params} if path == "/generate" else {"stop_token_ids": ids}
        answer = await server.http.post(path, json=body | more | {"stream": stream})
        assert answer.status_code == 200, answer.text
        assert told in answer.text
        assert server.engine.submitted[0].sampling.stop_token_ids == (ord("c"),)

    serve(scenario, FakeEngine(context_len=4096))
