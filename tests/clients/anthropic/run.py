"""Anthropic's Python client."""

from __future__ import annotations

import anthropic
from checks import MODEL, URL, check, refused, report

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"extra_body": {"temperature": 0}}  # the client has no parameter for it any more
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}


@check("a message")
def message() -> None:
    answer = client.messages.create(model=MODEL, messages=ASK, **GREEDY, max_tokens=16)
    assert "Paris" in answer.content[0].text
    assert answer.usage.output_tokens > 0


@check("a streamed message")
def streamed() -> None:
    with client.messages.stream(
        model=MODEL, messages=ASK, **GREEDY, max_tokens=16, system="Be brief."
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    assert final.stop_reason in ("end_turn", "max_tokens")


@check("stop sequences")
def stops() -> None:
    answer = client.messages.create(
        model=MODEL, messages=ASK, **GREEDY, max_tokens=32, stop_sequences=["Paris"]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")


@check("count_tokens")
def count() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK)
    answer = client.messages.create(model=MODEL, messages=ASK, max_tokens=1)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check("a tool call and its result")
def tool() -> None:
    answer = client.messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
        max_tokens=100,
    )
    assert answer.stop_reason == "tool_use"
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert "city" in call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    after = client.messages.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "What is the weather in Paris?"},
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ],
        tools=[TOOL],
        max_tokens=16,
    )
    assert after.role == "assistant"


@check("a streamed tool call")
def streamed_tool() -> None:
    with client.messages.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=200,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert any(block.type == "tool_use" for block in final.content)


@check("a refusal is BadRequestError")
def refusal() -> None:
    with refused(anthropic.BadRequestError) as errors:
        client.messages.create(model=MODEL, messages=ASK, max_tokens=16, extra_body={"top_p": 9})
    (error,) = errors
    assert "top_p" in error.message
    assert error.body["error"]["type"] == "invalid_request_error"


report()
