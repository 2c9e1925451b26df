"""Calls in reasoning that its marker has not ended: a call ends it, a mention of one does not."""

from __future__ import annotations

import pytest
from format_cases import TOOLS, check_cuts, streamed, summary
from hypothesis import given
from hypothesis import strategies as st

from setpoint.frontend.chat.deltas import join_deltas
from setpoint.frontend.chat.formats.call_search import MAX_UNCERTAIN_CHARS
from setpoint.frontend.chat.formats.format_registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format,
    tool_format,
)
from setpoint.frontend.chat.formats.reasoning import MARKED
from setpoint.frontend.chat.parser import DeltaParser, PlainParser, parse_answer

CALLS = {
    "hermes": '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
    "glm45": "<tool_call>ping</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>',
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n"
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "gemma4": "<|tool_call>call:ping{}<tool_call|>",
    "lfm2": "<|tool_call_start|>[ping()]<|tool_call_end|>",
    "mistral": "[TOOL_CALLS]ping[ARGS]{}",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke"
    ' name="ping"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "llama3": '<|python_tag|>{"name": "ping", "parameters": {}}',
}
CALL = CALLS["hermes"]


def parser_of(reasoning: str, tools: str, *, inside: bool = True, **how: bool) -> DeltaParser:
    form = tool_format(tools)
    return reasoning_format(reasoning).parser(
        form.parser(TOOLS), starts_inside=inside, calls=form, **how
    )


def said(parser: DeltaParser, raw: str) -> tuple[str, str, list[str]]:
    answer = join_deltas(parse_answer(parser, raw))
    return answer.text, answer.reasoning, [call.name for call in answer.calls]


@pytest.mark.cases(77)
@pytest.mark.parametrize("reasoning", [form.name for form in MARKED])
@pytest.mark.parametrize("tools", CALLS)
def test_a_call_ends_reasoning_that_was_left_open(reasoning: str, tools: str) -> None:
    """Red before for all but glm45 and kimi_k2: the call was reasoning."""
    raw = f"I need to read.\n\n{CALLS[tools]}"
    assert said(parser_of(reasoning, tools), raw) == ("", "I need to read.", ["ping"])
    begin = REASONING_FORMATS[reasoning].begin
    opened = parser_of(reasoning, tools, inside=False)
    assert said(opened, begin + raw) == ("", "I need to read.", ["ping"])


@pytest.mark.parametrize("tools", CALLS)
@pytest.mark.parametrize("behind", ["", "\n\nSo.", "</think>So."])
def test_the_cuts_of_a_stream_do_not_matter(tools: str, behind: str) -> None:
    check_cuts(lambda: parser_of("qwen3", tools), f"Hm.\n{CALLS[tools]}{behind}")


MENTIONS = {
    "a word follows": "I write <tool_call> and then the name.",
    "in back-ticks": f"As `{CALL}` says",
    "in two back-ticks": f"As `` ` {CALL}`` says",
    "behind other code in the line": f"`x` and `y: {CALL}`",
    "in a block": f"So:\n```json\n\n{CALL}\n```\nNow",
    "in quotation marks": f"The \"{CALL}\" form, '{CALL}'",
    "half a call": '<tool_call>{"name": "ping"',
    "another half": '<tool_call>{"name": "ping", "argu',
    "twice": "<tool_call><tool_call>",
    "not JSON": "<tool_call>[ping]</tool_call>",
    "space": "<tool_call> \n ",
}


@pytest.mark.parametrize("what", MENTIONS)
@pytest.mark.parametrize("behind", ["</think>Yes.", f"</think>{CALL}", ""])
@pytest.mark.parametrize("separate", [True, False])
def test_a_mention_of_a_call_does_not(what: str, behind: str, separate: bool) -> None:
    raw = MENTIONS[what] + behind
    found = said(parser_of("qwen3", "hermes", separate=separate), raw)
    text = "Yes." if "Yes" in behind else ""
    if not separate:
        text = f"{MENTIONS[what]}</think>{text}" if behind else MENTIONS[what]
    reasoning = MENTIONS[what].rstrip() if separate else ""
    assert found == (text, reasoning, ["ping"] if behind.endswith(CALL) else [])
    check_cuts(lambda: parser_of("qwen3", "hermes", separate=separate), raw)


@pytest.mark.parametrize(
    "before",
    ["It's `x`.\n", "```\nx\n```\n", "`open\n", "````\n```\n````\nSo ", 'He said "no".\n', "a''b "],
)
def test_code_and_quotations_that_have_ended_do_not_hide_a_call(before: str) -> None:
    raw = f"{before}{CALL}"
    assert said(parser_of("qwen3", "hermes"), raw) == ("", before.rstrip(), ["ping"])
    check_cuts(lambda: parser_of("qwen3", "hermes"), raw)


def test_a_call_may_follow_a_mention() -> None:
    raw = f"A <tool_call> is due.\n{CALL}\nDone."
    assert said(parser_of("qwen3", "hermes"), raw) == ("Done.", "A <tool_call> is due.", ["ping"])


@pytest.mark.parametrize("tools", CALLS)
@pytest.mark.parametrize("behind", ["", "\n\nSo.", "again"])
def test_the_end_of_the_reasoning_behind_a_call_is_no_text(tools: str, behind: str) -> None:
    """Red before: "</think>" was shown to the user."""
    call = CALLS[tools]
    raw = f"Hm.\n{call}\n</think>{call if behind == 'again' else behind}"
    text, names = ("", ["ping", "ping"]) if behind == "again" else (behind.strip(), ["ping"])
    assert said(parser_of("qwen3", tools), raw) == (text, "Hm.", names)
    check_cuts(lambda: parser_of("qwen3", tools), raw)


def test_only_the_first_end_behind_a_call_belongs_to_the_reasoning() -> None:
    raw = f"Hm.\n{CALL}\nSo. </think>\nIt is </think>, and </thi"
    text = "So. It is </think>, and </thi"
    assert said(parser_of("qwen3", "hermes"), raw) == (text, "Hm.", ["ping"])
    check_cuts(lambda: parser_of("qwen3", "hermes"), raw)
    shown = said(parser_of("qwen3", "hermes", separate=False), f"Hm.\n{CALL}\n</think>So.")
    assert shown == ("Hm.\n</think>So.", "", ["ping"])


def test_the_end_of_the_reasoning_in_an_argument_stays() -> None:
    call = CALL.replace("{}", '{"a": "</think>"}')
    raw = f"Hm.\n{CALL}\n{call}\n</think>So."
    answer = join_deltas(parse_answer(parser_of("qwen3", "hermes"), raw))
    assert [call.arguments for call in answer.calls] == ["{}", '{"a": "</think>"}']
    assert answer.text == "So."


def test_reasoning_that_stays_in_the_text_is_ended_as_well() -> None:
    parser = parser_of("qwen3", "hermes", separate=False)
    assert said(parser, f"Hm.\n{CALL}") == ("Hm.\n", "", ["ping"])


def test_without_a_format_of_calls_only_the_marker_ends_the_reasoning() -> None:
    parser = reasoning_format("qwen3").parser(PlainParser(), starts_inside=True)
    assert said(parser, f"Hm.\n{CALL}") == ("", f"Hm.\n{CALL}", [])


def test_calls_that_are_text_end_the_reasoning_as_well() -> None:
    """A request without tools: what the model writes is text, as it would be after the marker."""
    form = tool_format("hermes")
    parser = reasoning_format("qwen3").parser(PlainParser(), starts_inside=True, calls=form)
    assert said(parser, f"Hm.\n{CALL}") == (CALL, "Hm.", [])


def test_what_is_held_back_is_bounded() -> None:
    """Calls of LFM2 are certain only at their end: a long one is taken for a call."""
    long = f'<|tool_call_start|>[ping(a="{"x" * (2 * MAX_UNCERTAIN_CHARS)}")]<|tool_call_end|>'
    parser = parser_of("qwen3", "lfm2")
    most = 0
    for char in f"Hm.\n{long}":
        parser.feed(char)
        most = max(most, len(getattr(parser, "_text", "")))
    assert most <= MAX_UNCERTAIN_CHARS
    assert said(parser_of("qwen3", "lfm2"), f"Hm.\n{long}") == ("", "Hm.", ["ping"])


@given(st.data())
def test_any_mixture_cut_anywhere(data: st.DataObject) -> None:
    tools = data.draw(st.sampled_from(sorted(CALLS)))
    opening = TOOL_FORMATS[tools].openings[0]
    parts = [CALLS[tools], opening, "`", "```", "\n", " a", '"', "</think>", "<think>", "</th"]
    raw = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    at = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    pieces = [raw[start:stop] for start, stop in zip([0, *at], [*at, len(raw)], strict=True)]
    inside = data.draw(st.booleans())
    deltas = streamed(parser_of("qwen3", tools, inside=inside), pieces)
    whole = parse_answer(parser_of("qwen3", tools, inside=inside), raw)
    assert summary(deltas) == summary(whole)
