"""Answers with tool calls as the model families write them, after their model cards and chat
templates. What every format must bear is in each table: text around calls, several calls, empty and
unfinished ones, and text that only looks like one."""

from __future__ import annotations

import re

from format_cases import Case

BERN = '{"city": "Bern"}'
ALL = (
    '{"city": "Zürich \\"東\\"\\n{x}", "days": 3, "celsius": true, "tags": ["a", "b"], "options":'
    ' {"k": [1, null]}, "limit": 1.5}'
)
"""Every type of argument."""


def until(raw: str, last: str) -> str:
    """The beginning of an answer that is cut off behind ``last``."""
    return raw[: raw.index(last) + len(last)]


def section(begin: str, end: str) -> str:
    return f"{begin}{{}}{end}"


LLAMA3_CALL = '{"name": "get_weather", "parameters": {"city": "Bern"}}'
LLAMA3 = [
    Case("with the marker", f"<|python_tag|>{LLAMA3_CALL}", calls=(("get_weather", BERN),)),
    Case("bare", LLAMA3_CALL, calls=(("get_weather", BERN),)),
    Case("bare, behind space", f"\n\n{LLAMA3_CALL}\n", calls=(("get_weather", BERN),)),
    Case(
        "two",
        f'{LLAMA3_CALL}; {{"name": "ping", "parameters": {{}}}}',
        calls=(("get_weather", BERN), ("ping", "{}")),
    ),
    Case(
        "three without semicolons",
        f"{LLAMA3_CALL}\n{LLAMA3_CALL}, {LLAMA3_CALL}",
        calls=(("get_weather", BERN),) * 3,
    ),
    Case(
        "a call, and text that begins like one",
        f"{LLAMA3_CALL}; so {{x}}",
        "; so {x}",
        (("get_weather", BERN),),
    ),
    Case(
        "text before", f"I look. <|python_tag|>{LLAMA3_CALL}", "I look.", (("get_weather", BERN),)
    ),
    Case(
        "a JSON answer with a function's name",
        '{"name": "ping", "age": 3}',
        text='{"name": "ping", "age": 3}',
    ),
    Case("a JSON answer", '{"name": "Ann", "age": 3}', text='{"name": "Ann", "age": 3}'),
    Case(
        "a bare unknown function",
        '{"name": "x", "parameters": {}} yes',
        text='{"name": "x", "parameters": {}} yes',
    ),
    Case(
        "no value",
        '<|python_tag|>{"name": "ping", "parameters":, {}}',
        text='<|python_tag|>{"name": "ping", "parameters":, {}}',
    ),
    Case(
        "an unknown function behind a known one",
        f'{LLAMA3_CALL}; {{"name": "x", "parameters": {{}}}}',
        calls=(("get_weather", BERN), ("x", "{}")),
    ),
    Case(
        "numbers in other notations",
        '{"name": "ping", "parameters": {"a": 07, "b": [+1, .5, 0x1F, 1_000], "c": None}}',
        calls=(("ping", '{"a": 7, "b": [1, 0.5, 31, 1000], "c": null}'),),
    ),
    Case("code", "<|python_tag|>print(1)", text="<|python_tag|>print(1)"),
    Case("cut off", LLAMA3_CALL[:-5], calls=(("get_weather", '{"city": "Be'),)),
]

PYTHONIC = [
    Case("one", '[get_weather(city="Bern")]', calls=(("get_weather", BERN),)),
    Case(
        "two",
        "[ping(), get_time(zone='CET')]",
        calls=(("ping", "{}"), ("get_time", '{"zone": "CET"}')),
    ),
    Case(
        "Llama 4's markers",
        'So:\n<|python_start|>[get_weather(city="Bern")]<|python_end|>',
        "So:",
        (("get_weather", BERN),),
    ),
    Case(
        "all types",
        '[get_weather(city="Zürich \\"東\\"\\n{x}", days=3, celsius=True, tags=["a", \'b\'],'
        ' options={"k": (1, None)}, limit=1.5)]',
        calls=(("get_weather", ALL),),
    ),
    Case(
        "brackets and quotes in strings",
        "[get_weather(city=''')]'(\"''', days=-1, limit=1e3)]",
        calls=(("get_weather", '{"city": ")]\'(\\"", "days": -1, "limit": 1000.0}'),),
    ),
    Case(
        "words of other languages",
        "[get_weather(city='', celsius=false, options=null)]",
        calls=(("get_weather", '{"city": "", "celsius": false, "options": null}'),),
    ),
    Case(
        "without names",
        '[get_weather("Bern", 2)]',
        calls=(("get_weather", '{"city": "Bern", "days": 2}'),),
    ),
    Case("a list", "See [1] and [get_weather].", text="See [1] and [get_weather]."),
    Case("an unknown function", "[f(x=1)] is Python", text="[f(x=1)] is Python"),
    Case("no plain value", "[ping(x=open('f'))]", text="[ping(x=open('f'))]"),
    Case(
        "half a surrogate pair",
        r"[get_time(zone='\ud83d')]",
        calls=(("get_time", r'{"zone": "\ud83d"}'),),
    ),
    Case("infinity", "[ping(x=1e999)]", text="[ping(x=1e999)]"),
    Case("a bad escape", r"[get_time(zone='\d')]", calls=(("get_time", r'{"zone": "\\d"}'),)),
    Case("cut off", "[ping(), get_weather(city='Be", ", get_weather(city='Be", (("ping", "{}"),)),
    Case("cut off at a quote", "[get_weather(city=''", "[get_weather(city=''"),
    Case("text behind", "[ping()]\nDone.", "Done.", (("ping", "{}"),)),
]

PYTHONIC += [
    Case(
        "an unknown function and a known one",
        "[nope(a=1), ping()]",
        calls=(("nope", '{"a": 1}'), ("ping", "{}")),
    ),
    Case(
        "a known function and an unknown one",
        "[ping(), nope()]",
        calls=(("ping", "{}"), ("nope", "{}")),
    ),
    Case("two unknown functions", "[f(), g()] is Python", "[f(), g()] is Python"),
    Case(
        "a malformed call before a good one",
        "[get_weather(city=open('f')), ping()]",
        "get_weather(city=open('f'))",
        (("ping", "{}"),),
    ),
    Case(
        "line ends, and the same quotes, in a string",
        "[get_weather(city='sed -n '1,2p' f.py\nls', days=07)]",
        calls=(("get_weather", '{"city": "sed -n \'1,2p\' f.py\\nls", "days": 7}'),),
    ),
    Case(
        "a call in a string",
        "[get_weather(city='f('x')'), ping()]",
        calls=(("get_weather", '{"city": "f(\'x\')"}'), ("ping", "{}")),
    ),
    Case(
        "a set, numbers, words of Python",
        "[get_weather(tags={'a', 'b'}, days=0x1F, limit=1_000.5, from=1, if='x')]",
        calls=(
            (
                "get_weather",
                '{"tags": ["a", "b"], "days": 31, "limit": 1000.5, "from": 1, "if": "x"}',
            ),
        ),
    ),
]

LFM2 = [
    Case(
        "JSON",
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Bern"}}, {"name": "ping",'
        ' "arguments": {}}]<|tool_call_end|>So.',
        "So.",
        (("get_weather", BERN), ("ping", "{}")),
    ),
    Case(
        "one object",
        '<|tool_call_start|>{"name": "get_weather", "arguments": {"city": "Bern"}}<|tool_call_end|>',
        calls=(("get_weather", BERN),),
    ),
    Case(
        "JSON that is cut off",
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Be',
        calls=(("get_weather", '{"city": "Be'),),
    ),
    Case(
        "one",
        'I look.\n<|tool_call_start|>[get_weather(city="Bern")]<|tool_call_end|>So.',
        "I look.\nSo.",
        (("get_weather", BERN),),
    ),
    Case(
        "two, one unknown",
        "<|tool_call_start|>[ping(), other(a=1)]<|tool_call_end|>",
        calls=(("ping", "{}"), ("other", '{"a": 1}')),
    ),
    Case(
        "no list",
        "<|tool_call_start|>ping()<|tool_call_end|>",
        "<|tool_call_start|>ping()<|tool_call_end|>",
    ),
    Case("a bare list", "[ping()]", "[ping()]"),
]

MISTRAL = [
    Case(
        "the older form",
        'Hm. [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bern"}}, {"name": "ping",'
        ' "arguments": {}}]',
        "Hm.",
        (("get_weather", BERN), ("ping", "{}")),
    ),
    Case(
        "the newer form",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}[TOOL_CALLS]ping[ARGS]{}',
        calls=(("get_weather", BERN), ("ping", "{}")),
    ),
    Case("with an id", "[TOOL_CALLS]ping[CALL_ID]abc123XYZ[ARGS]{}", calls=(("ping", "{}"),)),
    Case("without ARGS", 'A [TOOL_CALLS]ping{"a": 1}', "A", (("ping", '{"a": 1}'),)),
    Case("cut off in the name", "[TOOL_CALLS]get_w", "[TOOL_CALLS]get_w"),
    Case("cut off", '[TOOL_CALLS]ping[ARGS]{"a": "\\u00', calls=(("ping", '{"a": "'),)),
    Case("no call", "[TOOL_CALLS] is a marker", "[TOOL_CALLS] is a marker"),
    Case("other brackets", "See [TOOL] and [1].", "See [TOOL] and [1]."),
    Case("a name without end", "[TOOL_CALLS]" + "x" * 500, "[TOOL_CALLS]" + "x" * 500),
]

HY3 = """\
Hm.
<tool_calls>
<tool_call>get_weather<tool_sep>
<arg_key>city</arg_key>
<arg_value>Bern</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>
<tool_call>ping<tool_sep>
</tool_call>
</tool_calls>"""
HY3_CALLS = (("get_weather", '{"city": "Bern", "days": 3}'), ("ping", "{}"))
HUNYUAN = [
    Case("two", HY3, "Hm.", HY3_CALLS),
    Case("with suffixes", re.sub(r"(</?\w+)>", r"\1:opensource>", HY3), "Hm.", HY3_CALLS),
    Case("other elements", "a <tool:x> b <tool_sep", "a <tool:x> b <tool_sep"),
]
HUNYUAN_A13B = [
    Case(
        "two",
        'Hm.\n<tool_calls>[{"name": "get_weather", "arguments": {"city": "Bern"}}, {"name": "ping",'
        ' "arguments": {}}]</tool_calls>',
        "Hm.",
        (("get_weather", BERN), ("ping", "{}")),
    ),
    Case("cut off", '<tool_calls>[{"name": "ping", "arg', '<tool_calls>[{"name": "ping", "arg'),
]

V3_CALLS = section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK_V3 = [
    Case(
        "one",
        "I look.\n" + V3_CALLS.format(V3_CALL.format("get_weather", BERN)),
        "I look.",
        (("get_weather", BERN),),
    ),
    Case(
        "two",
        V3_CALLS.format(V3_CALL.format("get_weather", ALL) + "\n" + V3_CALL.format("ping", "{}")),
        calls=(("get_weather", ALL), ("ping", "{}")),
    ),
    Case(
        "cut off in the fence",
        until(V3_CALLS.format(V3_CALL.format("ping", "{}")), "{}\n``"),
        calls=(("ping", "{}"),),
    ),
    Case(
        "not a function",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>{}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>{}",
    ),
]

V31_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK_V31 = [
    Case(
        "two",
        "Hm."
        + V3_CALLS.format(V31_CALL.format("get_weather", ALL) + V31_CALL.format("ping", "{}")),
        "Hm.",
        (("get_weather", ALL), ("ping", "{}")),
    ),
    Case("no arguments", V3_CALLS.format(V31_CALL.format("ping", "")), calls=(("ping", "{}"),)),
    Case("no section", V31_CALL.format("ping", "{}"), calls=(("ping", "{}"),)),
    Case("an empty section", V3_CALLS.format(" "), V3_CALLS.format(" ")),
    Case(
        "cut off in the name",
        "A <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get",
        "A <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get",
    ),
]

KIMI_CALLS = section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI = [
    Case(
        "two",
        "Hm. "
        + KIMI_CALLS.format(
            KIMI_CALL.format("get_weather:3", BERN) + KIMI_CALL.format("ping:4", "{}")
        ),
        "Hm.",
        (("get_weather", BERN), ("ping", "{}")),
    ),
    Case(
        "without a number",
        KIMI_CALLS.format(KIMI_CALL.format("ping", "{}")),
        calls=(("ping", "{}"),),
    ),
    Case(
        "a number alone, whose arguments fit one function",
        KIMI_CALLS.format(KIMI_CALL.format("0", BERN).replace("functions.", "")),
        calls=(("get_weather", BERN),),
    ),
    Case(
        "a number alone, whose arguments fit no function or several",
        KIMI_CALLS.format(
            "".join(KIMI_CALL.format("0", each) for each in ('{"x": 1}', "{}"))
        ).replace("functions.", ""),
        KIMI_CALLS.format(
            "".join(KIMI_CALL.format("0", each) for each in ('{"x": 1}', "{}"))
        ).replace("functions.", ""),
    ),
    Case(
        "an open bracket before a good call",
        KIMI_CALLS.format(
            KIMI_CALL.format("ping:0", '{"a": {"b": 1}') + KIMI_CALL.format("ping:1", BERN)
        ),
        calls=(("ping", '{"a": {"b": 1}'), ("ping", BERN)),
    ),
    Case(
        "an open string before a good call",
        KIMI_CALLS.format(
            KIMI_CALL.format("ping:0", '{"a": "x}') + KIMI_CALL.format("ping:1", BERN)
        ),
        calls=(("ping", '{"a": "x}'), ("ping", BERN)),
    ),
    Case(
        "markers in a string",
        KIMI_CALLS.format(KIMI_CALL.format("ping:0", '{"a": "<|tool_call_end|>\\"\\n", "b": 1}')),
        calls=(("ping", '{"a": "<|tool_call_end|>\\"\\n", "b": 1}'),),
    ),
    Case(
        "cut off",
        until(KIMI_CALLS.format(KIMI_CALL.format("ping:0", '{"a": 1')), '{"a": 1'),
        calls=(("ping", '{"a": '),),
    ),
]

GEMMA_CALL = (
    '<|tool_call>call:get_weather{city:<|"|>Zürich "東"\n{x}<|"|>,days:3,celsius:true,'
    'tags:[<|"|>a<|"|>, <|"|>b<|"|>],options:{k:[1,null]},limit:1.5}<tool_call|>'
)
GEMMA4 = [
    Case("all types", f"Hm.\n{GEMMA_CALL}", "Hm.", (("get_weather", ALL),)),
    Case(
        "two",
        f"{GEMMA_CALL}<|tool_call>call:ping{{}}<tool_call|>",
        calls=(("get_weather", ALL), ("ping", "{}")),
    ),
    Case(
        "no marks, no JSON",
        "<|tool_call>call:f{a:x y,b:[],c:007}<tool_call|>",
        calls=(("f", '{"a": "x y", "b": [], "c": 7}'),),
    ),
    Case("cut off in a string", until(GEMMA_CALL, "Zü"), calls=(("get_weather", '{"city": "Zü'),)),
    Case("no call", "<|tool_call>ping()<tool_call|>", "<|tool_call>ping()<tool_call|>"),
]
FUNCTION_GEMMA = [
    Case(
        "Google's example",
        "<start_function_call>call:get_weather{city:<escape>Bern<escape>}<end_function_call>",
        calls=(("get_weather", BERN),),
    ),
]
