"""Anthropic's and Ollama's routes on the default model: the same answers as OpenAI's route gives,
whole and streamed, and calls that a grammar makes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess

QUESTION = [{"role": "user", "content": "Name three rivers."}]
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
LIMIT = 12


@pytest.fixture
def client(smol: ServerProcess) -> Any:
    with httpx.Client(base_url=smol.url, timeout=PATIENCE_S) as client:
        yield client


def post(client: httpx.Client, route: str, body: dict[str, Any]) -> httpx.Response:
    response = client.post(route, json={"model": "default", **body})
    assert response.status_code == 200, response.text
    return response


def test_three_apis_give_one_answer(client: httpx.Client) -> None:
    greedy = {"messages": QUESTION, "temperature": 0, "max_tokens": LIMIT}
    chat = post(client, "/v1/chat/completions", greedy).json()
    text = chat["choices"][0]["message"]["content"]
    usage = chat["usage"]

    message = post(client, "/v1/messages", greedy).json()
    assert message["content"] == [{"type": "text", "text": text}]
    assert message["stop_reason"] == "max_tokens"
    counts = message["usage"]
    assert counts["input_tokens"] + counts["cache_read_input_tokens"] == usage["prompt_tokens"]
    assert counts["cache_read_input_tokens"] > 0, "the prompt of the request before"
    assert counts["output_tokens"] == usage["completion_tokens"] == LIMIT
    counted = post(client, "/v1/messages/count_tokens", {"messages": QUESTION}).json()
    assert counted == {"input_tokens": usage["prompt_tokens"]}

    options = {"temperature": 0, "num_predict": LIMIT}
    lines = post(client, "/api/chat", {"messages": QUESTION, "options": options}).text
    parts = [json.loads(line) for line in lines.splitlines()]
    assert "".join(part["message"]["content"] for part in parts) == text
    last = parts[-1]
    assert (last["done_reason"], last["eval_count"]) == ("length", LIMIT)
    assert last["prompt_eval_count"] == usage["prompt_tokens"]
    assert 0 < last["prompt_eval_duration"] < last["total_duration"]


def test_a_streamed_message_is_the_whole_one(client: httpx.Client) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": LIMIT}
    whole = post(client, "/v1/messages", body).json()
    stream = post(client, "/v1/messages", body | {"stream": True}).text
    events = [
        json.loads(line.removeprefix("data: "))
        for line in stream.splitlines()
        if line.startswith("data: ")
    ]
    text = "".join(
        event["delta"]["text"] for event in events if event["type"] == "content_block_delta"
    )
    assert whole["content"] == [{"type": "text", "text": text}]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]


def test_a_call_that_must_be_made_has_its_schema(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    tool = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
    body = {
        "messages": messages,
        "max_tokens": 100,
        "temperature": 0,
        "tools": [tool],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    message = post(client, "/v1/messages", body).json()
    (block,) = message["content"]
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    assert isinstance(block["input"]["place"], str)
    assert message["stop_reason"] == "tool_use"


def test_a_schema_constrains_ollamas_answer(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "Where is the Louvre?"}],
        "format": {**SCHEMA, "additionalProperties": False},
        "options": {"temperature": 0, "num_predict": 60},
        "stream": False,
    }
    answer = post(client, "/api/chat", body).json()
    assert list(json.loads(answer["message"]["content"])) == ["place"]


def test_scores_are_those_of_the_logprobs(client: httpx.Client) -> None:
    """Two routes give the same probabilities of the labels yes and no."""
    tokens = [
        post(client, "/tokenize", {"prompt": word}).json()["tokens"][0] for word in ("yes", "no")
    ]
    question = "Is Paris a city? Answer yes or no: "
    scores = post(
        client,
        "/v1/score",
        {"query": question, "items": [""], "label_token_ids": tokens, "apply_softmax": True},
    ).json()["scores"][0]
    sampling = {"max_new_tokens": 1, "temperature": 1.0}
    meta = post(
        client,
        "/generate",
        {
            "text": question,
            "sampling_params": sampling,
            "return_logprob": True,
            "token_ids_logprob": tokens,
        },
    ).json()["meta_info"]
    yes, no = (entry[0] for entry in meta["output_token_ids_logprobs"][0])
    assert scores[0] / scores[1] == pytest.approx(2.718281828 ** (yes - no), rel=1e-4)
