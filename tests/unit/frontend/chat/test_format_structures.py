"""The structural tags of the formats, enforced by the grammar engine: what they let through is what
the parsers read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_cases import verdict
from tool_format_cases import KIMI_CALL, KIMI_CALLS, V3_CALL, V3_CALLS, V31_CALL
from xml_format_cases import DSML_CALLS, MINIMAX_CALLS

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.deltas import join_deltas
from setpoint.frontend.chat.formats.format_registry import TOOL_FORMATS
from setpoint.frontend.chat.formats.json_array import JSON_ARRAY, required_calls
from setpoint.frontend.chat.parser import parse_answer

TOOL = Tool(
    "get",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    strict=True,
)
PING = Tool("ping")
ARGUMENTS = '{"city": "Bern", "days": 3}'
STEP = "<｜tool_call_begin｜>function<｜tool_sep｜>{}<｜tool_call_end｜>"


def element(call: tuple[str, str], argument: str) -> str:
    return call[0] + argument.format("city", "Bern") + argument.format("days", 3) + call[1]


CODER = element(
    ("<tool_call>\n<function=get>\n", "</function>\n</tool_call>"),
    "<parameter={}>\n{}\n</parameter>\n",
)
GLM = element(
    ("<tool_call>get\n", "</tool_call>"), "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
)
MINIMAX = element(('<invoke name="get">\n', "</invoke>\n"), '<parameter name="{}">{}</parameter>\n')
DSML = (
    '<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="city" string="true">Bern'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
STEP_CALL = STEP.format(
    element(
        ('<steptml:invoke name="get">\n', "</steptml:invoke>"),
        '<steptml:parameter name="{}">{}</steptml:parameter>\n',
    )
)
JSON_CALL = f'{{"name": "get", "arguments": {ARGUMENTS}}}'
LLAMA3 = f'{{"name": "get", "parameters": {ARGUMENTS}}}'
HERMES = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
KIMI = KIMI_CALL.format("get:{}", ARGUMENTS.replace("{", "{{").replace("}", "}}"))
ONE_AND_TWO = {
    "deepseekv3": (
        V3_CALLS.format(V3_CALL.format("get", ARGUMENTS)),
        V3_CALLS.format("\n".join([V3_CALL.format("get", ARGUMENTS)] * 2)),
    ),
    "deepseekv31": (
        V3_CALLS.format(V31_CALL.format("get", ARGUMENTS)),
        V3_CALLS.format(V31_CALL.format("get", ARGUMENTS) * 2),
    ),
    "deepseekv32": (DSML_CALLS.format(DSML), DSML_CALLS.format(DSML * 2)),
    "deepseekv4": tuple(
        DSML_CALLS.format(DSML * times).replace("function_calls", "tool_calls") for times in (1, 2)
    ),
    "deepseekv41": tuple(
        DSML_CALLS.format(DSML * times)
        .replace("function_calls", "calls")
        .replace("DSML｜", "DSML｜ ")
        for times in (1, 2)
    ),
    "glm45": (GLM, f"{GLM}\n{GLM}"),
    "hermes": (HERMES, f"{HERMES}\n{HERMES}"),
    "hunyuan_a13b": (
        f"<tool_calls>[{JSON_CALL}]</tool_calls>",
        f"<tool_calls>[{JSON_CALL}, {JSON_CALL}]</tool_calls>",
    ),
    "kimi_k2": (
        KIMI_CALLS.format(KIMI.format(0)),
        KIMI_CALLS.format(KIMI.format(0) + KIMI.format(1)),
    ),
    "llama3": (LLAMA3, f"{LLAMA3}; {LLAMA3}"),
    "minimax-m2": (MINIMAX_CALLS.format(MINIMAX), MINIMAX_CALLS.format(MINIMAX * 2)),
    "mistral": (f"[TOOL_CALLS] [{JSON_CALL}]", f"[TOOL_CALLS] [{JSON_CALL}, {JSON_CALL}]"),
    "qwen3_coder": (CODER, f"{CODER}\n{CODER}"),
    "step3": (
        f"<｜tool_calls_begin｜>{STEP_CALL}<｜tool_calls_end｜>",
        f"<｜tool_calls_begin｜>{STEP_CALL}\n{STEP_CALL}<｜tool_calls_end｜>",
    ),
}
WITHOUT = {"functiongemma", "gemma4", "gpt-oss", "hunyuan", "pythonic", "lfm2"}
"""Formats that no structural tag describes."""


def lets_through(structure: dict[str, Any], text: str) -> bool:
    return verdict(text, structural_tag=json.dumps(structure)) in ("may end", "ends")


def test_every_format_is_described_or_known_not_to_be() -> None:
    described = {
        form.name
        for form in TOOL_FORMATS.values()
        if form.structure([TOOL, PING], required=True, parallel=True) is not None
    }
    assert described == {TOOL_FORMATS[name].name for name in ONE_AND_TWO}
    assert {form.name for form in TOOL_FORMATS.values()} == described | WITHOUT


@pytest.mark.parametrize("name", ONE_AND_TWO)
def test_calls_that_must_be_made(name: str) -> None:
    one, two = ONE_AND_TWO[name]
    form = TOOL_FORMATS[name]
    many = form.structure([PING, TOOL], required=True, parallel=True)
    single = form.structure([PING, TOOL], required=True, parallel=False)
    assert many is not None
    assert single is not None
    for text, calls in ((one, 1), (two, 2)):
        assert lets_through(many, text)
        found = join_deltas(parse_answer(form.parser([PING, TOOL]), text))
        assert [(call.name, call.arguments) for call in found.calls] == [("get", ARGUMENTS)] * calls
        assert found.text == ""
    assert lets_through(single, one)
    assert not lets_through(single, two)
    for wrong in (
        "",
        f"Hm. {one}",
        one.replace("city", "town"),
        one.replace("3", "x"),
        one.replace("get", "got"),
    ):
        assert not lets_through(many, wrong), wrong


@pytest.mark.parametrize("name", ONE_AND_TWO)
def test_calls_that_may_be_made(name: str) -> None:
    one, two = ONE_AND_TWO[name]
    if name == "llama3":  # a call without the marker is text to the grammar
        one, two = (f"<|python_tag|>{text}" for text in (one, two))
        two = two.replace("; ", "; <|python_tag|>")
    structure = TOOL_FORMATS[name].structure([PING, TOOL], required=False, parallel=True)
    assert structure is not None
    for right in ("", "Hm.", one, f"Hm.\n{one}", f"Hm. {two} So.", f"{one} {one}"):
        assert lets_through(structure, right), right
    for wrong in (
        one.replace("city", "town"),
        f"Hm. {one.replace('3', 'x')}",
        one.replace("get", "got"),
    ):
        assert not lets_through(structure, wrong), wrong
    loose = TOOL_FORMATS[name].structure(
        [PING, Tool("get", parameters=TOOL.parameters)], required=False, parallel=True
    )
    assert loose is not None
    assert lets_through(loose, one.replace("city", "town"))


def test_the_array_in_place_of_a_format() -> None:
    for form in (None, TOOL_FORMATS["pythonic"]):
        found, structure = required_calls(form, [PING, TOOL], parallel=True)
        assert found is JSON_ARRAY
        assert lets_through(structure, f"[{LLAMA3}, {LLAMA3}]")
        assert not lets_through(structure, "[]")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}]}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
        {"type": "object", "properties": {}, "minProperties": 1},
        {"type": "object", "properties": {}, "required": ["a"]},
        {"type": "object", "properties": True},
    ],
)
def test_schemas_that_plain_text_cannot_be_held_to(parameters: dict[str, Any]) -> None:
    tool = Tool("f", parameters=parameters, strict=True)
    form = TOOL_FORMATS["qwen3_coder"]
    assert form.structure([tool], required=False, parallel=True) is None
    assert required_calls(form, [tool], parallel=True)[0] is JSON_ARRAY


def test_choices_and_arguments_that_may_be_left_out() -> None:
    structure = TOOL_FORMATS["qwen3_coder"].structure([TOOL], required=True, parallel=True)
    assert structure is not None
    unit = "<parameter=unit>\n{}\n</parameter>\n</function>"
    assert lets_through(structure, CODER.replace("</function>", unit.format("C")))
    assert not lets_through(structure, CODER.replace("</function>", unit.format("K")))
