"""Every answer satisfies the types of the official client, which itself only fills them in and does
not check them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from answers import CHAT, HI, says
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from setpoint.core.model import Pooling
from setpoint_testing.fake_engine import EMBEDDING_SIZE, FakeEngine

Serve = Callable[..., None]
RESPONSES, COMPLETIONS = "/v1/responses", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ANSWERS = {
    "text": "Yes.",
    "reasoning": "<think>a</think>Yes.",
    "a call": 'So.<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
}
PARSERS = {
    "chat_template": "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}


async def streamed(server: Any, route: str, body: dict[str, Any]) -> list[Any]:
    response = await server.http.post(route, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("cache_report", [True, False])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_chats(serve: Serve, answer: str, cache_report: bool) -> None:
    async def scenario(server: Any) -> None:
        body = {"messages": HI, "tools": TOOLS, "logprobs": True, "top_logprobs": 1}
        whole = (await server.http.post(CHAT, json=body)).json()
        ChatCompletion.model_validate(whole)
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        for chunk in await streamed(server, CHAT, body):
            ChatCompletionChunk.model_validate(chunk)

    serve(scenario, says(answer, num_cached=2), enable_cache_report=cache_report, **PARSERS)


def test_completions(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"prompt": "ab", "logprobs": 1, "echo": True}
        answer = (await server.http.post(COMPLETIONS, json=body)).json()
        # The client's type says that the logprob of the first token is a number; OpenAI sends null.
        answer["choices"][0]["logprobs"] = None
        Completion.model_validate(answer)

    serve(scenario, says("xyz"))


@pytest.mark.parametrize("cache_report", [True, False])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_responses(serve: Serve, answer: str, cache_report: bool) -> None:
    async def scenario(server: Any) -> None:
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        body = {"model": "m", "input": "hi", "tools": tools}
        whole = (await server.http.post(RESPONSES, json=body)).json()
        usage = Response.model_validate(whole).usage
        assert usage is not None
        assert (
            usage.input_tokens_details.cached_tokens,
            usage.input_tokens_details.cache_write_tokens,
        ) == (2, 0)
        events = await streamed(server, RESPONSES, body)
        for event in events:
            TypeAdapter(ResponseStreamEvent).validate_python(event)

    serve(scenario, says(answer, num_cached=2), enable_cache_report=cache_report, **PARSERS)


def test_embeddings(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = (await server.http.post("/v1/embeddings", json={"input": "a"})).json()
        CreateEmbeddingResponse.model_validate(answer)

    serve(scenario, FakeEngine(), pooling=Pooling("last", True, EMBEDDING_SIZE, None, "test"))
