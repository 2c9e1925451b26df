"""The last chunk of a sequence has its last token, with its logprobs, and the finish reason."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from answers import CHAT, HI, says

from setpoint_testing.byte_tokenizer import EOS_ID

Serve = Callable[..., None]
COMPLETIONS, GENERATE = "/v1/completions", "/generate"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = 'So.<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TEMPLATE = "{{ tools }}{% for message in messages %}{{ message.content }}\n{% endfor %}"


async def streamed(server: Any, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of the chunks, in order."""
    response = await server.http.post(route, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def by_index(choices: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    ordered = sorted(choices, key=lambda choice: choice["index"])
    return [list(group) for _, group in itertools.groupby(ordered, lambda each: each["index"])]


ENDINGS: list[tuple[dict[str, Any], str, int | str | None]] = [
    ({}, "stop", EOS_ID),
    ({"max_tokens": 2}, "length", None),
    ({"stop": ["d"]}, "stop", "d"),
    ({"stop": ["de"]}, "stop", "de"),
]


@pytest.mark.cases(24)
@pytest.mark.parametrize("tokens_per_event", [1, 2, 100])
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize(("body", "finish", "matched"), ENDINGS, ids=str)
@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_the_last_chunk_has_the_finish_reason(
    serve: Serve,
    route: str,
    logprobs: bool,
    body: dict[str, Any],
    finish: str,
    matched: int | str | None,
    num_samples: int,
    tokens_per_event: int,
) -> None:
    async def scenario(server: Any) -> None:
        is_chat = route == CHAT
        asked = {"messages": HI} if is_chat else {"prompt": "abc"}
        if logprobs:
            asked |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
        asked |= {"n": num_samples, **body}
        whole = (await server.http.post(route, json=asked)).json()["choices"]
        choices = by_index(await streamed(server, route, asked))
        assert len(choices) == num_samples
        for index, pieces in enumerate(choices):
            reasons = [piece["finish_reason"] for piece in pieces]
            assert reasons == [None] * (len(pieces) - 1) + [finish]
            assert [piece["matched_stop"] for piece in pieces][-1] == matched
            if is_chat:
                role, *pieces = pieces
                assert role["delta"]["role"] == "assistant"
                assert all(isinstance(piece["delta"]["content"], str) for piece in pieces[:-1])
                texts = [piece["delta"]["content"] or "" for piece in pieces]
                assert "".join(texts) == whole[index]["message"]["content"]
            else:
                assert "".join(piece["text"] for piece in pieces) == whole[index]["text"]
            for piece in pieces:
                assert bool(piece["logprobs"]) == logprobs
            if logprobs:
                key = "content" if is_chat else "tokens"
                joined = [entry for piece in pieces for entry in piece["logprobs"][key]]
                assert joined == whole[index]["logprobs"][key]

    serve(scenario, says("abcdef", tokens_per_event=tokens_per_event))


@pytest.mark.cases(9)
@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize(
    ("answer", "finish"),
    [(CALL, "tool_calls"), ("<think>a</think>Yes.", "stop"), ("<think>a", "stop")],
)
def test_with_parsers(
    serve: Serve, answer: str, finish: str, tokens_per_event: int, logprobs: bool
) -> None:
    async def scenario(server: Any) -> None:
        body = {"messages": HI, "tools": TOOLS, "n": 2, "logprobs": logprobs}
        for _, *pieces in by_index(await streamed(server, CHAT, body)):
            assert [piece["finish_reason"] for piece in pieces] == [
                *[None] * (len(pieces) - 1),
                finish,
            ]
            for piece in pieces[:-1]:
                delta = piece["delta"]
                assert (
                    isinstance(delta["content"], str)
                    or isinstance(delta["reasoning_content"], str)
                    or delta["tool_calls"]
                )
            if logprobs:
                tokens = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
                assert len(tokens) == len(answer) + 1

    serve(
        scenario,
        says(answer, tokens_per_event=tokens_per_event),
        chat_template=TEMPLATE,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )


@pytest.mark.parametrize("incremental", [True, False])
def test_generate(serve: Serve, incremental: bool) -> None:
    async def scenario(server: Any) -> None:
        body = {"text": "a", "stream": True, "sampling_params": {"n": 2, "stop": "d"}}
        response = await server.http.post(GENERATE, json={**body, "return_logprob": True})
        lines = [line for line in response.text.split("\n") if line][:-1]
        for pieces in by_index([json.loads(line.removeprefix("data: ")) for line in lines]):
            reasons = [piece["meta_info"]["finish_reason"] for piece in pieces]
            assert reasons == [None] * 3 + [{"type": "stop", "matched": "d"}]
            counts = [len(piece["meta_info"]["output_token_logprobs"]) for piece in pieces]
            assert counts == ([1] * 4 if incremental else [1, 2, 3, 4])

    serve(scenario, says("abcdef"), incremental_streaming_output=incremental)
