"""Answers with tool calls in the manner of XML, after model cards and chat templates."""

from __future__ import annotations

import json

from format_cases import Case
from tool_format_cases import ALL, BERN, section, until

QWEN3_CODER_CALL = """\
<tool_call>
<function=get_weather>
<parameter=city>
Zürich "東"
{x}
</parameter>
<parameter=days>
3
</parameter>
<parameter=celsius>
True
</parameter>
<parameter=tags>
["a", "b"]
</parameter>
<parameter=options>
{"k": [1, null]}
</parameter>
<parameter=limit>
1.5
</parameter>
</function>
</tool_call>"""
PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
QWEN3_CODER = [
    Case("all types", f"I look.\n{QWEN3_CODER_CALL}\n", "I look.", (("get_weather", ALL),)),
    Case("two", f"{PING}\n{QWEN3_CODER_CALL}", calls=(("ping", "{}"), ("get_weather", ALL))),
    Case("no section", "<function=ping></function> So.", "So.", (("ping", "{}"),)),
    Case(
        "empty, and line ends at the edges",
        "<function=get_weather><parameter=city>\n\n</parameter><parameter=city>\n\na\n\n</parameter>"
        "</function>",
        calls=(("get_weather", '{"city": "", "city": "\\na\\n"}'),),
    ),
    Case(
        "markers in a string",
        "<function=get_weather><parameter=city>\n</para <parameter=x> </tool_call>\n</parameter>"
        "</function>",
        calls=(("get_weather", '{"city": "</para <parameter=x> </tool_call>"}'),),
    ),
    Case(
        "values that do not fit",
        "<function=get_weather><parameter=days>soon</parameter><parameter=celsius>1</parameter>"
        "<parameter=tags>['a']</parameter><parameter=options>{x</parameter>"
        "<parameter=limit>.5</parameter></function>",
        calls=(
            (
                "get_weather",
                '{"days": "soon", "celsius": "1", "tags": ["a"], "options": "{x", "limit": 0.5}',
            ),
        ),
    ),
    Case(
        "arguments that no schema knows",
        "<function=f><parameter=a>1</parameter><parameter=b>x</parameter><parameter=c>null"
        "</parameter></function>",
        calls=(("f", '{"a": 1, "b": "x", "c": null}'),),
    ),
    Case(
        "cut off in a string",
        "<function=get_weather>\n<parameter=city>\nBer\n</par",
        calls=(("get_weather", '{"city": "Ber'),),
    ),
    Case(
        "cut off in a number",
        "<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n1",
        calls=(("get_weather", '{"city": "Bern"'),),
    ),
    Case("cut off in the name", "<tool_call>\n<function=get_", "<tool_call>\n<function=get_"),
    Case("the section alone", "<tool_call>x</tool_call>", "<tool_call>x</tool_call>"),
    Case("no name", "a <function=> b", "a <function=> b"),
    Case("a long name", f"<function={'x' * 300}>", f"<function={'x' * 300}>"),
    Case(
        "no end",
        "<function=get_weather><parameter=city>\nBern\n</parameter> So.",
        "So.",
        (("get_weather", BERN[:-1]),),
    ),
    Case(
        "a broken argument",
        '<function=get_weather><parameter=ci"ty>x',
        '<parameter=ci"ty>x',
        (("get_weather", ""),),
    ),
]

EDIT = "<tool_call>\n<function=edit>\n{}</function>\n</tool_call>"
OLD, NEW = "<parameter=old>\nx\n</parameter>\n", "<parameter=new>\nz\n</parameter>\n"
OLD_NEW = '{"old": "x", "new": "z"}'
QWEN3_CODER += [
    Case(
        "a forgotten closing tag",
        EDIT.format("<parameter=old>\nx\n" + NEW),
        calls=(("edit", OLD_NEW),),
    ),
    Case(
        "a forgotten closing tag before the end, and another call",
        EDIT.format("<parameter=old>\nx\n") + "\n" + PING,
        calls=(("edit", '{"old": "x"}'), ("ping", "{}")),
    ),
    Case(
        "a call without its last two tags, and another call",
        f"<tool_call>\n<function=edit>\n<parameter=old>\nx\n{PING}",
        calls=(("edit", '{"old": "x"'), ("ping", "{}")),
    ),
    Case(
        "a malformed argument",
        EDIT.format(OLD + "<parameter=ids: [1, 2]\n</parameter>\n" + NEW),
        "<parameter=ids: [1, 2]\n</parameter>",
        (("edit", OLD_NEW),),
    ),
    Case(
        "an argument without a name",
        EDIT.format(OLD + "<parameter=>\ny\n</parameter>\n" + NEW),
        "<parameter=>\ny\n</parameter>",
        (("edit", OLD_NEW),),
    ),
    Case(
        "the closing tag in a value",
        EDIT.format("<parameter=old>\na </parameter> b\n</parameter>\n" + NEW),
        calls=(("edit", '{"old": "a </parameter> b", "new": "z"}'),),
    ),
    Case(
        "a whole call in a value",
        EDIT.format(f"<parameter=old>\nLike this:\n{EDIT.format(OLD + NEW)}\n</parameter>\n" + NEW),
        calls=(
            (
                "edit",
                json.dumps({"old": f"Like this:\n{EDIT.format(OLD + NEW)}", "new": "z"}),
            ),
        ),
    ),
    Case(
        "an end without an argument's",
        "<function=edit>\n<parameter=old>\nx\n</function> is how it ends.\n</parameter></function>",
        calls=(("edit", '{"old": "x\\n</function> is how it ends."}'),),
    ),
    Case("text behind a name", "a <function=f> b", "a <function=f> b"),
    Case(
        "cut off where an argument begins",
        "<function=edit>\n" + OLD + "<par",
        calls=(("edit", '{"old": "x"'),),
    ),
]

GLM_CALL = """\
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Zürich "東"
{x}</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>celsius</arg_key>
<arg_value>true</arg_value>
<arg_key>tags</arg_key>
<arg_value>["a", "b"]</arg_value>
<arg_key>options</arg_key>
<arg_value>{"k": [1, null]}</arg_value>
<arg_key>limit</arg_key>
<arg_value>1.5</arg_value>
</tool_call>"""
GLM = [
    Case("GLM 4.5", f"Hm.\n{GLM_CALL}", "Hm.", (("get_weather", ALL),)),
    Case(
        "GLM 4.7",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>"
        "<tool_call>ping</tool_call>",
        calls=(("get_weather", BERN), ("ping", "{}")),
    ),
    Case(
        "cut off",
        until(GLM_CALL, "Zür"),
        calls=(("get_weather", '{"city": "Zür'),),
    ),
    Case(
        "no value",
        "<tool_call>get_weather<arg_key>city</arg_key> is",
        "<arg_key>city</arg_key> is",
        (("get_weather", ""),),
    ),
    Case("JSON", '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>'),
]

GLM += [
    Case(
        "a forgotten closing tag",
        GLM_CALL.replace("x}</arg_value>", "x}"),
        calls=(("get_weather", ALL),),
    ),
    Case(
        "an array with escaped quotes, a string in quotes",
        '<tool_call>get_weather<arg_key>tags</arg_key><arg_value>[\\"a\\", \\"b\\"]</arg_value>'
        '<arg_key>city</arg_key><arg_value>"Bern"</arg_value></tool_call>',
        calls=(("get_weather", '{"tags": ["a", "b"], "city": "\\"Bern\\""}'),),
    ),
    Case(
        "numbers in other notations",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>07</arg_value><arg_key>limit"
        "</arg_key><arg_value>+1_000.50</arg_value></tool_call><tool_call>get_weather<arg_key>days"
        "</arg_key><arg_value>0x1F</arg_value></tool_call>",
        calls=(("get_weather", '{"days": 7, "limit": 1000.50}'), ("get_weather", '{"days": 31}')),
    ),
]

MINIMAX_CALLS = section("<minimax:tool_call>\n", "</minimax:tool_call>")
MINIMAX_CALL = """\
<invoke name="get_weather">
<parameter name="city">Bern</parameter>
<parameter name="days">3</parameter>
</invoke>
"""
TWO_DAYS = '{"city": "Bern", "days": 3}'
MINIMAX = [
    Case(
        "two",
        "Hm.\n\n" + MINIMAX_CALLS.format(MINIMAX_CALL + '<invoke name="ping">\n</invoke>\n'),
        "Hm.",
        (("get_weather", TWO_DAYS), ("ping", "{}")),
    ),
    Case("no section", MINIMAX_CALL, MINIMAX_CALL),
    Case(
        "text between two calls",
        MINIMAX_CALLS.format(MINIMAX_CALL + "Now:\n" + '<invoke name="ping">\n</invoke>\n'),
        "Now:",
        (("get_weather", TWO_DAYS), ("ping", "{}")),
    ),
    Case(
        "a malformed call before a good one",
        MINIMAX_CALLS.format('<invoke name="">\n</invoke>\n' + MINIMAX_CALL),
        '<minimax:tool_call>\n<invoke name="">\n</invoke>',
        (("get_weather", TWO_DAYS),),
    ),
]

DSML_CALL = """\
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">7</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
"""
DSML_CALLS = section("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>")
DEEPSEEK_V32 = [
    Case(
        "two",
        "Hm.\n\n" + DSML_CALLS.format(DSML_CALL + DSML_CALL),
        "Hm.",
        (("get_weather", '{"city": "7", "days": 3}'),) * 2,
    ),
    Case(
        "cut off",
        until(DSML_CALLS.format(DSML_CALL), 'false">3'),
        calls=(("get_weather", '{"city": "7"'),),
    ),
]

DEEPSEEK_V4 = [
    Case(
        "two",
        "Hm.\n\n"
        + (DSML_CALL + DSML_CALL).join(("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>")),
        "Hm.",
        (("get_weather", '{"city": "7", "days": 3}'),) * 2,
    ),
    Case("V3.2's section", DSML_CALLS.format(DSML_CALL), DSML_CALLS.format(DSML_CALL)),
]
SPACED_CALL = DSML_CALL.replace("DSML｜", "DSML｜ ")
DEEPSEEK_V41 = [
    Case(
        "two",
        "Hm.\n\n" + (SPACED_CALL + SPACED_CALL).join(("<｜DSML｜ calls>\n", "</｜DSML｜ calls>")),
        "Hm.",
        (("get_weather", '{"city": "7", "days": 3}'),) * 2,
    ),
]

STEP3 = [
    Case(
        "two",
        "Hm.<｜tool_calls_begin｜>\n"
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
        '<steptml:parameter name="city">Bern</steptml:parameter>\n'
        "</steptml:invoke><｜tool_call_end｜>\n"
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="ping">'
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
        "Hm.",
        (("get_weather", BERN), ("ping", "{}")),
    ),
    Case(
        "another kind",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>thought<｜tool_sep｜>hm",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>thought<｜tool_sep｜>hm",
    ),
]

GPT_OSS = [
    Case(
        "reasoning, a call",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>',
        "Look.",
        (("get_weather", BERN),),
    ),
    Case(
        "the recipient before the channel, two calls, a preamble",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.ping"
        "<|channel|>commentary json<|message|><|call|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather<|message|> {"city": "Bern"}',
        "I look.",
        (("ping", "{}"), ("get_weather", BERN)),
    ),
    Case("the answer", "<|channel|>final<|message|>Rain <|x|>.<|return|>", "Rain <|x|>."),
    Case("no markers", "Rain.", "Rain."),
    Case("cut off in a header", "<|channel|>final", "<|channel|>final"),
    Case("no header", "<|start|>" + "x" * 1100, "<|start|>" + "x" * 1100),
]
