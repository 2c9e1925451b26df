"""The formats of tool calls: published examples and everything that goes wrong, each cut at every
place."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import tool_format_cases as more
import xml_format_cases as xml
from format_cases import TOOLS, Case, check_cuts, check_stream, found, streamed, summary
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_format_cases import until

from setpoint.config.groups.chat_formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from setpoint.core.errors import ConfigError
from setpoint.frontend.chat.deltas import join_deltas
from setpoint.frontend.chat.formats.format_registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format,
    tool_format,
)
from setpoint.frontend.chat.formats.json_array import JSON_ARRAY, array_schema, required_calls
from setpoint.frontend.chat.parser import parse_answer
from setpoint.frontend.text.detokenizer import make_detokenizer
from setpoint.frontend.text.tokenizer import Tokenizer as OurTokenizer
from setpoint_testing.byte_tokenizer import make_byte_tokenizer

BERN = '{"city": "Bern"}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
NESTED = '{"city": "a \\"q\\" \\n \\u00e9 \\ud83d\\ude00 {[ </tool_call>", "tags": ["x", {"y": [1.5e3]}]}'

HERMES = [
    Case("one call", CALL, calls=(("get_weather", BERN),)),
    Case("text before", f"I look.\n\n{CALL}", text="I look.", calls=(("get_weather", BERN),)),
    Case(
        "text before, between and behind",
        f"One.\n{CALL}\nTwo.\n{CALL}\n\nThree.\n",
        text="One.\nTwo.\nThree.\n",
        calls=(("get_weather", BERN), ("get_weather", BERN)),
    ),
    Case(
        "two calls",
        f"{CALL}\n{CALL.replace('get_weather', 'get_time')}\n",
        calls=(("get_weather", BERN), ("get_time", BERN)),
    ),
    Case(
        "nested values, quotes, escapes and markers in strings",
        f'<tool_call>{{"name": "get_weather", "arguments": {NESTED}}}</tool_call>',
        calls=(("get_weather", NESTED),),
    ),
    Case(
        "unicode",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich 東京 👩‍🚀"}}</tool_call>',
        calls=(("get_weather", '{"city": "Zürich 東京 👩‍🚀"}'),),
    ),
    Case(
        "empty arguments",
        '<tool_call>{"name": "ping", "arguments": {}}</tool_call>',
        calls=(("ping", "{}"),),
    ),
    Case("no arguments", '<tool_call>{"name": "ping"}</tool_call>', calls=(("ping", "{}"),)),
    Case(
        "null for arguments",
        '<tool_call>{"name": "ping", "arguments": null}</tool_call>',
        calls=(("ping", "{}"),),
    ),
    Case(
        "arguments before the name",
        '<tool_call>{"arguments": {"city": "Bern"}, "name": "get_weather"}</tool_call>',
        calls=(("get_weather", BERN),),
    ),
    Case(
        "the object as a string",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Bern\\"}"}</tool_call>',
        calls=(("get_weather", BERN),),
    ),
    Case(
        "other keys",
        '<tool_call>{"type": "function", "name": "get_weather", "id": 1.5, "parameters":'
        ' {"city": "Bern"}, "more": [{}]}</tool_call>',
        calls=(("get_weather", BERN),),
    ),
    Case(
        "line ends in a string",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        calls=(("get_weather", '{"city": "a\\u000ab\\u0009c"}'),),
    ),
    Case(
        "an unknown function",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        calls=(("unknown", "{}"),),
    ),
    Case(
        "cut off in the arguments",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Be',
        calls=(("get_weather", '{"city": "Be'),),
    ),
    Case(
        "cut off in an escape",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Be\\ud83d\\ude',
        calls=(("get_weather", '{"city": "Be'),),
    ),
    Case(
        "cut off before the arguments",
        'Now. <tool_call>\n{"name": "get_wea',
        text='Now. <tool_call>\n{"name": "get_wea',
    ),
    Case("cut off in the end marker", CALL[:-4], calls=(("get_weather", BERN),)),
    Case("no end marker", CALL[:-13] + " So.", text="So.", calls=(("get_weather", BERN),)),
    Case("only a prefix of the marker", "a <tool_ca", text="a <tool_ca"),
    Case("almost the marker", "a <tool_cat> b <tool_calls>", text="a <tool_cat> b <tool_calls>"),
    Case("the marker alone", "a <tool_call>  ", text="a <tool_call>  "),
    Case(
        "no JSON",
        "a <tool_call>get_weather(1)</tool_call> b",
        text="a <tool_call>get_weather(1)</tool_call> b",
    ),
    Case(
        "JSON that is no call",
        'a <tool_call>{"title": "x", "arguments": [1]}</tool_call> b',
        text='a <tool_call>{"title": "x", "arguments": [1]}</tool_call> b',
    ),
    Case(
        "no name",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        text='<tool_call>{"name": "", "arguments": {}}</tool_call>',
    ),
    Case(
        "the marker twice",
        f"<tool_call>\n{CALL}",
        text="<tool_call>",
        calls=(("get_weather", BERN),),
    ),
    Case(
        "too many braces",
        '<tool_call>{"name": "ping", "arguments": {}}}</tool_call>',
        text="}",
        calls=(("ping", "{}"),),
    ),
]

JSON = [
    Case(
        "one call",
        '[{"name": "get_weather", "parameters": {"city": "Bern"}}]',
        calls=(("get_weather", BERN),),
    ),
    Case(
        "two calls",
        '\n[ {"name": "ping", "parameters": {}},\n{"name": "get_weather", "parameters": {"city":'
        ' "Bern"}} ]\n',
        calls=(("ping", "{}"), ("get_weather", BERN)),
    ),
    Case("cut off", '[{"name": "ping", "parameters": {"a": 1.', calls=(("ping", '{"a": '),)),
    Case(
        "an unknown function",
        '[{"name": "x", "parameters": {}}]',
        text='[{"name": "x", "parameters": {}}]',
    ),
    Case("text", "[1] says so.", text="[1] says so."),
]

CASES = {
    "deepseekv3": more.DEEPSEEK_V3,
    "deepseekv31": more.DEEPSEEK_V31,
    "deepseekv32": xml.DEEPSEEK_V32,
    "deepseekv4": xml.DEEPSEEK_V4,
    "deepseekv41": xml.DEEPSEEK_V41,
    "functiongemma": more.FUNCTION_GEMMA,
    "gemma4": more.GEMMA4,
    "glm45": xml.GLM,
    "gpt-oss": xml.GPT_OSS,
    "hermes": HERMES,
    "hunyuan": more.HUNYUAN,
    "hunyuan_a13b": more.HUNYUAN_A13B,
    "json": JSON,
    "kimi_k2": more.KIMI,
    "lfm2": more.LFM2,
    "llama3": more.LLAMA3,
    "minimax-m2": xml.MINIMAX,
    "mistral": more.MISTRAL,
    "pythonic": more.PYTHONIC,
    "qwen3_coder": xml.QWEN3_CODER,
    "step3": xml.STEP3,
}
PLAIN = [
    Case("plain text", "Hello, <b>world</b> 2 < 3\n\n", text="Hello, <b>world</b> 2 < 3\n\n"),
    Case("nothing", ""),
]
FORMATS = {**TOOL_FORMATS, "json": JSON_ARRAY}
TABLE = [
    pytest.param(name, case, id=f"{name}: {case.what}")
    for name in CASES
    for case in (*PLAIN, *CASES[name])
]


@pytest.mark.cases(69)
@pytest.mark.parametrize(("name", "case"), TABLE)
def test_what_is_found_in_an_answer(name: str, case: Case) -> None:
    seen = found(case.raw, join_deltas(parse_answer(FORMATS[name].parser(TOOLS), case.raw)))
    assert (seen.text, seen.calls, seen.reasoning) == (case.text, case.calls, "")


@given(st.data())
def test_any_cuts_of_any_mixture(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CASES)))
    raws = data.draw(
        st.lists(st.sampled_from([case.raw for case in (*PLAIN, *CASES[name])]), max_size=4)
    )
    raw = "".join(raws)
    at = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    pieces = [raw[start:stop] for start, stop in zip([0, *at], [*at, len(raw)], strict=True)]
    form = FORMATS[name]
    deltas = streamed(form.parser(TOOLS), pieces)
    check_stream(deltas)
    assert summary(deltas) == summary(parse_answer(form.parser(TOOLS), raw))


FRAGMENTS = {
    name: sorted(
        {part for case in CASES[name] for part in re.findall(r"<[^<>]*>|\w+|\s|\W", case.raw)}
    )
    for name in CASES
}


@settings(max_examples=400)
@given(st.data())
def test_damaged_answers(data: st.DataObject) -> None:
    """Some characters replaced by other pieces of the format: no error, and no cut matters."""
    name = data.draw(st.sampled_from(sorted(CASES)))
    raw = data.draw(st.sampled_from(CASES[name])).raw
    at = data.draw(st.integers(0, len(raw)))
    others = st.lists(st.sampled_from(FRAGMENTS[name]), max_size=4)
    rest = raw[at + data.draw(st.integers(0, 8)) :]
    raw = raw[:at] + "".join(data.draw(others)) + rest
    form = FORMATS[name]
    whole = summary(parse_answer(form.parser(TOOLS), raw))
    middle = data.draw(st.integers(0, len(raw)))
    for pieces in (list(raw), [raw[:middle], raw[middle:]]):
        deltas = streamed(form.parser(TOOLS), pieces)
        check_stream(deltas)
        assert summary(deltas) == whole


@pytest.mark.cases(52)
@pytest.mark.parametrize(("name", "case"), TABLE)
def test_the_cuts_of_a_stream_do_not_matter(name: str, case: Case) -> None:
    check_cuts(lambda: FORMATS[name].parser(TOOLS), case.raw)


def test_the_names_on_the_command_line() -> None:
    assert set(TOOL_CALL_PARSERS) == set(TOOL_FORMATS)
    assert set(REASONING_PARSERS) == set(REASONING_FORMATS)


def test_every_format_has_a_table() -> None:
    assert {id(FORMATS[name]) for name in CASES} == {id(form) for form in FORMATS.values()}


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean hermes"):
        tool_format("hermess")
    with pytest.raises(ConfigError, match=r"no reasoning parser named 'x'\..* qwen3"):
        reasoning_format("x")


def test_calls_that_must_be_made_without_a_format_are_an_array() -> None:
    form, structure = required_calls(None, TOOLS, parallel=False)
    assert form is JSON_ARRAY
    schema = array_schema(TOOLS, parallel=False)
    assert structure["format"] == {"type": "json_schema", "json_schema": schema}
    jsonschema.validate(
        json.loads('[{"name": "get_weather", "parameters": {"city": "x"}}]'), schema
    )
    for wrong in (
        "[]",
        '[{"name": "x", "parameters": {}}]',
        '[{"name": "get_weather", "parameters": {}}]',
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(wrong), schema)


def test_ids() -> None:
    def ids(name: str, raw: str) -> list[str]:
        return [
            call.id for call in join_deltas(parse_answer(FORMATS[name].parser(TOOLS), raw)).calls
        ]

    first, second = ids("hermes", f"{CALL}{CALL}")
    assert first != second
    assert re.fullmatch("call_[0-9a-f]{24}", first)
    assert ids("kimi_k2", more.KIMI[0].raw) == ["functions.get_weather:3", "functions.ping:4"]
    old, new = (ids("mistral", more.MISTRAL[index].raw)[0] for index in (0, 1))
    assert re.fullmatch("[0-9a-z]{9}", old)
    assert re.fullmatch("[0-9a-z]{9}", new)
    assert ids("mistral", more.MISTRAL[2].raw) == ["abc123XYZ"]


def long_answer(raw: str) -> str:
    """An answer of 120,000 characters that goes on as a string does."""
    return raw + "x\\n é <y> [" * 10_000


BEGUN = {
    "deepseekv3": until(more.DEEPSEEK_V3[0].raw, '"Be'),
    "deepseekv32": until(xml.DEEPSEEK_V32[0].raw, ">7"),
    "gemma4": until(more.GEMMA4[0].raw, "Zü"),
    "glm45": until(xml.GLM[0].raw, "Zü"),
    "gpt-oss": until(xml.GPT_OSS[0].raw, '"Be'),
    "hermes": until(CALL, '"Be'),
    "llama3": until(more.LLAMA3[0].raw, '"Be'),
    "mistral": until(more.MISTRAL[1].raw, '"Be'),
    "pythonic": until(more.PYTHONIC[0].raw, '"Be'),
    "qwen3_coder": until(xml.QWEN3_CODER[0].raw, "Zü"),
}
NOT_YET = {
    "arguments before the name": ("hermes", '<tool_call>{"arguments": {"city": "'),
    "space behind a marker": ("hermes", "<tool_call>" + " " * 1000),
    "a number": ("qwen3_coder", "<function=get_weather><parameter=days>"),
    "a list in Python": ("lfm2", "<|tool_call_start|>[ping(a=["),
    "text": ("hermes", ""),
    "text that is no call": ("pythonic", ""),
}


@pytest.mark.parametrize(
    ("name", "begun"), [*BEGUN.items(), *NOT_YET.values()], ids=[*BEGUN, *NOT_YET]
)
def test_a_long_answer_takes_linear_time(name: str, begun: str) -> None:
    """What a parser keeps as text it handles again with the next piece, so that must stay short."""
    parser = FORMATS[name].parser(TOOLS)
    raw = long_answer(begun)
    most = 0
    for at in range(0, len(raw), 4):
        parser.feed(raw[at : at + 4])
        most = max(most, len(getattr(parser, "_text", "")))
    parser.end()
    assert most < 2000


def test_a_json_answer_is_not_held_back() -> None:
    parser = FORMATS["llama3"].parser(TOOLS)
    assert summary(parser.feed('{"title": "a'))["text"] == '{"title": "a'
    assert summary(parser.feed(" long"))["text"] == " long"


def test_bytes_that_cut_characters() -> None:
    """From tokens that end inside characters, through the detokenizer."""
    tokenizer = OurTokenizer(make_byte_tokenizer())
    case = next(case for case in HERMES if case.what == "unicode")
    ids = tokenizer.encode(case.raw, add_special_tokens=False).tolist()
    assert len(ids) > len(case.raw)
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.feed([token_id]) for token_id in ids] + [detokenizer.flush()]
    deltas = streamed(FORMATS["hermes"].parser(TOOLS), pieces)
    check_stream(deltas)
    assert summary(deltas) == summary(parse_answer(FORMATS["hermes"].parser(TOOLS), case.raw))
    assert found(case.raw, join_deltas(deltas)).calls == case.calls
