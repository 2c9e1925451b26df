"""The formats of reasoning: each example cut at every place."""

from __future__ import annotations

import re

import pytest
from format_cases import TOOLS, Case, check_cuts, check_stream, found, streamed, summary
from hypothesis import given
from hypothesis import strategies as st

from setpoint.frontend.chat.deltas import join_deltas
from setpoint.frontend.chat.formats.format_registry import (
    REASONING_FORMATS,
    reasoning_format,
    tool_format,
)
from setpoint.frontend.chat.formats.reasoning import MARKED
from setpoint.frontend.chat.parser import DeltaParser, PlainParser, parse_answer

CALL = '<tool_call>{"name": "ping"}</tool_call>'


def opened(begin: str, end: str) -> list[Case]:
    """Answers in which the model opens the reasoning itself."""
    return [
        Case("both", f"{begin}\nHm, <b>.\n\n{end}\n\nYes.\n", "Yes.\n", reasoning="Hm, <b>."),
        Case("space first", f"\n {begin}\nHm.{end}Yes.", "Yes.", reasoning="Hm."),
        Case("nothing behind", f"{begin}Hm.\n{end}\n", reasoning="Hm."),
        Case("the begin marker twice", f"{begin}{begin}Hm.{end}Yes.", "Yes.", reasoning="Hm."),
        Case("twice, on lines", f"{begin}\n{begin}\nHm.{end}Yes.", "Yes.", reasoning="Hm."),
        Case("empty reasoning", f"{begin}\n\n{end}\n\nYes.", "Yes."),
        Case("cut off", f"{begin}\nHm, {end[:-1]}", reasoning=f"Hm, {end[:-1]}"),
        Case("unicode", f"{begin}é 東 👩‍🚀\n\n é{end}👩‍🚀", "👩‍🚀", reasoning="é 東 👩‍🚀\n\n é"),
        Case(
            "markers in the answer",
            f"{begin}a{end}b {begin}c{end}",
            f"b {begin}c{end}",
            reasoning="a",
        ),
    ]


def unopened(begin: str, end: str) -> list[Case]:
    """Answers without reasoning."""
    texts = {
        "no marker": "Yes.\n",
        "a marker later": f"Yes, {begin} is a tag.",
        "part of a marker": f" {begin.rstrip()[:-2]}",
        "only space": " \n",
        "much space": " " * 70 + begin + "x",
    }
    return [
        *(Case(what, text, text) for what, text in texts.items()),
        Case("the end marker first", f"\n{end}\n\nYes {end}", f"Yes {end}"),
    ]


def inside(begin: str, end: str) -> list[Case]:
    """Answers that start in the reasoning."""
    return [
        Case("the end marker", f"Hm.\n{end}\n\nYes.", "Yes.", reasoning="Hm."),
        Case("the begin marker all the same", f"{begin}Hm.{end}Yes.", "Yes.", reasoning="Hm."),
        Case("cut off", "Hm. \n", reasoning="Hm."),
        Case("nothing", f"{end}Yes.", "Yes."),
    ]


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
GPT_OSS = [
    Case("both", f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.<|return|>", "Yes.", reasoning="Hm."),
    Case("no reasoning", "<|channel|>final<|message|>Yes.", "Yes."),
    Case("cut off", f"{ANALYSIS}Hm. <|en", reasoning="Hm. <|en"),
    Case(
        "twice, and a preamble",
        f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{ANALYSIS}So.<|end|>{FINAL}Yes.",
        "I look.Yes.",
        reasoning="Hm.So.",
    ),
    Case(
        "the model's own tool",
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        reasoning="1+1",
    ),
    Case("no markers", "Yes.", "Yes."),
]


def cases() -> list[tuple[str, bool, Case]]:
    table = [("gpt-oss", False, case) for case in GPT_OSS]
    differing = {(form.begin, form.end): form for form in MARKED}
    for form in differing.values():
        begins = opened(form.begin, form.end)
        table += [(form.name, False, case) for case in (*begins, *unopened(form.begin, form.end))]
        table += [(form.name, True, case) for case in (*begins, *inside(form.begin, form.end))]
    return table


CASES = cases()
TABLE = [
    pytest.param(name, at_once, case, id=f"{name}: {case.what}, {at_once}")
    for name, at_once, case in CASES
]


def make(name: str, at_once: bool, *, separate: bool = True) -> DeltaParser:
    form = reasoning_format(name)
    return form.parser(PlainParser(), starts_inside=at_once, separate=separate)


@pytest.mark.parametrize(("name", "at_once", "case"), TABLE)
def test_what_is_found_in_an_answer(name: str, at_once: bool, case: Case) -> None:
    seen = found(case.raw, join_deltas(parse_answer(make(name, at_once), case.raw)))
    assert (seen.text, seen.reasoning) == (case.text, case.reasoning)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(("name", "at_once", "case"), TABLE)
def test_the_cuts_of_a_stream_do_not_matter(
    name: str, at_once: bool, case: Case, separate: bool
) -> None:
    check_cuts(lambda: make(name, at_once, separate=separate), case.raw)


@pytest.mark.parametrize(("name", "at_once", "case"), TABLE)
def test_reasoning_may_stay_in_the_text_as_it_was_written(
    name: str, at_once: bool, case: Case
) -> None:
    answer = join_deltas(parse_answer(make(name, at_once, separate=False), case.raw))
    assert answer.reasoning == ""
    if name == "gpt-oss":
        assert set(re.findall(r"\w+\.", case.reasoning + case.text)) <= set(
            re.findall(r"\w+\.", answer.text)
        )
    else:
        assert answer.text == case.raw


@given(st.data())
def test_any_cuts_in_front_of_tool_calls(data: st.DataObject) -> None:
    name, at_once, case = data.draw(st.sampled_from(CASES))
    raw = case.raw + data.draw(st.sampled_from(["", CALL, f"\n\nSo. {CALL} Yes."]))
    at = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    pieces = [raw[start:stop] for start, stop in zip([0, *at], [*at, len(raw)], strict=True)]

    def parser() -> DeltaParser:
        after = tool_format("hermes").parser(TOOLS)
        return reasoning_format(name).parser(after, starts_inside=at_once)

    deltas = streamed(parser(), pieces)
    check_stream(deltas)
    assert summary(deltas) == summary(parse_answer(parser(), raw))


def test_channels_with_calls() -> None:
    raw = (
        f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.ping"
        '<|constrain|>json<|message|>{"a": 1}<|call|>'
    )

    def parser() -> DeltaParser:
        after = tool_format("gpt-oss").parser(TOOLS)
        return reasoning_format("gpt-oss").parser(after, starts_inside=False)

    answer = join_deltas(parse_answer(parser(), raw))
    assert (answer.text, answer.reasoning) == ("", "Hm.")
    assert [(call.name, call.arguments) for call in answer.calls] == [("ping", '{"a": 1}')]
    check_cuts(parser, raw)
    without_tools = join_deltas(parse_answer(make("gpt-oss", False), raw))
    assert without_tools.text == raw[raw.index("<|start|>") :]


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
    gemma = REASONING_FORMATS["gemma4"]
    assert gemma.starts_inside("<|turn>model\n<|channel>thought\n")
    assert not gemma.starts_inside("<|turn>model\n<|channel>thought\n<channel|>")


def test_a_long_answer_takes_linear_time() -> None:
    """What a parser keeps as text it handles again with the next piece."""
    for begun in ("", "<think>", "<think>" + "\n" * 5000, " " * 5000):
        parser = make("qwen3", False)
        most = 0
        raw = begun + "x <y \n" * 20_000
        for at in range(0, len(raw), 3):
            parser.feed(raw[at : at + 3])
            most = max(most, len(getattr(parser, "_text", "")))
        assert most < 200
