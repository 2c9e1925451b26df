"""Breaks tool calls in many ways, with what a parser must find in them by the rules of
docs/tools-and-reasoning.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from call_writers import GOOD, UNKNOWN, WRITERS, Call, Writer, json_object, json_pair


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
    raw = writer.framed("edit", json_object([json_pair(*each) for each in call[1].items()]) + "}")
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
