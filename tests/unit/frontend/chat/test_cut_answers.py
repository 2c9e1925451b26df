"""Answers that a limit cuts off at any character: no part of a marker becomes text where a
constraint, or a call that has begun, leaves nothing but a call."""

from __future__ import annotations

from typing import Any

import pytest
from format_cases import TOOLS, streamed

from setpoint.frontend.chat.deltas import join_deltas
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
