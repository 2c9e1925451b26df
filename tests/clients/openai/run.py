"""OpenAI's Python client: every kind of request that it has a method for."""

from __future__ import annotations

import asyncio
import json
import time

import openai
from checks import MODEL, URL, check, refused, report
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASK = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class City(BaseModel):
    name: str
    population: int


@check("models")
def models() -> None:
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@check("a chat")
def chat() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_completion_tokens=16
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check("a streamed chat with usage")
def streamed() -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_completion_tokens=16
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            temperature=0,
            max_completion_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


@check("n, seed, stop, logprobs, logit_bias")
def options() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        n=2,
        seed=1,
        stop=["."],
        logprobs=True,
        top_logprobs=3,
        logit_bias={"1000": -100},
        max_completion_tokens=16,
    )
    assert len(answer.choices) == 2
    assert all("." not in each.message.content for each in answer.choices)
    first = answer.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) == 3


@check("async, eight chats at once")
def several() -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as aclient:
            answers = await asyncio.gather(
                *(
                    aclient.chat.completions.create(
                        model=MODEL, messages=ASK, temperature=0, max_completion_tokens=8
                    )
                    for _ in range(8)
                )
            )
            assert len({each.choices[0].message.content for each in answers}) == 1
            stream = await aclient.chat.completions.create(
                model=MODEL, messages=ASK, max_completion_tokens=8, stream=True
            )
            last = [each async for each in stream][-1]
            assert last.choices[0].finish_reason in ("stop", "length")

    asyncio.run(ask())


@check("completions: batch, echo, logprobs")
def completions() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One two", "A b c"], max_tokens=4, echo=True, logprobs=2
    )
    assert [each.text[:5] for each in answer.choices] == ["One t", "A b c"]
    assert answer.choices[0].logprobs.tokens[0] == "One"


@check("a refusal is BadRequestError")
def refusal() -> None:
    with refused(openai.BadRequestError) as errors:
        client.chat.completions.create(model=MODEL, messages=ASK, top_p=9)
    (error,) = errors
    assert "top_p" in error.message


@check("a tool call by name, streamed and whole")
def named_tool() -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
        "max_completion_tokens": 100,
    }
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    arguments = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            arguments += piece.function.arguments or ""
    assert json.loads(arguments) == json.loads(call.function.arguments)


@check("tool_choice required, then the tool's result")
def tool_round() -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=200,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert answer.choices[0].finish_reason == "tool_calls"
    messages.append(answer.choices[0].message)
    messages += [
        {"role": "tool", "tool_call_id": each.id, "content": '{"weather": "sunny"}'}
        for each in calls
    ]
    after = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], max_completion_tokens=16
    )
    assert after.choices[0].message.role == "assistant"


@check("structured output: parse with a pydantic model")
def parsed() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a city and its population."}],
        response_format=City,
        temperature=0,
        max_completion_tokens=100,
    )
    assert isinstance(answer.choices[0].message.parsed, City)


@check("structured output: a JSON object, streamed with the helper")
def streamed_json() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a city and its population."}],
        response_format=City,
        temperature=0,
        max_completion_tokens=100,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, City)


@check("responses: create, stream, retrieve, previous_response_id")
def responses() -> None:
    first = client.responses.create(
        model=MODEL, input="What is the capital of France?", temperature=0, max_output_tokens=16
    )
    assert "Paris" in first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=MODEL, input="And of Spain?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.previous_response_id == first.id
    events = list(
        client.responses.create(
            model=MODEL,
            input="What is the capital of France?",
            temperature=0,
            max_output_tokens=16,
            stream=True,
        )
    )
    assert (events[0].type, events[-1].type[:13]) == ("response.created", "response.comp"), events
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == first.output_text


@check("responses: parse and a tool")
def responses_parsed() -> None:
    answer = client.responses.parse(
        model=MODEL, input="Name a city.", text_format=City, temperature=0, max_output_tokens=100
    )
    assert isinstance(answer.output_parsed, City)
    tool = {"type": "function", **WEATHER["function"]}
    answer = client.responses.create(
        model=MODEL,
        input="What is the weather in Paris?",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=200,
    )
    assert any(item.type == "function_call" for item in answer.output)


@check("files and batches")
def batches() -> None:
    asked = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 8}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": asked}
        for name in "ab"
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    for _ in range(300):
        batch = client.batches.retrieve(batch.id)
        if batch.status not in ("validating", "in_progress", "finalizing"):
            break
        time.sleep(0.1)
    assert batch.status == "completed", batch
    answers = client.files.content(batch.output_file_id).text.splitlines()
    assert sorted(json.loads(each)["custom_id"] for each in answers) == ["a", "b"]
    assert "Paris" in answers[0]


report()
