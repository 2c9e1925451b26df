"""Content blocks made from deltas: the events keep their order, and what they add up to does not
depend on how the deltas are cut."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from setpoint.frontend.apis.anthropic.content_blocks import SIGNATURE, BlockEvents, Event, blocks_of
from setpoint.frontend.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta

texts = st.text(alphabet="ab \n{🙂", min_size=1, max_size=6)
values = st.dictionaries(st.sampled_from("abc"), st.integers() | texts, max_size=2)
parts = st.one_of(
    st.builds(TextDelta, texts), st.builds(ReasoningDelta, texts), values.map(lambda each: each)
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Delta], list[Delta], list[dict[str, Any]]]:
    """The deltas of an answer, the same cut into smaller ones, and its blocks."""
    whole: list[Delta] = []
    cut: list[Delta] = []
    blocks: list[dict[str, Any]] = []
    num_calls = 0
    for kind, group in groupby(draw(st.lists(parts, max_size=6)), key=type):
        for part in group:
            if isinstance(part, dict):
                text = json.dumps(part)
                call = {"index": num_calls, "id": f"call_{num_calls}", "name": "f"}
                num_calls += 1
                whole.append(ToolCallDelta(**call, arguments=text))
                at = draw(st.integers(0, len(text)))
                cut.append(ToolCallDelta(**call, arguments=text[:at]))
                cut.append(ToolCallDelta(index=call["index"], arguments=text[at:]))
                blocks.append({"type": "tool_use", "id": call["id"], "name": "f", "input": part})
            else:
                whole.append(part)
                cut.extend(kind(character) for character in part.text)
                _expect(blocks, "text" if kind is TextDelta else "thinking", part.text)
    return whole, cut, [block for block in blocks if not is_blank(block)]


def _expect(blocks: list[dict[str, Any]], kind: str, text: str) -> None:
    """Add text to the blocks that an answer should have. A blank block does not separate those
    around it."""
    while blocks and is_blank(blocks[-1]) and blocks[-1]["type"] != kind:
        blocks.pop()
    if blocks and blocks[-1]["type"] == kind:
        blocks[-1][kind] += text
    elif kind == "text":
        blocks.append({"type": "text", "text": text})
    else:
        blocks.append({"type": "thinking", "thinking": text, "signature": SIGNATURE})


def is_blank(block: dict[str, Any]) -> bool:
    return not block.get("text", "x").strip() or not block.get("thinking", "x").strip()


def events_of(deltas: list[Delta]) -> list[Event]:
    made = BlockEvents()
    return [event for delta in deltas for event in made.feed([delta])] + made.end()


@given(answers())
def test_blocks_do_not_depend_on_how_the_answer_is_cut(answer: Any) -> None:
    whole, cut, blocks = answer
    assert blocks_of(events_of(whole)) == blocks
    assert blocks_of(events_of(cut)) == blocks


@given(answers())
def test_every_block_starts_gets_deltas_of_its_kind_and_stops(answer: Any) -> None:
    index, kind = -1, None
    for event in events_of(answer[1]):
        if event["type"] == "content_block_start":
            assert kind is None
            index += 1
            kind = event["content_block"]["type"]
        elif event["type"] == "content_block_delta":
            assert event["delta"]["type"] in {
                "text": ["text_delta"],
                "thinking": ["thinking_delta", "signature_delta"],
                "tool_use": ["input_json_delta"],
            }.get(str(kind), [])
        else:
            assert kind is not None
            kind = None
        assert event["index"] == index
    assert kind is None


def test_hidden_thinking_leaves_a_block_without_text() -> None:
    made = BlockEvents(show_thinking=False)
    events = [*made.feed([ReasoningDelta("hm"), TextDelta("Yes.")]), *made.end()]
    assert blocks_of(events) == [
        {"type": "thinking", "thinking": "", "signature": SIGNATURE},
        {"type": "text", "text": "Yes."},
    ]


def test_a_call_that_a_limit_cut_off_has_an_empty_input() -> None:
    made = BlockEvents()
    events = [*made.feed([ToolCallDelta(0, "call_0", "f", '{"a": [1')]), *made.end()]
    (block,) = blocks_of(events)
    assert (block["name"], block["input"]) == ("f", {})
