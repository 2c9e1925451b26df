"""Calls that are written by every format's own rules, whole and broken in many ways: what is found in
them, however the stream is cut, and where the answer ends.

    python tests/property/test_broken_calls.py

prints the table of formats, ways of breaking and outcomes."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from broken_calls import WAYS, Broken
from call_writers import DEFINED, WRITERS, Call
from format_cases import check_stream, streamed, summary

from setpoint.frontend.chat.deltas import Answer, join_deltas
from setpoint.frontend.chat.formats.format_registry import TOOL_FORMATS
from setpoint.frontend.chat.parser import parse_answer

WORDS = (
    *(
        "Bern",
        "Zürich",
        "東京",
        "👩‍🚀",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "'",
        '"',
        "\\",
        "\\n",
        "{",
        "}",
    ),
    *("[", "]", "(", ")", "<", ">", "</", "<b>", "&amp;", ",", ":", "=", "```", "007", "null", "é"),
)


def some_text(draw: random.Random) -> str:
    return "x" + "".join(draw.choice(WORDS) for _ in range(draw.randint(0, 8))) + "x"


def some_call(draw: random.Random) -> Call:
    """A call of the function with all types of arguments, with some of them."""
    values: dict[str, Any] = {
        "line": draw.randint(-9, 10**6),
        "ratio": draw.choice([0.5, -1.25, 1e-7, 3.0]),
        "force": draw.random() < 0.5,
        "tags": [some_text(draw) for _ in range(draw.randint(0, 2))],
        "meta": {"k": [1, some_text(draw), None], "l": {}},
        "none": None,
        "text": some_text(draw),
    }
    keys = [key for key in values if draw.random() < 0.6]
    draw.shuffle(keys)
    return "edit", {"path": some_text(draw), **{key: values[key] for key in keys}}


def answer_of(name: str, raw: str) -> Answer:
    return join_deltas(parse_answer(TOOL_FORMATS[name].parser(DEFINED), raw))


def whole_calls(answer: Answer) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls if is_whole(call)]


def is_whole(call: Any) -> bool:
    try:
        return isinstance(json.loads(call.arguments), dict)
    except ValueError:
        return False


def broken_by(name: str, way: str, seed: int) -> tuple[Call, Broken | None]:
    call = some_call(random.Random(seed))
    return call, WAYS[way](WRITERS[name], call)


def outcome(name: str, broken: Broken) -> str:
    """ "as told", or what differs from the rules."""
    answer = answer_of(name, broken.raw)
    whole = whole_calls(answer)
    if whole != broken.whole:
        return "a wrong call" if any(each not in broken.whole for each in whole) else "a lost call"
    unfinished = tuple(call.name for call in answer.calls if not is_whole(call))
    if unfinished != broken.cut:
        return "a wrong half call"
    if any(call.is_cut == is_whole(call) for call in answer.calls):
        return "a wrong end"
    if broken.told not in answer.text:
        return "lost text"
    if broken.is_exact and answer.text.replace(broken.told, "", 1).strip():
        return "markers in the text"
    return "as told"


def pieces_of(raw: str, draw: random.Random, step: int) -> Iterator[list[str]]:
    """One character at a time, pieces of drawn sizes, and two pieces: every ``step``-th cut."""
    yield list(raw)
    for at in range(draw.randint(1, step), len(raw), step):
        yield [raw[:at], raw[at:]]
    for most in (3, 17):
        pieces, at = [], 0
        while at < len(raw):
            size = draw.randint(1, most)
            pieces.append(raw[at : at + size])
            at += size
        yield pieces


def check(name: str, seed: int, step: int) -> None:
    draw = random.Random(seed)
    for way in WAYS:
        _call, broken = broken_by(name, way, seed)
        if broken is None:
            continue
        assert outcome(name, broken) == "as told", (way, broken.raw, answer_of(name, broken.raw))
        whole = summary(parse_answer(TOOL_FORMATS[name].parser(DEFINED), broken.raw))
        for pieces in pieces_of(broken.raw, draw, step):
            deltas = streamed(TOOL_FORMATS[name].parser(DEFINED), pieces)
            check_stream(deltas)
            assert summary(deltas) == whole, (way, pieces)


def check_cut(name: str, seed: int, step: int) -> None:
    """An answer that is cut off has those calls of the whole answer whose arguments have begun, and
    nothing of one that has begun is text."""
    for way in ("nothing", "an end in a value", "arguments that are no object"):
        _, broken = broken_by(name, way, seed)
        if broken is None:
            continue
        for stop in range(seed % step, len(broken.raw), step):
            answer = answer_of(name, broken.raw[:stop])
            whole = whole_calls(answer)
            assert whole == broken.whole[: len(whole)], broken.raw[:stop]
            for call in answer.calls:
                assert call.is_cut != is_whole(call), broken.raw[:stop]
            num_begun = sum(begin < stop for begin in broken.begins)
            assert len(answer.calls) >= num_begun, broken.raw[:stop]
            next_at = broken.begins[num_begun:][:1]
            if num_begun and not next_at:
                assert not answer.text.strip(), broken.raw[:stop]


NAMES = sorted({form.name: name for name, form in sorted(TOOL_FORMATS.items())}.values())


def test_every_format_has_a_writer() -> None:
    assert WRITERS.keys() == TOOL_FORMATS.keys()


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", NAMES)
def test_broken_calls(name: str) -> None:
    for seed in range(6):
        check(name, seed, 17)
    check_cut(name, 0, 7)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_many_broken_calls(name: str) -> None:
    for seed in range(100):
        check(name, seed, 1 if seed < 5 else 11)
    for seed in range(10):
        check_cut(name, seed, 1)


def table(seeds: int = 20) -> str:
    """The worst outcome of each format and way."""
    rows = [["", *NAMES]]
    worst = [
        *("a wrong call", "a wrong half call", "a lost call", "a wrong end", "lost text"),
        "markers in the text",
    ]
    for way in WAYS:
        row = [way]
        for name in NAMES:
            found = [broken_by(name, way, seed)[1] for seed in range(seeds)]
            seen = {outcome(name, each) for each in found if each is not None}
            row.append(next((each for each in worst if each in seen), "as told" if seen else "-"))
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in zip(*rows, strict=True))


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
