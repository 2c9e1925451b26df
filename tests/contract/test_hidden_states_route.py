"""Hidden states in native answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from setpoint_testing.fake_engine import EMBEDDING_SIZE, FakeEngine

Serve = Callable[..., None]
BODY = {"text": "abc", "return_hidden_states": True, "sampling_params": {"max_new_tokens": 4}}


def states(num_prompt: int, num_outputs: int) -> list[Any]:
    prompt = [[0.0] * EMBEDDING_SIZE] * num_prompt
    return [prompt, *([float(n)] * EMBEDDING_SIZE for n in range(1, num_outputs))]


@pytest.mark.parametrize("per_event", [1, 3])
def test_an_answer(serve: Serve, per_event: int) -> None:
    async def scenario(server: Any) -> None:
        out = await server.generate(**BODY)
        assert out["meta_info"]["hidden_states"] == states(3, 4)
        both = await server.generate(
            **BODY | {"text": ["ab", "c"], "return_hidden_states": [False, True]}
        )
        assert "hidden_states" not in both[0]["meta_info"]
        assert both[1]["meta_info"]["hidden_states"] == states(1, 4)
        stopped = await server.generate(
            **BODY | {"sampling_params": {"max_new_tokens": 9, "stop": ["ab"]}}
        )
        assert stopped["meta_info"]["completion_tokens"] == 2
        assert stopped["meta_info"]["hidden_states"] == states(3, 2)

    serve(scenario, FakeEngine(tokens_per_event=per_event), hidden_size=EMBEDDING_SIZE)


def test_a_stream_has_them_in_its_last_chunk(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post("/generate", json=BODY | {"stream": True})
        lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
        chunks = [json.loads(line)["meta_info"] for line in lines]
        assert len(chunks) == 4
        assert [("hidden_states" in chunk) for chunk in chunks] == [False] * 3 + [True]
        assert chunks[-1]["hidden_states"] == states(3, 4)

    serve(scenario, hidden_size=EMBEDDING_SIZE)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (BODY | {"return_hidden_states": "yes"}, "return_hidden_states"),
        (BODY | {"return_hidden_states": [True, True]}, "return_hidden_states"),
        (BODY | {"sampling_params": {"max_new_tokens": 200, "n": 2000}}, "at most 1048576"),
    ],
)
def test_wrong_bodies_are_refused(serve: Serve, body: Any, words: str) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post("/generate", json=body)
        assert response.status_code == 400
        assert words in response.json()["message"]
        assert not server.engine.submitted

    serve(scenario, hidden_size=EMBEDDING_SIZE)


def test_they_must_be_enabled(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post("/generate", json=BODY)
        assert response.status_code == 400
        assert "`--enable-return-hidden-states`" in response.json()["message"]

    serve(scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_openai_s_routes_have_that_of_the_last_step(
    serve: Serve, path: str, num_tokens: int
) -> None:
    chat = path.startswith("/v1/chat")
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    last = [float(num_tokens - 1)] * EMBEDDING_SIZE if num_tokens > 1 else []

    async def scenario(server: Any) -> None:
        body = prompt | {"max_tokens": num_tokens, "return_hidden_states": True}
        answer = (await server.http.post(path, json=body)).json()
        assert answer["choices"][0]["hidden_states"] == last
        response = await server.http.post(path, json=body | {"stream": True})
        lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        found = [choice.get("delta", choice).get("hidden_states") for choice in choices]
        assert [each for each in found if each is not None] == [last]
        plain = (await server.http.post(path, json=prompt | {"max_tokens": 2})).json()
        assert "hidden_states" not in plain["choices"][0]
        wrong = await server.http.post(path, json=body | {"return_hidden_states": 1})
        assert wrong.status_code == 400

    serve(scenario, hidden_size=EMBEDDING_SIZE)


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_s_routes_keep_one_state_however_long_the_answer(
    serve: Serve, path: str, tokens_per_event: int
) -> None:
    """A chat without max_tokens may fill the context, but its answer has the state of one token."""
    chat = path.startswith("/v1/chat")
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}

    async def scenario(server: Any) -> None:
        body = prompt | {"return_hidden_states": True, "n": 2, "stop": "ef"}
        body |= {} if chat else {"max_tokens": 100}
        answer = await server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert choice["hidden_states"] == [5.0] * EMBEDDING_SIZE
        assert not any(request.options.hidden_states for request in server.engine.submitted)

    engine = FakeEngine(
        script=lambda request: list(b"abcdefgh"),
        context_len=1 << 19,
        tokens_per_event=tokens_per_event,
    )
    serve(scenario, engine, hidden_size=EMBEDDING_SIZE)
