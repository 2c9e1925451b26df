"""What a model writes around a call that is not well formed is an argument of this call, or text: it
neither disappears nor becomes another call's argument, and no text makes a parser fail."""

from __future__ import annotations

import json

import pytest
from call_writers import DEFINED
from format_cases import check_cuts

from setpoint.frontend.chat.deltas import join_deltas
from setpoint.frontend.chat.formats.format_registry import REASONING_FORMATS, TOOL_FORMATS
from setpoint.frontend.chat.parser import DeltaParser, parse_answer

BERN = {"place": "Bern"}
LOOK = ("look", BERN)
HARMONY = "<|start|>assistant<|channel|>commentary to=functions."
HARMONY_LOOK = HARMONY + 'look <|constrain|>json<|message|>{"place": "Bern"}<|call|>'
GLM_LOOK = "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>"
GEMMA_LOOK = '<|tool_call>call:look{place:<|"|>Bern<|"|>}<tool_call|>'
HERMES_LOOK = '<tool_call>\n{"name": "look", "arguments": {"place": "Bern"}}\n</tool_call>'
EXPRESSIONS = [
    'edit(path="a"+"b")',
    'edit(path="%s" % "x", line=07)',
    'edit(path="x", text="b" if x else "c")',
]

CASES = {
    "a header of gpt-oss without its end": (
        "gpt-oss",
        f'{HARMONY}edit <|constrain|>json{{"path": "x"}}<|call|>{HARMONY_LOOK}',
        'edit <|constrain|>json{"path": "x"}',
        [LOOK],
    ),
    "a header of gpt-oss before the next message": (
        "gpt-oss",
        f'{HARMONY}edit {{"path": "x"}}{HARMONY_LOOK}',
        'edit {"path": "x"}',
        [LOOK],
    ),
    "arguments under another name": (
        "hermes",
        f'<tool_call>\n{{"name": "edit", "args": {{"path": "x"}}}}\n</tool_call>\n{HERMES_LOOK}',
        '{"name": "edit", "args": {"path": "x"}}',
        [LOOK],
    ),
    "arguments beside the name": (
        "hermes",
        f'<tool_call>\n{{"name": "edit", "path": "x"}}\n</tool_call>\n{HERMES_LOOK}',
        '{"name": "edit", "path": "x"}',
        [LOOK],
    ),
    "keys that are no arguments": (
        "hermes",
        '<tool_call>\n{"id": "1", "type": "function", "name": "stop"}\n</tool_call>',
        "",
        [("stop", {})],
    ),
    "a last argument of GLM without the end of its name": (
        "glm",
        "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>x</arg_value>\n"
        f"<arg_key>text\n<arg_value>y</arg_value>\n</tool_call>\n{GLM_LOOK}",
        "<arg_key>text\n<arg_value>y</arg_value>",
        [("edit", {"path": "x"}), LOOK],
    ),
    "the last text is such an argument": (
        "glm",
        "<tool_call>look\n<arg_key>place\n<arg_value>y</arg_value>\n</tool_call>",
        "<arg_key>place\n<arg_value>y</arg_value>",
        [("look", {})],
    ),
    "an argument of Gemma without a colon": (
        "gemma4",
        f'<|tool_call>call:edit{{line:3,path<|"|>x<|"|>}}<tool_call|>{GEMMA_LOOK}',
        'path<|"|>x<|"|>',
        [("edit", {"line": 3}), LOOK],
    ),
    "an argument of Gemma without a comma": (
        "gemma4",
        f'<|tool_call>call:edit{{path:<|"|>x<|"|>text:<|"|>y<|"|>,line:3}}<tool_call|>{GEMMA_LOOK}',
        'text:<|"|>y<|"|>',
        [("edit", {"path": "x", "line": 3}), LOOK],
    ),
    "a malformed argument of Gemma with signs in it": (
        "gemma4",
        f'<|tool_call>call:edit{{line:3,path<|"|>a, b: c}}<|"|>,force:true}}<tool_call|>{GEMMA_LOOK}',
        'path<|"|>a, b: c}<|"|>',
        [("edit", {"line": 3, "force": True}), LOOK],
    ),
    "a call of Gemma in parentheses": (
        "gemma4",
        f'<|tool_call>call:edit(path:<|"|>x<|"|>)<tool_call|>{GEMMA_LOOK}',
        'call:edit(path:<|"|>x<|"|>)',
        [LOOK],
    ),
    "text behind the arguments of gpt-oss": (
        "gpt-oss",
        HARMONY_LOOK.replace("<|call|>", "} and more.<|call|>") + HARMONY_LOOK,
        "} and more.",
        [LOOK, LOOK],
    ),
    "no arguments, in the words of JSON": (
        "kimi_k2",
        "<|tool_call_begin|>functions.stop:0<|tool_call_argument_begin|>null<|tool_call_end|>",
        "",
        [("stop", {})],
    ),
    "an object in a string": (
        "gpt-oss",
        HARMONY + 'look<|message|>"{\\"place\\": \\"Bern\\"}"<|call|>',
        "",
        [LOOK],
    ),
    "a lone quote of Gemma behind the arguments": (
        "gemma4",
        '<|tool_call>call:stop{}<|"|><tool_call|>',
        '<|"|>',
        [("stop", {})],
    ),
    "a call's marker before the first argument": (
        "hunyuan",
        "<tool_calls><tool_call>look<tool_sep><tool_call>\n<arg_key>place</arg_key>\n"
        "<arg_value>Bern</arg_value>\n</tool_call>\n</tool_calls>",
        "<arg_key>place</arg_key>\n<arg_value>Bern</arg_value>",
        [("look", {})],
    ),
    "two malformed headers at the end of the answer": (
        "glm",
        GLM_LOOK.removesuffix("</tool_call>") + "<tool_call> oops\n<tool_call> I stop. Goodbye.",
        "<tool_call> oops\n<tool_call> I stop. Goodbye.",
        [LOOK],
    ),
    "an argument that is only mentioned, and given later": (
        "qwen3_coder",
        "<tool_call>\n<function=edit>\n<parameter=path>use <parameter=text> here</parameter>"
        "<parameter=text>b</parameter></function></tool_call>",
        "",
        [("edit", {"path": "use <parameter=text> here", "text": "b"})],
    ),
    "strings of JSON in Gemma's arguments": (
        "gemma4",
        r'<|tool_call>call:edit{path:"a,b}",text: "c \"d\", \\" ,tags:["e]",<|"|>f<|"|>,"",g]}'
        "<tool_call|>" + GEMMA_LOOK,
        "",
        [("edit", {"path": "a,b}", "text": 'c "d", \\', "tags": ["e]", "f", "", "g"]}), LOOK],
    ),
    "expressions of Python": (
        "pythonic",
        "[" + ", ".join([*EXPRESSIONS, 'look(place="Bern")']) + "]",
        "\n".join(EXPRESSIONS),
        [LOOK],
    ),
    "quotes in a string that are no expression": (
        "pythonic",
        """[edit(path="say "hi" now", text='it's', line=07), look(place="Bern")]""",
        "",
        [("edit", {"path": 'say "hi" now', "text": "it's", "line": 7}), LOOK],
    ),
    "a bracket that closes no call of Python": (
        "pythonic",
        '[edit(path="a"], look(place="Bern")]',
        'edit(path="a"]',
        [LOOK],
    ),
    "markers with a suffix of their own in a value": (
        "hunyuan",
        "A <tool_call:opensource>, a <tool_calls:x>.\n<tool_calls:y>\n<tool_call:y>edit<tool_sep:y>\n"
        "<arg_key:y>path</arg_key:y>\n<arg_value:y>see <tool_sep:x> and <tool_sep:y> here"
        "</arg_value:y>\n</tool_call:y>\n</tool_calls:y>",
        "A <tool_call:opensource>, a <tool_calls:x>.",
        [("edit", {"path": "see <tool_sep:x> and <tool_sep:y> here"})],
    ),
    "a comma behind the last argument of Gemma": (
        "gemma4",
        '<|tool_call>call:edit{path:<|"|>x<|"|>,tags:[<|"|>y<|"|>,],}<tool_call|>',
        "",
        [("edit", {"path": "x", "tags": ["y"]})],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_are_kept_apart_and_given_back(case: str) -> None:
    name, raw, told, calls = CASES[case]

    def make() -> DeltaParser:
        return TOOL_FORMATS[name].parser(DEFINED)

    answer = join_deltas(parse_answer(make(), raw))
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert not any(call.is_cut for call in answer.calls)
    assert told in answer.text
    check_cuts(make, raw)


@pytest.mark.parametrize("value", ["[b'x']", "[1j]", "[1 + 2j]", "[...]", "{'a': b'x'}"])
def test_a_literal_without_json_is_a_string(value: str) -> None:
    """Red before: a TypeError, which ended the answer."""
    raw = f"<function=edit>\n<parameter=tags>\n{value}\n</parameter>\n</function>"
    answer = join_deltas(parse_answer(TOOL_FORMATS["qwen3_coder"].parser(DEFINED), raw))
    assert [json.loads(call.arguments) for call in answer.calls] == [{"tags": value}]


def test_a_name_before_the_end_of_the_reasoning_is_a_mention() -> None:
    """Red before: the reasoning ended at the marker, and its own end was shown as text."""
    calls = TOOL_FORMATS["qwen3_coder"]
    raw = "Hm.\n<tool_call>\n<function=look>\n</think>\n\nNo."

    def make() -> DeltaParser:
        return REASONING_FORMATS["qwen3"].parser(
            calls.parser(DEFINED), starts_inside=True, calls=calls
        )

    answer = join_deltas(parse_answer(make(), raw))
    assert (answer.text, answer.calls) == ("No.", [])
    assert answer.reasoning == "Hm.\n<tool_call>\n<function=look>"
    check_cuts(make, raw)
