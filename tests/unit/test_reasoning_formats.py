"""The formats of reasoning: each example cut at every place."""

from __future__ import annotations

import pytest
from format_cases import TOOLS, Case, check_cuts, found

from setpoint.frontend.chat.deltas import gathered
from setpoint.frontend.chat.formats.registry import REASONING_FORMATS, reasoning_format, tool_format
from setpoint.frontend.chat.parser import DeltaParser, PlainParser, parsed

MARKED = ("deepseek-r1", "qwen3")

OPENED = [
    Case("both", "<think>\nHm, <b>.\n\n</think>\n\nYes.\n", text="Yes.\n", reasoning="Hm, <b>."),
    Case("space first", "\n <think>\nHm.</think>Yes.", text="Yes.", reasoning="Hm."),
    Case("nothing behind", "<think>Hm.\n</think>\n", reasoning="Hm."),
    Case("empty reasoning", "<think>\n\n</think>\n\nYes.", text="Yes."),
    Case("cut off", "<think>\nHm, </th", reasoning="Hm, </th"),
    Case(
        "a marker in the answer",
        "<think>a</think>b <think>c</think>",
        text="b <think>c</think>",
        reasoning="a",
    ),
]
UNOPENED = [
    Case("no marker", "Yes.\n", text="Yes.\n"),
    Case("a marker later", "Yes, <think> is a tag.", text="Yes, <think> is a tag."),
    Case("part of a marker", " <thin", text=" <thin"),
    Case("only space", " \n", text=" \n"),
    Case("much space", " " * 70 + "<think>x", text=" " * 70 + "<think>x"),
]
INSIDE = [
    Case("the end marker", "Hm.\n</think>\n\nYes.", text="Yes.", reasoning="Hm."),
    Case("the begin marker all the same", "<think>Hm.</think>Yes.", text="Yes.", reasoning="Hm."),
    Case("cut off", "Hm. \n", reasoning="Hm."),
    Case("nothing", "</think>Yes.", text="Yes."),
]
TABLE = [
    pytest.param(name, inside, case, id=f"{name}: {case.what}")
    for name in MARKED
    for inside, cases in ((False, OPENED), (False, UNOPENED), (True, OPENED), (True, INSIDE))
    for case in cases
]


def make(name: str, inside: bool, *, separate: bool = True) -> DeltaParser:
    form = reasoning_format(name)
    return form.parser(PlainParser(), starts_inside=inside, separate=separate)


@pytest.mark.parametrize(("name", "inside", "case"), TABLE)
def test_what_is_found_in_an_answer(name: str, inside: bool, case: Case) -> None:
    seen = found(case.raw, gathered(parsed(make(name, inside), case.raw)))
    assert (seen.text, seen.reasoning) == (case.text, case.reasoning)


@pytest.mark.parametrize(("name", "inside", "case"), TABLE)
def test_the_cuts_of_a_stream_do_not_matter(name: str, inside: bool, case: Case) -> None:
    check_cuts(lambda: make(name, inside), case.raw)


@pytest.mark.parametrize(("name", "inside", "case"), TABLE)
def test_reasoning_may_stay_in_the_text_as_it_was_written(
    name: str, inside: bool, case: Case
) -> None:
    answer = gathered(parsed(make(name, inside, separate=False), case.raw))
    assert (answer.text, answer.reasoning) == (case.raw, "")
    check_cuts(lambda: make(name, inside, separate=False), case.raw)


@pytest.mark.parametrize("separate", [True, False])
def test_a_call_in_the_reasoning_is_none(separate: bool) -> None:
    call = '<tool_call>{"name": "ping"}</tool_call>'
    raw = f"<think>Like {call}?</think>{call}"
    parser = reasoning_format("qwen3").parser(
        tool_format("hermes").parser(TOOLS), starts_inside=False, separate=separate
    )
    answer = gathered(parsed(parser, raw))
    assert [call.name for call in answer.calls] == ["ping"]
    if separate:
        assert (answer.text, answer.reasoning) == ("", f"Like {call}?")
    else:
        assert (answer.text, answer.reasoning) == (f"<think>Like {call}?</think>", "")


def test_where_the_output_starts() -> None:
    qwen3, r1 = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek-r1"]
    assert not qwen3.starts_inside()
    assert r1.starts_inside()
    for form in (qwen3, r1):
        assert form.starts_inside("<|assistant|><think>\n")
        assert not form.starts_inside("<think>\n\n</think>\n\n")
        assert form.starts_inside("<|assistant|>", started="<think> I was about")
        assert not form.starts_inside("<|assistant|><think>", started="Hm.</think>So")
    assert not qwen3.starts_inside("What does <think> mean?<|assistant|>")
