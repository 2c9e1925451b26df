"""Answers that a limit cuts off at any character: no part of a marker becomes text where a
constraint, or a call that has begun, leaves nothing but a call."""

from __future__ import annotations

from typing import Any

import pytest
from format_cases import TOOLS, check_stream, streamed

from setpoint.frontend.chat.deltas import arguments_of, join_deltas, num_whole_calls
from setpoint.frontend.chat.formats.format_registry import TOOL_FORMATS
from setpoint.frontend.chat.formats.json_array import JSON_ARRAY
from setpoint.frontend.chat.parser import parse_answer
from setpoint.frontend.chat.turn.calling import Calling

FORMATS = {form.name: form for form in (*TOOL_FORMATS.values(), JSON_ARRAY)}


def written(node: dict[str, Any]) -> str:
    """An answer that a structural tag allows: two calls where it allows two."""
    match node["type"]:
        case "tag":
            return node["begin"] + written(node["content"]) + node["end"]
        case "tags_with_separator":
            tags = [written(tag) for tag in node["tags"]][:2]
            return node["separator"].join(tags)
        case "triggered_tags":
            return "Well. " + written(node["tags"][0])
        case "const_string":
            value: str = node["value"]
            return value
        case "sequence":
            return "".join(map(written, node["elements"]))
        case "regex":
            return "0"
        case "json_schema":
            return '{"city": "Bern"}'
    return ""  # the arguments of elements


def structures() -> list[Any]:
    return [
        pytest.param(form, structure, id=f"{name}-{kind}")
        for name, form in FORMATS.items()
        for kind, required in (("required", True), ("bound", False))
        if (required or form is not JSON_ARRAY)  # which only answers that are calls alone have
        and (structure := form.structure(TOOLS, required=required, parallel=True)) is not None
    ]


@pytest.mark.parametrize(("form", "structure"), structures())
def test_no_marker_is_text(form: Any, structure: dict[str, Any]) -> None:
    """Red before: "<tool_call" was the content of a cut answer with tool_choice required."""
    required = structure["format"]["type"] != "triggered_tags"
    calling = Calling(TOOLS, form, structure, is_required=required)
    whole = written(structure["format"])
    for stop in range(len(whole) + 1):
        answer = join_deltas(parse_answer(calling.parser(TOOLS), whole[:stop]))
        pieces = join_deltas(streamed(calling.parser(TOOLS), whole[:stop]))
        assert pieces.text == answer.text
        if required:
            assert not answer.text, whole[:stop]
            continue
        trigger = structure["format"]["triggers"][0]
        behind = whole[:stop].partition(trigger)
        if behind[1]:
            assert answer.text.strip() == "Well.", whole[:stop]
        else:  # this could still be text, and nothing says that it is not
            assert answer.text.rstrip() == whole[:stop].rstrip()


@pytest.mark.parametrize("name", ["glm", "qwen3_coder", "minimax-m2", "step3", "deepseekv32"])
def test_an_argument_that_is_cut_off_is_no_text(name: str) -> None:
    form: Any = FORMATS[name]
    call = (
        f"{form.section[0] if not form.bare else ''}{form.begin}ping{form.name_end}"
        f"{form.key_begin}a{form.key_end if '=' not in form.key_begin[-2:] else ''}"
    )
    begun = call.index("ping") + len("ping") + len(form.name_end)
    for stop in range(begun + len(form.key_begin), len(call) + 1):
        answer = join_deltas(parse_answer(form.parser(TOOLS), call[:stop]))
        assert [each.name for each in answer.calls] == ["ping"], call[:stop]
        assert not answer.text, call[:stop]


def test_text_that_nothing_constrains_stays_text() -> None:
    for form in FORMATS.values():
        parser = Calling(TOOLS, form, None).parser(TOOLS)
        assert join_deltas(parse_answer(parser, "a <tool_cal")).text == "a <tool_cal"


WHOLE = {
    "hermes": '<tool_call>\n{"name": "ping", "arguments": {"city": "Bern"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=ping>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>ping<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="ping">\n<parameter name="city">Bern'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "mistral": '[TOOL_CALLS]ping[ARGS]{"city": "Bern"}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0"
    '<|tool_call_argument_begin|>{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n"
    '{"city": "Bern"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:ping{city:<|"|>Bern<|"|>,days:3}<tool_call|>',
    "llama3": '{"name": "ping", "parameters": {"city": "Bern"}}',
    "pythonic": '[ping(city="Bern"), ping()]',
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.ping<|message|>"
    '{"city": "Bern"}<|call|>',
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_call_is_cut_where_its_arguments_are_not_complete(name: str) -> None:
    """Red before: nothing told them apart, and some were closed by an empty or shorter object."""
    whole = WHOLE[name]
    for stop in range(len(whole) + 1):
        deltas = streamed(FORMATS[name].parser(TOOLS), whole[:stop])
        check_stream(deltas)
        for answer in (
            join_deltas(deltas),
            join_deltas(parse_answer(FORMATS[name].parser(TOOLS), whole[:stop])),
        ):
            is_complete = [bool(arguments_of(call.arguments)) for call in answer.calls[:1]]
            assert [not call.is_cut for call in answer.calls[:1]] == is_complete, whole[:stop]
            assert num_whole_calls(answer.calls) == len(answer.calls) - is_complete.count(False)
    assert is_complete == [True]
