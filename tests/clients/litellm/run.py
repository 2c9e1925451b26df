"""LiteLLM's library in front of an OpenAI-compatible server."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its list of prices is a download otherwise

import litellm
from checks import MODEL, URL, check, refused, report

ASK = [{"role": "user", "content": "What is the capital of France?"}]
SERVER = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


@check("a chat")
def chat() -> None:
    answer = litellm.completion(
        model=f"openai/{MODEL}", messages=ASK, temperature=0, max_tokens=16, **SERVER
    )
    assert "Paris" in answer.choices[0].message.content


@check("a streamed chat")
def streamed() -> None:
    chunks = litellm.completion(
        model=f"openai/{MODEL}",
        messages=ASK,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        **SERVER,
    )
    whole = litellm.stream_chunk_builder(list(chunks), messages=ASK)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0


@check("text completion")
def completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="One two", max_tokens=4, **SERVER
    )
    assert answer.choices[0].text


@check("a refusal is BadRequestError")
def refusal() -> None:
    with refused(litellm.BadRequestError) as errors:
        litellm.completion(model=f"openai/{MODEL}", messages=ASK, top_p=9, **SERVER)
    (error,) = errors
    assert "top_p" in str(error)


@check("a required tool call")
def tool() -> None:
    answer = litellm.completion(
        model=f"openai/{MODEL}",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=200,
        **SERVER,
    )
    call = answer.choices[0].message.tool_calls[0]
    assert "city" in json.loads(call.function.arguments)


@check("a JSON schema")
def schema() -> None:
    properties = {"city": {"type": "string", "maxLength": 20}}
    wanted = {"type": "object", "properties": properties, "required": ["city"]}
    answer = litellm.completion(
        model=f"openai/{MODEL}",
        messages=ASK,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": wanted, "strict": True},
        },
        max_tokens=100,
        **SERVER,
    )
    assert "city" in json.loads(answer.choices[0].message.content)


report()
