"""Tools through the official openai client, whole and streamed: its own accumulators must read the
calls (docs/sglang/api.md#openai-routes)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic
import pytest
from answers import CHAT, HI, says

from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Roma 🙂"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def calls(text: str) -> FakeEngine:
    """An engine that answers with ``text``, with room for descriptions of tools."""
    return says(text, context_len=4096)


async def whole_and_streamed(server: Any, **body: Any) -> tuple[Any, Any]:
    """The message of the whole answer, and the one that the client puts together of a stream."""
    body = {"model": "m", "messages": HI, **body}
    one = await server.openai.chat.completions.create(**body)
    async with server.openai.chat.completions.stream(**body) as stream:
        other = await stream.get_final_completion()
    assert one.choices[0].finish_reason == other.choices[0].finish_reason
    return one.choices[0], other.choices[0]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or ()
    ]


def test_calls_whole_and_streamed(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for choice in await whole_and_streamed(server, tools=[WEATHER, TIME]):
            assert choice.finish_reason == "tool_calls"
            assert calls_of(choice) == [("weather", {"city": "Roma 🙂"}), ("time", {})]
            assert choice.message.content == "Let me see."
            ids = [call.id for call in choice.message.tool_calls]
            assert all(each.startswith("call_") for each in ids)
            assert len(set(ids)) == 2

    serve(scenario, calls(f"Let me see.\n{ROME}\n{NOW}"))


def test_a_call_without_text_has_empty_content(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        one, other = await whole_and_streamed(server, tools=[WEATHER])
        assert calls_of(one) == calls_of(other) == [("weather", {"city": "Roma 🙂"})]
        assert one.message.content == "", "as SGLang: never null"
        assert not other.message.content

    serve(scenario, calls(ROME))


def test_the_pieces_of_a_streamed_call(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        stream = await server.openai.chat.completions.create(
            model="m", messages=HI, tools=[WEATHER, TIME], stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        pieces = [call for delta in deltas for call in delta.tool_calls or ()]
        firsts = [piece for piece in pieces if piece.id]
        assert [(each.index, each.type, each.function.name) for each in firsts] == [
            (0, "function", "weather"),
            (1, "function", "time"),
        ]
        later = [piece for piece in pieces if not piece.id]
        assert later, "arguments arrive in pieces"
        assert all(piece.type is None and piece.function.name is None for piece in later)
        assert all(piece.function.arguments is not None for piece in pieces)
        assert all("content" not in each.model_fields_set or each.content is None
                   for each in deltas[1:] if each.tool_calls)  # fmt: skip
        text = "".join(piece.function.arguments for piece in pieces if piece.index == 0)
        assert json.loads(text) == {"city": "Roma 🙂"}

    serve(scenario, calls(f"{ROME}\n{NOW}"))


def test_n_answers_have_calls_of_their_own(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.openai.chat.completions.create(
            model="m", messages=HI, tools=[WEATHER], n=2
        )
        assert [calls_of(choice) for choice in answer.choices] == [
            [("weather", {"city": "Roma 🙂"})]
        ] * 2
        assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 2

    serve(scenario, calls(ROME))


def test_a_round_trip_shows_the_model_its_call_and_the_result(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        create = server.openai.chat.completions.create
        answer = await create(model="m", messages=HI, tools=[WEATHER])
        message = answer.choices[0].message
        result = {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "content": [{"type": "text", "text": "sunny"}],
        }
        for said in (message, {**message.model_dump(exclude_none=True), "content": None}):
            await create(model="m", messages=[*HI, said, result], tools=[WEATHER])
        first, second = (
            server.service.answering.text.tokenizer.decode(request.prompt().tolist())
            for request in server.engine.submitted[1:]
        )
        assert first == second
        assert '<tool_call>\n{"name":"weather","arguments":{"city":"Roma 🙂"}}' in first
        assert "<tool_response>\nsunny\n</tool_response>" in first

    serve(scenario, calls(ROME))


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ("auto", None),
        ("none", None),
        ("required", "tags_with_separator"),
        ({"type": "function", "function": {"name": "weather"}}, "tags_with_separator"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
            "triggered_tags",
        ),
    ],
)
def test_the_choice_among_tools_constrains_the_answer(
    serve: Serve, choice: Any, kind: str | None
) -> None:
    async def scenario(server: Any) -> None:
        await server.openai.chat.completions.create(
            model="m", messages=HI, tools=[WEATHER, TIME], tool_choice=choice
        )
        constraint = server.engine.submitted[0].sampling.constraint
        if kind is None:
            assert constraint is None
        else:
            form = json.loads(constraint.text)["format"]
            assert form["type"] == kind
            names = [tag["begin"].split('"')[3] for tag in form["tags"]]
            assert names == (["weather", "time"] if choice == "required" else ["weather"])

    serve(scenario, calls(ROME))


def test_strict_tools_constrain_free_calls(serve: Serve) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]

    async def scenario(server: Any) -> None:
        await server.openai.chat.completions.create(model="m", messages=HI, tools=[strict, TIME])
        form = json.loads(server.engine.submitted[0].sampling.constraint.text)["format"]
        assert form["tags"][0]["content"]["json_schema"] == strict["function"]["parameters"]
        assert form["tags"][1]["content"]["json_schema"] == {"type": "object"}

    serve(scenario, calls(ROME))


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str
    unit: Literal["c", "f"] = "c"


class Step(pydantic.BaseModel):
    explanation: str
    result: int


def test_the_client_parses_a_structured_answer(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"model": "m", "messages": HI, "response_format": Step}
        answer = await server.openai.chat.completions.parse(**body)
        assert answer.choices[0].message.parsed == Step(explanation="1+1", result=2)
        async with server.openai.chat.completions.stream(**body) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Step(explanation="1+1", result=2)
        assert {"content.delta", "content.done"} <= set(kinds)
        sent = server.engine.submitted[0].sampling.constraint
        assert json.loads(sent.text)["required"] == ["explanation", "result"]

    serve(scenario, says('{"explanation": "1+1", "result": 2}'))


def test_the_client_parses_the_arguments_of_a_strict_tool(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        tool = openai.pydantic_function_tool(Weather, name="weather")
        body = {"model": "m", "messages": HI, "tools": [tool]}
        answer = await server.openai.chat.completions.parse(**body)
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.parsed_arguments == Weather(city="Rome", unit="f")
        async with server.openai.chat.completions.stream(**body) as stream:
            kinds = [event.type async for event in stream]
        assert "tool_calls.function.arguments.done" in kinds

    text = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "unit": "f"}}\n</tool_call>'
    )
    serve(scenario, calls(text))


def test_reasoning_is_a_field_of_its_own_and_counted(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        one, other = await whole_and_streamed(server)
        for choice in (one, other):
            assert choice.message.content == "yes"
        assert one.message.model_extra["reasoning_content"] == "hm, hm"
        assert one.message.model_extra["reasoning"] == "hm, hm", "the name of vLLM's clients"
        stream = await server.openai.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True},
            extra_body={"stream_reasoning": False},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        reasoning = [
            chunk.choices[0].delta.model_extra["reasoning_content"]
            for chunk in chunks
            if chunk.choices
        ]
        assert [each for each in reasoning if each] == ["hm, hm"]
        num_reasoning = len("<think>hm, hm</think>")
        usage = chunks[-1].usage
        assert usage.completion_tokens_details.reasoning_tokens == num_reasoning
        assert usage.model_extra["reasoning_tokens"] == num_reasoning
        plain = await server.openai.chat.completions.create(
            model="m", messages=HI, extra_body={"separate_reasoning": False}
        )
        assert plain.choices[0].message.content == "<think>hm, hm</think>yes"
        assert plain.usage.completion_tokens_details.reasoning_tokens == num_reasoning

    serve(scenario, says("<think>hm, hm</think>yes"), reasoning_parser="qwen3")


def test_reasoning_has_two_names_in_a_stream(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        stream = await server.openai.chat.completions.create(model="m", messages=HI, stream=True)
        extras = [chunk.choices[0].delta.model_extra async for chunk in stream]
        said = [extra["reasoning"] for extra in extras if "reasoning" in extra]
        assert "".join(said) == "hm, hm"
        assert said == [each["reasoning_content"] for each in extras if each["reasoning_content"]]

    serve(scenario, says("<think>hm, hm</think>yes"), reasoning_parser="qwen3")


@pytest.mark.parametrize("separate", [True, False])
def test_reasoning_can_be_left_out(serve: Serve, separate: bool) -> None:
    """Red before: vLLM's key was ignored without a word, because its value is false."""

    async def scenario(server: Any) -> None:
        create = server.openai.chat.completions.create
        body = {"include_reasoning": False, "separate_reasoning": separate}
        answer = await create(model="default", messages=HI, extra_body=body)
        message = answer.choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("yes", None)
        assert "warnings" not in answer.model_dump()
        assert answer.usage.completion_tokens_details.reasoning_tokens > 0
        stream = await create(model="default", messages=HI, stream=True, extra_body=body)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(delta.content or "" for delta in deltas) == "yes"
        assert not any(delta.model_extra["reasoning_content"] for delta in deltas)
        shown = await create(model="default", messages=HI, extra_body={"include_reasoning": True})
        assert shown.choices[0].message.model_extra["reasoning"] == "hm, hm"

    serve(scenario, says("<think>hm, hm</think>yes"), reasoning_parser="qwen3")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": 5}, "tools must be a list, got a whole number."),
        ({"tools": [5]}, "tools[0] must be an object, got a whole number."),
        ({"tools": [{"type": "function"}]}, "tools[0].function is missing."),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type must"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name must"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters must be an object, got a list.",
        ),
        ({"tools": [TIME, TIME]}, "tools[1]: two tools have the name 'time'."),
        ({"tools": [TIME], "tool_choice": "any"}, "tool_choice must be auto, none, required,"),
        ({"tools": [TIME], "tool_choice": 5}, "tool_choice must be a string or an object, got"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice: Tool 'f' not found in tools list",
        ),
        ({"tool_choice": "required"}, "tool_choice requires a call, but tools is empty."),
        ({"functions": [{"name": "f"}]}, "functions is OpenAI's older form; use tools instead."),
        ({"function_call": "auto"}, "function_call is OpenAI's older form; use tool_choice"),
        (
            {"messages": [*HI, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
            "messages[1] is the result of a tool, but no earlier message of the assistant has"
            " tool_calls.",
        ),
    ],
)
def test_wrong_tools_are_refused_by_name(serve: Serve, body: Any, message: str) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(CHAT, json={"messages": HI, **body})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"].startswith(message)
        assert error["param"].startswith(message.split("[")[0].split()[0].rstrip(".:"))
        assert server.engine.submitted == []

    serve(scenario)
