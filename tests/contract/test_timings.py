"""``timings`` of OpenAI's answers: where the time of a request went, in llama.cpp's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
FIELDS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second", "queue_ms"),
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abcd", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abcd"}], "max_tokens": 3},
}


def chunks_of(text: str) -> list[dict[str, Any]]:
    events = text.strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def check(timings: dict[str, Any], *, num_prompt: int, num_outputs: int) -> None:
    assert timings.keys() == FIELDS
    assert all(isinstance(value, int | float) and value >= 0 for value in timings.values())
    # The fake engine reports 0.25 s in the queue and 0.5 s for the prompt, and two cached tokens.
    assert (timings["queue_ms"], timings["prompt_ms"], timings["cache_n"]) == (250.0, 500.0, 2)
    assert (timings["prompt_n"], timings["predicted_n"]) == (num_prompt - 2, num_outputs)
    assert timings["prompt_per_second"] == (num_prompt - 2) / 0.5
    assert timings["prompt_per_token_ms"] == 500 / (num_prompt - 2)


@pytest.mark.parametrize("route", BODIES)
def test_a_whole_answer_has_them(serve: Serve, route: str) -> None:
    async def scenario(server: Any) -> None:
        answer = (await server.http.post(route, json=BODIES[route])).json()
        check(answer["timings"], num_prompt=answer["usage"]["prompt_tokens"], num_outputs=3)

    serve(scenario, FakeEngine(num_cached=2))


@pytest.mark.parametrize("route", BODIES)
def test_a_stream_has_them_at_its_end(serve: Serve, route: str) -> None:
    async def scenario(server: Any) -> None:
        body = BODIES[route] | {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage = chunks_of((await server.http.post(route, json=body)).text)
        num_prompt = usage["usage"]["prompt_tokens"]
        assert [i for i, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]
        check(chunks[-1]["timings"], num_prompt=num_prompt, num_outputs=3)
        chunks = chunks_of(
            (await server.http.post(route, json=body | {"timings_per_token": True})).text
        )[:-1]
        counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 3)

    serve(scenario, FakeEngine(num_cached=2))


def test_several_choices_are_one_request(serve: Serve) -> None:
    """Sums of tokens, and the longest times."""

    async def scenario(server: Any) -> None:
        body = BODIES["/v1/completions"] | {"n": 2, "timings_per_token": False}
        answer = (await server.http.post("/v1/completions", json=body)).json()
        assert "warnings" not in answer
        assert answer["timings"]["predicted_n"] == 6
        assert answer["timings"]["queue_ms"] == 250.0

    serve(scenario, FakeEngine(num_cached=2))


def test_a_prompt_that_was_cached_divides_by_nothing(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = (await server.http.post("/v1/completions", json=BODIES["/v1/completions"])).json()
        timings = answer["timings"]
        assert (timings["prompt_n"], timings["prompt_per_token_ms"]) == (0, 0.0)

    serve(scenario, FakeEngine(num_cached=4))
