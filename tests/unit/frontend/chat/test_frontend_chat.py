"""Typed deltas of a chat: what a parser finds (text, reasoning, tool calls) is rendered in OpenAI's
shape, whole and as a stream, and both say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.apis.openai.chat import ChatChoices
from setpoint.frontend.chat.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    join_deltas,
)
from setpoint.frontend.chat.parser import PlainParser, parse_answer
from setpoint.frontend.jobs import SequenceOutput
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.byte_tokenizer import make_byte_tokenizer

TOKENIZER = Tokenizer(make_byte_tokenizer())


class ByCase:
    """A parser for tests: capitals are reasoning, digits arguments of the first tool call, and the
    rest is text. One character is always held back."""

    def __init__(self) -> None:
        self._held = ""
        self._has_called = False

    def feed(self, text: str) -> Sequence[Delta]:
        ready, self._held = (self._held + text)[:-1], (self._held + text)[-1:]
        return list(self._deltas(ready))

    def end(self) -> Sequence[Delta]:
        return list(self._deltas(self._held))

    def _deltas(self, text: str) -> Iterator[Delta]:
        for character in text:
            if character.isdigit():
                first = {} if self._has_called else {"id": "call_0", "name": "add"}
                self._has_called = True
                yield ToolCallDelta(0, arguments=character, **first)
            elif character.isupper():
                yield ReasoningDelta(character)
            else:
                yield TextDelta(character)


def output_of(text: str) -> SequenceOutput:
    sampling = SamplingParams(max_new_tokens=99)
    request = Request(rid="r", prompt_ids=pack_ids([1]), sampling=sampling, seed=0)
    return SequenceOutput(request, 0, TOKENIZER)


def event_of(text: str, *, is_last: bool) -> TokenEvent:
    ids = TOKENIZER.encode(text, add_special_tokens=False).tolist()
    return TokenEvent(
        seq_id=0,
        ids=ids,
        num_prompt=1,
        num_outputs=len(ids),
        finish=Finish("stop") if is_last else None,
    )


def streamed(choices: ChatChoices, pieces: Sequence[str]) -> list[dict[str, Any]]:
    output, made = output_of("".join(pieces)), []
    for number, text in enumerate(pieces, 1):
        piece = output.feed(event_of(text, is_last=number == len(pieces)))
        if number == 1:
            made.append(choices.opening(output))
        if (choice := choices.choice(piece)) is not None:
            made.append(choice)
    return made


def whole(choices: ChatChoices, text: str) -> dict[str, Any]:
    output = output_of(text)
    output.feed(event_of(text, is_last=True))
    return choices.whole(output)


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client of OpenAI's puts together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        delta = chunk["delta"]
        message["role"] = delta.get("role", message.get("role"))
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta["reasoning_content"] or ""
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"id": call.get("id", ""), "arguments": ""})
            known["name"] = call["function"].get("name", known.get("name", ""))
            known["arguments"] += call["function"]["arguments"]
    return {**message, "calls": calls}


TEXTS = st.text(alphabet="aB1 ", max_size=12)


@given(pieces=st.lists(TEXTS, min_size=1, max_size=6))
def test_a_stream_says_what_the_whole_answer_says(pieces: list[str]) -> None:
    text = "".join(pieces)
    choices = ChatChoices(TOKENIZER, ByCase)
    chunks, one = streamed(choices, pieces), whole(choices, text)
    message, said = one["message"], joined(chunks)
    assert said["role"] == message["role"] == "assistant"
    assert said["content"] == message["content"] == "".join(c for c in text if c in "a ")
    assert (said["reasoning_content"] or None) == message["reasoning_content"]
    assert (message["reasoning_content"] or "") == "B" * text.count("B")
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert [{"name": each["name"], "arguments": each["arguments"]} for each in calls] == [
        {"name": each["name"], "arguments": each["arguments"]} for each in said["calls"].values()
    ]
    assert calls == ([{"name": "add", "arguments": "1" * text.count("1")}] if "1" in text else [])
    assert chunks[-1]["finish_reason"] == one["finish_reason"]
    assert one["finish_reason"] == ("tool_calls" if "1" in text else "stop")


def test_a_call_begins_once_and_goes_on_with_arguments() -> None:
    chunks = streamed(ChatChoices(TOKENIZER, ByCase), ["1", "2", "3"])
    assert [chunk["delta"]["tool_calls"] for chunk in chunks if "tool_calls" in chunk["delta"]] == [
        [
            {
                "index": 0,
                "id": "call_0",
                "type": "function",
                "function": {"name": "add", "arguments": "1"},
            }
        ],
        [{"index": 0, "function": {"arguments": "23"}}],
    ]


@pytest.mark.parametrize("text", ["", "one piece"])
def test_without_a_parser_every_word_is_text(text: str) -> None:
    choices = ChatChoices(TOKENIZER, PlainParser)
    assert whole(choices, text)["message"] == {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "reasoning": None,
        "reasoning_content": None,
    }
    deltas = [chunk["delta"] for chunk in streamed(choices, [text])]
    assert deltas == [
        {"role": "assistant", "content": "", "reasoning_content": None},
        {"content": text or None, "reasoning_content": None},
    ]


@given(pieces=st.lists(TEXTS, max_size=6))
def test_the_cut_of_a_text_does_not_matter(pieces: list[str]) -> None:
    for make in (PlainParser, ByCase):
        parser = make()
        cut = [delta for piece in pieces for delta in parser.feed(piece)] + [*parser.end()]
        one = parse_answer(make(), "".join(pieces))
        assert join_deltas(cut) == join_deltas(one)


def test_deltas_are_told_apart_after_encoding() -> None:
    deltas: list[Delta] = [TextDelta("a"), ReasoningDelta("b"), ToolCallDelta(0, "id", "f", "{")]
    data = msgspec.json.encode(deltas)
    assert [each["type"] for each in json.loads(data)] == ["text", "reasoning", "tool_call"]
    assert msgspec.json.decode(data, type=list[Delta]) == deltas
