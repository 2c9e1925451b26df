"""Writes tool calls as each family of models does, whole and broken, with what a parser must find in
them by the rules of docs/tools-and-reasoning.md."""

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


def _pair(key: str, value: Any) -> str:
    return f"{_json(key)}: {_json(value)}"


def _object(parts: list[str]) -> str:
    return "{" + ", ".join(parts) + "}"


def _json_writer(before: str, behind: str, key: str = "arguments", **more: Any) -> Writer:
    def framed(name: str, arguments: str) -> str:
        return f'{before}{{"name": "{name}", "{key}": {arguments}}}{behind}'

    return Writer(
        call=lambda name, parts: framed(name, _object(parts)),
        framed=framed,
        quote='"',
        argument=_pair,
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
        call=lambda name, parts: framed(name, _object(parts)),
        framed=framed,
        quote='"',
        argument=_pair,
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


@dataclass(frozen=True)
class Broken:
    """An answer, and what must be found in it."""

    raw: str
    whole: list[Call]
    """The calls with complete arguments."""
    cut: tuple[str, ...] = ()
    """The functions of calls whose arguments are not complete."""
    told: str = ""
    """What the text must contain."""
    is_exact: bool = True
    """Whether the text must contain nothing else."""
    begins: tuple[int, ...] = ()
    """Where the arguments of the calls begin: an answer that ends behind has the call."""


def _open_value(writer: Writer, call: Call) -> Broken | None:
    """The closing mark of the last string of a call is missing; another call follows."""
    others = {key: value for key, value in call[1].items() if key != "text"}
    last = ("edit", {**others, "text": "z"})
    raw = writer.one(last)
    at = raw.rfind(writer.value_end)
    if not writer.value_end:
        return None
    raw = raw[:at] + raw[at + len(writer.value_end) :]
    answer = writer.answer([raw, writer.one(GOOD)])
    if writer.swallows:
        return Broken(answer, [], told=raw, is_exact=False)
    if (
        not writer.is_json
        and "tool_call" not in writer.value_end
        and writer.inside[0] in at_end(writer)
    ):
        return Broken(answer, [last, GOOD])
    if writer.between == ", ":
        return None  # in a list of objects nothing shows where the next call begins
    return Broken(answer, [GOOD], ("edit",))


def at_end(writer: Writer) -> tuple[str, ...]:
    """The closing tags of values, if the format has them."""
    return tuple(each for each in writer.inside if each.startswith("</") and "call" not in each)


def _open_middle(writer: Writer, call: Call) -> Broken | None:
    """The closing tag of a value is missing before the next argument."""
    if not at_end(writer):
        return None
    given = ("edit", {"path": call[1]["path"], "text": "z"})
    parts = [writer.argument(key, value) for key, value in given[1].items()]
    at = parts[0].rfind(writer.value_end.lstrip("\n"))
    parts[0] = parts[0][:at] + parts[0][at + len(writer.value_end.lstrip("\n")) :].lstrip("\n")
    if not parts[0].endswith("\n"):
        parts[0] += "\n"
    return Broken(writer.answer([writer.call("edit", parts), writer.one(GOOD)]), [given, GOOD])


def _no_call_end(writer: Writer, call: Call) -> Broken | None:
    if not writer.call_end:
        return None
    raw = writer.one(call).removesuffix(writer.call_end)
    answer = writer.answer([raw, writer.one(GOOD)])
    if writer.swallows:
        return Broken(answer, [], told=raw, is_exact=False)
    return Broken(answer, [call, GOOD])


def _no_section_end(writer: Writer, call: Call) -> Broken | None:
    end = writer.section[1]
    return Broken(writer.written([call, GOOD]).removesuffix(end), [call, GOOD]) if end else None


def _closer_inside(writer: Writer, call: Call) -> Broken | None:
    if not writer.inside:
        return None
    text = "".join(f"a {each} b " for each in writer.inside) + "."
    given = ("edit", {**call[1], "text": text})
    return Broken(writer.written([given, GOOD]), [given, GOOD])


def _markers_inside(writer: Writer, call: Call) -> Broken | None:
    """Every string of every call is a marker, or mentions one where a marker alone ends a value."""
    if not writer.inside:
        return None
    form = "{}" if writer.quote else "a {} b"
    shift = len(call[1]["path"])
    texts = [
        form.format(writer.inside[(shift + each) % len(writer.inside)]) for each in (0, 0, 1, 2, 2)
    ]
    given: list[Call] = [
        ("edit", {"path": texts[0], "text": texts[1]}),
        ("look", {"place": texts[2]}),
        ("edit", {"path": texts[3], "line": 3, "text": texts[4]}),
    ]
    return Broken(writer.written(given), given)


def _call_inside(writer: Writer, call: Call) -> Broken | None:
    if writer is WRITERS["gpt-oss"] or writer.value_end in ('<|"|>', "<escape>"):
        return None  # a string cannot contain the mark that ends it
    given = ("edit", {**call[1], "text": f"Like this:\n{writer.written([GOOD])}\nSo."})
    return Broken(writer.written([given, GOOD]), [given, GOOD])


def _unknown(writer: Writer, call: Call) -> Broken:
    return Broken(writer.written([UNKNOWN, call]), [UNKNOWN, call])


def _malformed(writer: Writer, call: Call) -> Broken | None:
    if not writer.malformed:
        return None
    parts = [writer.argument(key, value) for key, value in call[1].items()]
    raw = writer.call("edit", [*parts[:1], writer.malformed, *parts[1:]])
    answer = writer.answer([raw, writer.one(GOOD)])
    if writer.swallows:
        return Broken(answer, [GOOD], told=raw)
    if writer.is_json:
        return None  # see _open_bracket: of JSON, only what ends it is looked at
    return Broken(answer, [call, GOOD], told=writer.malformed.strip())


def _open_bracket(writer: Writer, call: Call) -> Broken | None:
    """Malformed arguments before a good call."""
    if not writer.is_json or not writer.call_end:
        return None
    raw = writer.call("edit", ['"path": {"a": {"b": {"c": 1}'])
    return Broken(writer.answer([raw, writer.one(GOOD)]), [GOOD], ("edit",))


def _number(writer: Writer, call: Call) -> Broken:
    parts = [
        writer.argument("path", "x"),
        writer.number("line", "007"),
        writer.number("ratio", "+1_0.5"),
    ]
    given = ("edit", {"path": "x", "line": 7, "ratio": 10.5})
    if writer.swallows:
        parts[2] = writer.number("ratio", "1_0.5")
    return Broken(writer.answer([writer.call("edit", parts), writer.one(GOOD)]), [given, GOOD])


def _text_between(writer: Writer, call: Call) -> Broken | None:
    if writer.between.strip() or writer.swallows:
        return None  # the calls are a list
    calls = [writer.one(call), "\nAnd then:\n", writer.one(GOOD)]
    begin, end = writer.section
    return Broken(begin + "".join(calls) + end, [call, GOOD], told="And then:")


def _begins(writer: Writer, raw: str, calls: list[Call]) -> tuple[int, ...]:
    """See Broken.begins. Calls of Python's syntax are whole, or text."""
    if writer.swallows:
        return ()
    begins = []
    for _, arguments in calls:
        key, value = next(iter(arguments.items()))
        first = writer.argument(key, value)
        begins.append(raw.index(first) + first.index(key) - 1)
    return tuple(begins)


def _nothing(writer: Writer, call: Call) -> Broken:
    raw = writer.written([call, GOOD])
    return Broken(raw, [call, GOOD], begins=_begins(writer, raw, [call, GOOD]))


def _no_object(writer: Writer, call: Call) -> Broken | None:
    """Arguments without brackets, and lists."""
    if writer.framed is None:
        return None
    values = ['["a", {"b": [1, 2]}]', '"a \\"b"', "12", "true", "Bern"]
    value = values[len(call[1]["path"]) % len(values)]
    raw = writer.answer([writer.framed("edit", value), writer.one(GOOD)])
    begins = (raw.index(value, raw.index("edit")), *_begins(writer, raw, [GOOD]))
    return Broken(raw, [GOOD], ("edit",), begins=begins)


def _no_quote(behind: bool) -> Callable[[Writer, Call], Broken | None]:
    """A string in the middle of the arguments lacks a quote. One that lacks its last one may hold
    all that follows, so nothing shows where the call ends but its marker."""

    def way(writer: Writer, call: Call) -> Broken | None:
        if not writer.quote or writer.between == ", ":
            return None
        parts = [writer.argument(key, f"v, {key}") for key in ("path", "text")]
        at = parts[0].index("v,") - len(writer.quote) if not behind else -len(writer.quote)
        stop = at + len(writer.quote)
        parts[0] = parts[0][:at] + (parts[0][stop:] if stop else "")
        raw = writer.call("edit", [*parts, writer.argument("line", 3)])
        return Broken(writer.answer([raw, writer.one(GOOD)]), [GOOD], ("edit",), is_exact=False)

    return way


def _bad_header(writer: Writer, call: Call, *, without: str = "") -> Broken | None:
    """A call whose name is none, between good calls. without: what the first of them lacks at its
    end."""
    if not writer.names_end:
        return None
    path = call[1]["path"]
    first, bad = (
        writer.one((name, {key: path})) for name, key in (("edit", "path"), ("lo ok", "text"))
    )
    broken = first.removesuffix(without)
    if without and broken == first:
        return None
    cut = without.startswith(writer.value_end)
    raw = writer.answer([broken + ("\n" if without else ""), bad, writer.one(GOOD)])
    whole = [*([] if cut else [("edit", {"path": path})]), GOOD]
    return Broken(raw, whole, ("edit",) if cut else (), told="lo ok", is_exact=False)


def _bad_header_open_call(writer: Writer, call: Call) -> Broken | None:
    return _bad_header(writer, call, without=writer.call_end) if writer.call_end else None


def _bad_header_open_value(writer: Writer, call: Call) -> Broken | None:
    one = writer.one(("edit", {"path": "x"}))
    return _bad_header(writer, call, without=one[one.rindex(writer.value_end) :])


def _bad_header_last(writer: Writer, call: Call) -> Broken | None:
    """A call without its end, before one whose name is none, with which the answer ends."""
    if not writer.names_end:
        return None
    first, bad = writer.one(call), writer.one(("lo ok", {"path": "x"}))
    stop = bad.index("lo ok") + len("lo ok")
    ends = ("", ", and here I stop.", bad[stop:])
    raw = (
        writer.section[0]
        + first.removesuffix(writer.call_end)
        + "\n"
        + bad[:stop]
        + ends[len(call[1]["path"]) % len(ends)]
    )
    return Broken(raw, [call], told="lo ok", is_exact=False)


def _open_last(writer: Writer, call: Call) -> Broken | None:
    """The last value and its call have no end, and their section has one."""
    if not writer.names_end or not writer.section[1]:
        return None
    one = writer.one(("edit", {"path": call[1]["path"]}))
    raw = writer.answer([one[: one.rindex(writer.value_end)]])
    return Broken(raw, [], ("edit",))


def _too_many(writer: Writer, call: Call) -> Broken | None:
    """A bracket too many behind the arguments."""
    if not writer.is_json or not writer.call_end:
        return None
    assert writer.framed is not None
    raw = writer.framed("edit", _object([_pair(*each) for each in call[1].items()]) + "}")
    return Broken(writer.answer([raw, writer.one(GOOD)]), [call, GOOD], told="}")


WAYS: dict[str, Callable[[Writer, Call], Broken | None]] = {
    "nothing": _nothing,
    "no end of a value": _open_middle,
    "no end of the last value": _open_value,
    "no end of a call": _no_call_end,
    "no end of the section": _no_section_end,
    "an end in a value": _closer_inside,
    "markers in several values": _markers_inside,
    "a call in a value": _call_inside,
    "an unknown function": _unknown,
    "a malformed argument": _malformed,
    "malformed arguments": _open_bracket,
    "numbers in other notations": _number,
    "text between calls": _text_between,
    "arguments that are no object": _no_object,
    "no quote before a string": _no_quote(behind=False),
    "no quote behind a string": _no_quote(behind=True),
    "a malformed header": _bad_header,
    "a malformed header behind a call without its end": _bad_header_open_call,
    "a malformed header behind a value without its end": _bad_header_open_value,
    "a malformed header at the end of the answer": _bad_header_last,
    "no end of the last value and of its call": _open_last,
    "a bracket behind the arguments": _too_many,
}
