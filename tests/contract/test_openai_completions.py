"""Text completions as scripts and evaluation harnesses ask for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from answers import says

from setpoint.core.logprobs import LogprobBlock
from setpoint.core.request import Request
from setpoint_testing import fake_engine
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]

ROUTE = "/v1/completions"


def test_several_prompts_stream_what_they_answer_whole(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body: dict[str, Any] = {
            "model": "m",
            "prompt": ["ab", "é"],
            "n": 2,
            "echo": True,
            "logprobs": 1,
            "max_tokens": 3,
        }
        one = await server.openai.completions.create(**body)
        stream = await server.openai.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        for whole in one.choices:
            pieces = [choice for choice in choices if choice.index == whole.index]
            assert "".join(piece.text for piece in pieces) == whole.text
            assert pieces[-1].finish_reason == whole.finish_reason == "length"
            logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [entry for block in logprobs for entry in getattr(block, name)]
                assert joined == getattr(whole.logprobs, name)
        assert [choice.text[:2] for choice in one.choices] == ["ab", "ab", "éx", "éx"]
        assert chunks[-1].usage == one.usage
        assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (4, 12)

    serve(scenario, says("xyz"))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_harness_scores_continuations(serve: Serve, max_tokens: int) -> None:
    """lm-eval sums the logprobs of a continuation in this way: ids in, ``echo``, the last token
    left out if one is generated."""

    async def scenario(server: Any) -> None:
        context, continuation = [5, 6, 7], [8, 9]
        answer = await server.http.post(
            ROUTE,
            json={
                "model": "m",
                "prompt": [context + continuation, continuation],
                "temperature": 0,
                "max_tokens": max_tokens,
                "logprobs": 1,
                "seed": 1234,
                "echo": True,
            },
        )
        assert answer.status_code == 200, answer.text
        first, second = answer.json()["choices"]
        block = first["logprobs"]
        assert block["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5] + [-0.5] * max_tokens
        assert [len(block[name]) for name in block] == [5 + max_tokens] * 4
        assert block["top_logprobs"][0] is None
        for token, top in zip(block["tokens"][1:], block["top_logprobs"][1:], strict=True):
            assert max(top, key=top.get) == token, "greedy, as a harness tests it"
        assert second["logprobs"]["token_logprobs"][0] is None

    serve(scenario, says("xyz"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"suffix": "end"}, "suffix is not supported, because the served model can only continue"),
        ({"best_of": 3, "stream": True}, "best_of must not be larger than n if stream is true."),
        ({"best_of": 1, "n": 2}, "best_of must be between n (2) and 4096, got 1."),
        ({"best_of": 5000}, "best_of must be between n (1) and 4096, got 5000."),
        ({"best_of": "x"}, "best_of must be a whole number, got a string."),
        (
            {"tools": [{"type": "function"}]},
            "tools is not supported by this server yet; leave it out.",
        ),
        ({"logprobs": 1001}, "logprobs must be between 0 and 1000, got 1001."),
        ({"prompt": []}, "prompt must not be empty."),
        ({"prompt": [["a"]]}, "prompt[0][0] must be a whole number, got a string."),
        ({"prompt": ["a", 5]}, "prompt must hold strings or token ids, not both."),
        ({"prompt": None}, "prompt must be a string or a list, got null."),
        (
            {"prompt": [99999]},
            "prompt has the out-of-vocabulary token id 99999; valid ids are 0 to 259.",
        ),
        ({"echo": "yes"}, "echo must be true or false, got a string."),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream to be true."),
    ],
)
def test_wrong_fields_are_refused_by_name(serve: Serve, body: Any, message: str) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(ROUTE, content=json.dumps({"prompt": "a", **body}),
                                          headers={"content-type": "application/json"})  # fmt: skip
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(message)
        assert server.engine.submitted == []

    serve(scenario)


@pytest.mark.parametrize("same", [1, 2, None])
def test_best_of_all_is_all(serve: Serve, same: int | None) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.openai.completions.create(
            model="m", prompt="a", n=same or 1, best_of=same
        )
        assert len(answer.choices) == (same or 1)
        body = {"prompt": "a", "n": None, "best_of": same and 1, "stream": True}
        response = await server.http.post(ROUTE, json=body)
        assert response.headers["content-type"].startswith("text/event-stream")

    serve(scenario, says("ok"))


@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_best_of_several_samples_are_shown(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    """Sample k of a prompt answers with the letter k; c is the likeliest, then a."""
    likelihoods = {"a": -1.0, "b": -3.0, "c": -0.5, "d": -2.0}
    made = fake_engine._block

    def block(request: Request, ids: Sequence[int]) -> LogprobBlock:
        values = [likelihoods[chr(ids[0])]] * len(ids)
        return msgspec.structs.replace(made(request, ids), values=values)

    monkeypatch.setattr(fake_engine, "_block", block)

    def script(request: Request) -> bytes:
        return bytes([b"abcd"[int(request.rid.rpartition("_")[2])]])

    async def scenario(server: Any) -> None:
        body: dict[str, Any] = {"model": "m", "best_of": 4, "n": 2, "max_tokens": 3}
        answer = await server.openai.completions.create(
            prompt=["x", "yy"], logprobs=logprobs, **body
        )
        assert [choice.text for choice in answer.choices] == ["ccc", "aaa"] * 2
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        shown = [choice.logprobs and choice.logprobs.token_logprobs for choice in answer.choices]
        assert shown == ([[-0.5] * 3, [-1.0] * 3] * 2 if logprobs is not None else [None] * 4)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2 * 4 * 3)

    serve(scenario, FakeEngine(script=script))
