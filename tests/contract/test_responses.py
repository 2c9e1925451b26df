"""``/v1/responses`` on a fake engine, through the official client over real HTTP and in process:
what an answer holds, and what a stream says in which order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pydantic
import pytest
from answers import says

from setpoint.core.messages import Finish
from setpoint_testing.byte_tokenizer import EOS_ID
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PARSERS = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ROOM = 4096


Connect = Callable[..., openai.OpenAI]


@pytest.fixture
def connect(http_url: Callable[..., str]) -> Iterator[Connect]:
    """``connect(engine, **config)``: the official client of a fresh application on a real port."""
    with ExitStack() as stack:

        def client(engine: FakeEngine, **config: Any) -> openai.OpenAI:
            url = f"{http_url(engine, **config)}/v1"
            return stack.enter_context(openai.OpenAI(base_url=url, api_key="none", max_retries=0))

        yield client


def prompt_of(engine: FakeEngine, index: int = -1) -> str:
    return bytes(token for token in engine.submitted[index].prompt() if token < 256).decode()


def without_ids(value: Any) -> Any:
    """What two answers to the same request have in common."""
    if isinstance(value, dict):
        own = ("id", "item_id", "created_at", "completed_at", "call_id")
        return {key: without_ids(item) for key, item in value.items() if key not in own}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def test_a_text_answer(connect: Connect) -> None:
    engine = says("Grüezi!", context_len=ROOM)
    client = connect(engine)
    answer = client.responses.create(
        model="default",
        input="hi",
        instructions="Be short.",
        metadata={"a": "b"},
        temperature=0.5,
        max_output_tokens=50,
        service_tier="auto",
        prompt_cache_key="k",
        user="u",
    )
    assert answer.output_text == "Grüezi!"
    assert (answer.status, answer.object, answer.model) == ("completed", "response", "org/tiny")
    assert answer.id.startswith("resp_")
    (message,) = answer.output
    assert (message.type, message.status, message.role) == ("message", "completed", "assistant")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("Grüezi!".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.metadata, answer.temperature) == ({"a": "b"}, 0.5)
    assert (answer.instructions, answer.error) == ("Be short.", None)
    assert "Be short." in prompt_of(engine)
    assert client.responses.retrieve(answer.id) == answer


def events_of(client: openai.OpenAI, **body: Any) -> list[Any]:
    return list(client.responses.create(model="default", stream=True, **body))


def test_the_events_of_a_text(connect: Connect) -> None:
    engine = says("Hello", context_len=ROOM)
    client = connect(engine)
    events = events_of(client, input="hi")
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 5,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello"
    assert events[0].response.status == events[1].response.status == "in_progress"
    final = events[-1].response
    assert (final.status, final.output_text) == ("completed", "Hello")
    assert client.responses.retrieve(final.id) == final


@pytest.mark.parametrize(
    "text",
    [
        f"<think>\nIt asks for weather.\n</think>\n\nI look it up.\n{CALL}\n{CALL}",
        f"<think>Hm.</think>{CALL}",
        "<think>Only thinking",
        f"Plain é text, then {CALL}",
        "<think>\n\n</think>\n\nNo thoughts.",
        " \n ",
        "",
    ],
)
def test_a_stream_has_what_the_whole_answer_has(connect: Connect, text: str) -> None:
    engine = says(text, context_len=ROOM)
    client = connect(engine, **PARSERS)
    body: dict[str, Any] = {"input": "hi", "tools": [WEATHER]}
    whole = client.responses.create(model="default", **body)
    with client.responses.stream(model="default", **body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    last = events[-1].response.to_dict()["output"]
    for item in last:
        item.pop("parsed_arguments", None)  # added by the client
        for part in item.get("content") or []:
            part.pop("parsed", None)
    assert without_ids(last) == without_ids(whole.to_dict()["output"])
    assert without_ids(whole.to_dict()["usage"]) == without_ids(final.to_dict()["usage"])
    assert final.output_text == whole.output_text
    joined: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            joined[event.output_index] = joined.get(event.output_index, "") + event.delta
    for index, item in enumerate(whole.output):
        said = (
            item.arguments
            if item.type == "function_call"
            else "".join(part.text for part in item.content or [])  # type: ignore[union-attr]
        )
        assert joined.get(index, "") == said


def test_reasoning_text_and_calls(connect: Connect) -> None:
    text = f"<think>It asks.</think>I look.\n{CALL}"
    engine = says(text, context_len=ROOM)
    client = connect(engine, **PARSERS)
    events = events_of(client, input="hi", tools=[WEATHER])
    names = [event.type.removeprefix("response.") for event in events]
    once = [name for index, name in enumerate(names) if names[index - 1] != name]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    reasoning, message, call = events[-1].response.output
    assert reasoning.content[0].text == "It asks."
    assert message.content[0].text.strip() == "I look."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Zürich"})
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens > 0


def test_an_agent_goes_on_by_the_id_of_the_last_response(serve: Serve) -> None:
    answers = [f"<think>Look.</think>{CALL}", "It rains."]
    engine = FakeEngine(
        script=lambda request: [*answers[len(engine.submitted) > 1].encode(), EOS_ID],
        eos_ids=frozenset({EOS_ID}),
        context_len=ROOM,
    )

    async def scenario(server: Any) -> None:
        responses = server.openai.responses
        first = await responses.create(
            model="default", input="Weather?", tools=[WEATHER], instructions="Only now."
        )
        call = first.output[-1]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await responses.create(
            model="default", input=[output], tools=[WEATHER], previous_response_id=first.id
        )
        assert second.output_text == "It rains."
        prompt = prompt_of(engine)
        assert "Only now." not in prompt, "instructions are not carried over"
        for part in ("Weather?", "Zürich", "rain"):
            assert part in prompt
        third = await responses.create(
            model="default", input="And now?", previous_response_id=second.id
        )
        listed = [item async for item in await responses.input_items.list(third.id, order="asc")]
        assert [item.type for item in listed] == [
            "message",
            "reasoning",
            "function_call",
            "function_call_output",
            "message",
            "message",
        ]
        page = await responses.input_items.list(third.id, limit=2)
        assert ([item.type for item in page.data], page.has_more) == (["message", "message"], True)
        # The same by hand, as clients without a stored state do it.
        items = [{"role": "user", "content": "Weather?"}, *first.to_dict()["output"], output]
        await responses.create(model="default", input=items, tools=[WEATHER], store=False)
        assert prompt_of(engine) == prompt
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        items = [{"role": "user", "content": "Weather?"}, *references, output]
        await responses.create(model="default", input=items, tools=[WEATHER])
        assert prompt_of(engine) == prompt
        await responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match=r"input\[1\].id: this server stores no"):
            await responses.create(model="default", input=items, tools=[WEATHER])

    serve(scenario, engine, **PARSERS)


def test_parsed_output_is_constrained(serve: Serve) -> None:
    class City(pydantic.BaseModel):
        name: str

    engine = says('{"name": "Bern"}', context_len=ROOM)

    async def scenario(server: Any) -> None:
        answer = await server.openai.responses.parse(
            model="default", input="A city?", text_format=City
        )
        assert answer.output_parsed == City(name="Bern")
        schema = json.loads(engine.submitted[-1].sampling.json_schema)
        assert schema["properties"]["name"]["type"] == "string"
        assert answer.text.format.type == "json_schema"
        await server.openai.responses.create(
            model="default", input="x", text={"format": {"type": "json_object"}}
        )
        assert json.loads(engine.submitted[-1].sampling.json_schema) == {"type": "object"}

    serve(scenario, engine)


def test_a_limit_and_an_abort(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        responses = server.openai.responses
        cut = await responses.create(model="default", input="hi", max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (cut.output_text, cut.output[0].status) == ("He", "incomplete")
        stream = await responses.create(
            model="default", input="hi", max_output_tokens=2, stream=True
        )
        last = [event async for event in stream][-1]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"

    serve(scenario, says("Hello", context_len=ROOM))


def test_an_error_before_and_in_a_stream(serve: Serve) -> None:
    def refuse(request: Any) -> Finish | None:
        running = next(each for each in engine.running.values() if each.request is request)
        if running.num_sent < (3 if request.options.stream else 0):
            return None
        return Finish("abort", message="Full.", status_code=503, err_type="Overloaded")

    engine = says("Hello", context_len=ROOM, refuse=refuse)

    async def scenario(server: Any) -> None:
        responses = server.openai.responses
        with pytest.raises(openai.InternalServerError, match="Full"):
            await responses.create(model="default", input="hi")
        stream = await responses.create(model="default", input="hi", stream=True)
        events = [event async for event in stream]
        last = events[-1]
        assert last.type == "response.failed"
        assert last.sequence_number == len(events) - 1
        assert (last.response.status, last.response.error.message) == ("failed", "Full.")
        kept = await responses.retrieve(last.response.id)
        assert kept.status == "failed"

    serve(scenario, engine)


def test_what_is_accepted_without_effect_is_told(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {
            "input": "hi",
            "model": "another",
            "reasoning": {"summary": "detailed", "effort": "low"},
            "text": {"verbosity": "low"},
            "colour": "red",
        }
        answer = (await server.http.post("/v1/responses", json=body)).json()
        told = " ".join(answer["warnings"])
        for name in ("reasoning.summary", "text.verbosity", "colour", "another"):
            assert name in told
        assert (answer["reasoning"]["effort"], answer["text"]["verbosity"]) == ("low", "low")

    serve(scenario, says("Hello", context_len=ROOM))


def test_input_tokens(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body: Any = {"input": "hi", "instructions": "Be short.", "tools": [WEATHER]}
        counted = await server.openai.responses.input_tokens.count(model="default", **body)
        answer = await server.openai.responses.create(model="default", **body)
        assert counted.input_tokens == answer.usage.input_tokens

    serve(scenario, says("Hello", context_len=ROOM))
