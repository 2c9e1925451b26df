"""The words of refusals that clients of SGLang look for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answers import CHAT, HI, says

from setpoint.core.constraint import compile_refusal
from setpoint.core.messages import Finish
from setpoint_testing.byte_tokenizer import VOCAB_SIZE
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
LOOK = {"name": "look", "parameters": {"type": "nonsense"}}
TOOLS = [{"type": "function", "function": LOOK}]
ONE = {"type": "function", "function": {"name": "x"}}


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        (CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": ONE}, "Tool 'x' not found in tools list"),
        (CHAT, {"messages": HI, "max_tokens": 300}, "max_completion_tokens is too large: 300"),
        (CHAT, {"messages": HI, "max_completion_tokens": 300}, "max_completion_tokens is too large: 300"),
        ("/generate", {"text": "a", "return_logprob": True, "token_ids_logprob": [-1]}, "out-of-vocabulary"),
        ("/generate", {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": [[0], [2_000_000_000]]},
         "out-of-vocabulary"),
        ("/generate", {"text": "a", "return_logprob": True, "token_ids_logprob": [[0]]}, "flat list of integers"),
        ("/generate", {"input_ids": [VOCAB_SIZE]}, "out-of-vocabulary"),
        ("/generate", {"text": ["a", "b"], "rid": ["x", "x"]}, "Duplicate request ID"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [999999]},
         "Token ID 999999 is out of vocabulary"),
    ],
)  # fmt: skip
def test_words(serve: Serve, route: str, body: dict[str, Any], words: str) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post(route, json=body)
        assert answer.status_code == 400
        assert words in answer.json()["message"]
        assert server.engine.submitted == []

    serve(scenario)


def test_a_longer_answer_than_the_context_is_cut_with_auto_truncate(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post(CHAT, json={"messages": HI, "max_tokens": 300})
        assert answer.status_code == 200

    serve(scenario, says("x"), allow_auto_truncate=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "name"),
    [
        (CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "required"}, "parameters"),
        (CHAT, {"messages": HI, "tools": [{"type": "function", "function": LOOK | {"strict": True}}]}, "parameters"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", **LOOK}], "tool_choice": "required"},
         "parameters"),
        ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": HI, "tool_choice": {"type": "any"},
                          "tools": [{"name": "look", "input_schema": LOOK["parameters"]}]}, "input_schema"),
    ],
)  # fmt: skip
def test_the_schema_of_a_tool(
    serve: Serve, route: str, body: dict[str, Any], name: str, stream: bool
) -> None:
    """The engine compiles it as a part of a structural tag, of which the client knows nothing."""
    why = compile_refusal("structural_tag") + "Invalid type: nonsense"
    refused = Finish("abort", message=why, status_code=400, err_type="BadRequestError")

    async def scenario(server: Any) -> None:
        answer = await server.http.post(route, json={**body, "stream": stream})
        assert f"The tools have an invalid '{name}' schema: Invalid type: nonsense" in answer.text
        assert "structural_tag" not in answer.text
        assert name == "input_schema" or '"param":"tools"' in answer.text

    serve(scenario, FakeEngine(refuse=lambda request: refused, context_len=4096))


def test_a_client_s_own_structural_tag_is_called_that(serve: Serve) -> None:
    why = compile_refusal("structural_tag") + "Invalid type: nonsense"
    refused = Finish("abort", message=why, status_code=400, err_type="BadRequestError")

    async def scenario(server: Any) -> None:
        body = {"messages": HI, "structural_tag": {"type": "structural_tag"}, "tools": TOOLS}
        answer = await server.http.post(CHAT, json=body)
        assert answer.json()["message"] == why

    serve(scenario, FakeEngine(refuse=lambda request: refused, context_len=4096))
