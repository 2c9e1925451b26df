"""Writes tool calls as each family of models does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from setpoint.frontend.chat.chat_request import Tool

Call = tuple[str, dict[str, Any]]

EDIT = Tool(
    "edit",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "line": {"type": "integer"},
            "ratio": {"type": "number"},
            "force": {"type": "boolean"},
            "tags": {"type": "array"},
            "meta": {"type": "object"},
            "none": {"type": ["null", "string"]},
        },
        "required": ["path"],
    },
)
LOOK = Tool("look", parameters={"type": "object", "properties": {"place": {"type": "string"}}})
STOP = Tool("stop", parameters={"type": "object", "properties": {}})
DEFINED = (EDIT, LOOK, STOP)
UNKNOWN: Call = ("nope", {"place": "x"})
GOOD: Call = ("look", {"place": "Bern"})


@dataclass(frozen=True)
class Writer:
    """How one family writes calls."""

    call: Callable[[str, list[str]], str]
    """A call, given the function and its arguments as ``argument`` writes them."""
    argument: Callable[[str, Any], str]
    section: tuple[str, str] = ("", "")
    between: str = ""
    value_end: str = ""
    """What closes the value of a string."""
    call_end: str = ""
    """What closes a call behind its arguments, and may be forgotten."""
    inside: tuple[str, ...] = ()
    """Markers of the format that a string may contain, if text follows them."""
    malformed: str = ""
    """An argument that is none."""
    swallows: bool = False
    """Whether an open string leaves the whole list text, as Python's syntax has no other end."""
    is_json: bool = False
    quote: str = ""
    """What stands before and after a string."""
    framed: Callable[[str, str], str] | None = None
    """A call, given the function and the text of all its arguments."""
    names_end: bool = False
    """Whether a name with a space in it is none."""
    number: Callable[[str, str], str] = field(default=lambda key, text: "")
    """An argument whose value is this text."""

    def written(self, calls: list[Call]) -> str:
        return self.answer([self.one(each) for each in calls])

    def one(self, call: Call) -> str:
        name, arguments = call
        return self.call(name, [self.argument(key, value) for key, value in arguments.items()])

    def answer(self, calls: list[str]) -> str:
        begin, end = self.section
        return begin + self.between.join(calls) + end


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def json_pair(key: str, value: Any) -> str:
    return f"{_json(key)}: {_json(value)}"


def json_object(parts: list[str]) -> str:
    return "{" + ", ".join(parts) + "}"


def _json_writer(before: str, behind: str, key: str = "arguments", **more: Any) -> Writer:
    def framed(name: str, arguments: str) -> str:
        return f'{before}{{"name": "{name}", "{key}": {arguments}}}{behind}'

    return Writer(
        call=lambda name, parts: framed(name, json_object(parts)),
        framed=framed,
        quote='"',
        argument=json_pair,
        value_end='"',
        malformed='"x": }',
        is_json=True,
        number=lambda key, text: f'"{key}": {text}',
        **more,
    )


def _headed(before: str, behind: str, **more: Any) -> Writer:
    def framed(name: str, arguments: str) -> str:
        return before.format(name) + arguments + behind

    return Writer(
        call=lambda name, parts: framed(name, json_object(parts)),
        framed=framed,
        quote='"',
        argument=json_pair,
        value_end='"',
        call_end=behind,
        malformed='"x": }',
        is_json=True,
        number=lambda key, text: f'"{key}": {text}',
        **more,
    )


def _xml(
    begin: str,
    end: str,
    argument: str,
    *,
    value_end: str,
    malformed: str,
    framing: str = "",
    typed: bool = False,
    section: tuple[str, str] = ("", ""),
    **more: Any,
) -> Writer:
    """argument: a format of its key and value. typed: of whether it is a string, too."""

    def write(key: str, value: Any, text: str | None = None) -> str:
        text = _plain(value) if text is None else text
        kind = _json(isinstance(value, str))
        return argument.format(key, kind, text) if typed else argument.format(key, text)

    return Writer(
        call=lambda name, parts: begin.format(name) + "".join(parts) + end,
        names_end=True,
        argument=write,
        value_end=framing + value_end,
        call_end=end,
        inside=(
            value_end,
            begin.format("look").strip(),
            *(each.strip() for each in section if each),
        ),
        section=section,
        malformed=malformed,
        number=lambda key, text: write(key, 1, text),
        **more,
    )


_CODER = _xml(
    "<tool_call>\n<function={}>\n",
    "</function>\n</tool_call>",
    "<parameter={}>\n{}\n</parameter>\n",
    value_end="</parameter>",
    framing="\n",
    malformed="<parameter=: 1\n</parameter>\n",
    between="\n",
)
_GLM = _xml(
    "<tool_call>{}\n",
    "</tool_call>",
    "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    value_end="</arg_value>",
    malformed="<arg_key></arg_key>\n<arg_value>1</arg_value>\n",
    between="\n",
)
_HY3 = _xml(
    "<tool_call>{}<tool_sep>\n",
    "</tool_call>\n",
    "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    value_end="</arg_value>",
    malformed="<arg_key></arg_key>\n<arg_value>1</arg_value>\n",
    section=("<tool_calls>\n", "</tool_calls>"),
)
_MINIMAX = _xml(
    '<invoke name="{}">\n',
    "</invoke>\n",
    '<parameter name="{}">{}</parameter>\n',
    value_end="</parameter>",
    malformed='<parameter name="">1</parameter>\n',
    section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
)
_STEP3 = _xml(
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">\n',
    "</steptml:invoke><｜tool_call_end｜>\n",
    '<steptml:parameter name="{}">{}</steptml:parameter>\n',
    value_end="</steptml:parameter>",
    malformed='<steptml:parameter name="">1</steptml:parameter>\n',
    section=("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
)


def _dsml(section: str, space: str = "") -> Writer:
    mark = f"｜DSML｜{space}"
    return _xml(
        f'<{mark}invoke name="{{}}">\n',
        f"</{mark}invoke>\n",
        f'<{mark}parameter name="{{}}" string="{{}}">{{}}</{mark}parameter>\n',
        value_end=f"</{mark}parameter>",
        malformed=f'<{mark}parameter name="">1</{mark}parameter>\n',
        typed=True,
        section=(f"<{mark}{section}>\n", f"</{mark}{section}>"),
    )


def _python(section: tuple[str, str]) -> Writer:
    return Writer(
        call=lambda name, parts: f"{name}({', '.join(parts)})",
        argument=lambda key, value: f"{key}={value!r}",
        section=(f"{section[0]}[", f"]{section[1]}"),
        between=", ",
        value_end="'",
        call_end=")",
        inside=(")]", '"'),
        malformed="x=open(1)",
        swallows=True,
        number=lambda key, text: f"{key}={text}",
    )


def _gemma(begin: str, end: str, quote: str) -> Writer:
    def value(each: Any) -> str:
        if isinstance(each, str):
            return f"{quote}{each}{quote}"
        if isinstance(each, list):
            return f"[{','.join(map(value, each))}]"
        if isinstance(each, dict):
            return "{" + ",".join(f"{key}:{value(one)}" for key, one in each.items()) + "}"
        return _json(each)

    return Writer(
        call=lambda name, parts: f"{begin}call:{name}{{{','.join(parts)}}}{end}",
        argument=lambda key, each: f"{key}:{value(each)}",
        quote=quote,
        value_end=quote,
        call_end=end,
        inside=(end, begin, "}", '"'),
        number=lambda key, text: f"{key}:{text}",
    )


_V3 = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
WRITERS = {
    "deepseekv3": _headed(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        section=_V3,
        between="\n",
        inside=("<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>", *_V3),
    ),
    "deepseekv31": _headed(
        "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        section=_V3,
        inside=("<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>", *_V3),
    ),
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml("calls", " "),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM,
    "gpt-oss": _headed(
        "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
        "<|call|>",
    ),
    "hermes": _json_writer(
        "<tool_call>\n",
        "\n</tool_call>",
        between="\n",
        call_end="\n</tool_call>",
        inside=("</tool_call>", "<tool_call>"),
    ),
    "hunyuan": _HY3,
    "hunyuan_a13b": _json_writer(
        "",
        "",
        section=("<tool_calls>[", "]</tool_calls>"),
        between=", ",
        inside=("</tool_calls>", "<tool_calls>"),
    ),
    "kimi_k2": _headed(
        "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        inside=("<|tool_call_end|>", "<|tool_call_begin|>"),
    ),
    "lfm2": _python(("<|tool_call_start|>", "<|tool_call_end|>")),
    "llama3": _json_writer(
        "<|python_tag|>", "", "parameters", between="; ", inside=("<|python_tag|>",)
    ),
    "minimax-m2": _MINIMAX,
    "mistral": _headed("[TOOL_CALLS]{}[ARGS]", "", inside=("[TOOL_CALLS]",)),
    "pythonic": _python(("", "")),
    "qwen3_coder": _CODER,
    "step3": _STEP3,
}
WRITERS |= dict.fromkeys(("granite4", "qwen", "qwen25"), WRITERS["hermes"])
WRITERS |= dict.fromkeys(("mimo", "step3p5"), _CODER) | {"llama4": WRITERS["pythonic"]}
