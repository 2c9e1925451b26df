"""An agent's requests to the default model, through the official client: whatever a small model
says, calls that are asked for arrive, and structured answers satisfy their schema."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.deltas import join_deltas
from setpoint.frontend.chat.formats.format_registry import TOOL_FORMATS
from setpoint.frontend.chat.parser import parse_answer
from setpoint_testing.server_process import ServerProcess

ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": PARAMETERS,
        "strict": True,
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TIME: Any = {"type": "function", "function": {"name": "time", "parameters": NOTHING}}


@pytest.fixture
def client(smol: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", timeout=60, max_retries=0)


def test_a_required_call_its_result_and_the_answer(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "default", "tools": [WEATHER, TIME], "temperature": 0}
    chosen = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        messages=ASKED, tool_choice=chosen, parallel_tool_calls=False, max_tokens=200, **body
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == ""
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees celsius."}
    last = client.chat.completions.create(
        messages=[*ASKED, choice.message, result], tool_choice="none", max_tokens=24, **body
    )
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_any_tool_is_required(client: openai.OpenAI, stream: bool) -> None:
    body: dict[str, Any] = {
        "model": "default",
        "messages": ASKED,
        "tools": [WEATHER, TIME],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": 3,
        "max_tokens": 200,
    }
    if stream:
        with client.chat.completions.stream(**body) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**body).choices[0]  # type: ignore[assignment]
    (call,) = choice.message.tool_calls or ()
    assert call.function.name in ("weather", "time")
    assert isinstance(json.loads(call.function.arguments), dict)
    assert choice.finish_reason == "tool_calls"


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    continent: Literal["Europe", "Asia", "Africa", "America", "Australia"]
    inhabitants: int


def test_an_answer_is_parsed_by_the_client(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Describe Rome."}],
        "response_format": City,
        "temperature": 1,
        "max_tokens": 200,
    }
    for seed in range(2):
        answer = client.chat.completions.parse(seed=seed, **body)
        assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(seed=0, **body) as events:
        assert events.get_final_completion().choices[0].message.parsed is not None


def test_an_answer_satisfies_its_schema_or_is_calls(client: openai.OpenAI) -> None:
    for seed in range(2):
        answer = client.chat.completions.create(
            model="default",
            messages=ASKED,
            tools=[WEATHER],
            parallel_tool_calls=False,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": PARAMETERS},
            },
            temperature=1,
            seed=seed,
            max_tokens=200,
        )
        message = answer.choices[0].message
        texts = [call.function.arguments for call in message.tool_calls or ()]  # type: ignore[union-attr]
        for text in texts or [message.content or ""]:
            jsonschema.validate(json.loads(text), PARAMETERS)


CHOICES = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
}


@pytest.mark.full
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_a_formats_structure_allows_its_parser_reads(smol: ServerProcess, name: str) -> None:
    form = TOOL_FORMATS[name]
    # Formats in XML can be held to types and choices only.
    for parameters in (PARAMETERS, CHOICES):
        tools = (Tool("weather", parameters=parameters), Tool("time", parameters=NOTHING))
        structure = form.structure(tools, required=True, parallel=False)
        if structure is not None:
            break
    else:
        pytest.skip("its calls cannot be described by a structural tag")
    for seed in range(4):
        sampling = {
            "structural_tag": structure,
            "temperature": 1,
            "sampling_seed": seed,
            "max_new_tokens": 400,
            "skip_special_tokens": False,
        }
        answer = smol.generate(text="The weather in Rome?", sampling_params=sampling)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer["text"]
        said = join_deltas(parse_answer(form.parser(tools), answer["text"]))
        assert not said.text.strip()
        (call,) = said.calls
        if call.name == "weather":
            jsonschema.validate(json.loads(call.arguments), parameters)
        else:
            assert call.name == "time"
