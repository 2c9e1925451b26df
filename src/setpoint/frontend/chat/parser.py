"""The interface that turns the text that a model generates into the deltas of a chat's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from setpoint.frontend.chat.deltas import Delta, ReasoningDelta, TextDelta


class DeltaParser(Protocol):
    """Parses one sequence. It may hold text back until its kind is certain.

    ``feed`` is given every piece of the sequence's text in order, and ``end`` is called once, after
    the last. The resulting text, reasoning and calls do not depend on how the text is cut into
    pieces.
    """

    def feed(self, text: str) -> Sequence[Delta]: ...

    def end(self) -> Sequence[Delta]:
        """The deltas of the text that was held back."""
        ...


MakeParser = Callable[[], DeltaParser]
"""Makes a parser for one more sequence."""


class PlainParser:
    """Implements DeltaParser for models all of whose text is for the user."""

    def feed(self, text: str) -> Sequence[Delta]:
        return (TextDelta(text),) if text else ()

    def end(self) -> Sequence[Delta]:
        return ()


class _JoiningReasoning:
    """Implements DeltaParser: the deltas of another, with the reasoning in one piece."""

    def __init__(self, parser: DeltaParser) -> None:
        self._parser = parser
        self._reasoning: list[str] = []

    def feed(self, text: str) -> Sequence[Delta]:
        return self._joined(self._parser.feed(text))

    def end(self) -> Sequence[Delta]:
        deltas = self._joined(self._parser.end())
        return [*deltas, *self._held()]

    def _joined(self, deltas: Sequence[Delta]) -> list[Delta]:
        joined: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
            else:
                joined += [*self._held(), delta]
        return joined

    def _held(self) -> list[Delta]:
        held = "".join(self._reasoning)
        self._reasoning.clear()
        return [ReasoningDelta(held)] if held else []


def joining_reasoning(make: MakeParser) -> MakeParser:
    """Returns a maker of parsers like ``make``'s that return the reasoning in one piece, after it
    has ended."""
    return lambda: _JoiningReasoning(make())


class _WithoutReasoning:
    """Implements DeltaParser: the deltas of another, less the reasoning."""

    def __init__(self, parser: DeltaParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> Sequence[Delta]:
        return _less_reasoning(self._parser.feed(text))

    def end(self) -> Sequence[Delta]:
        return _less_reasoning(self._parser.end())


def _less_reasoning(deltas: Sequence[Delta]) -> list[Delta]:
    return [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]


def without_reasoning(make: MakeParser) -> MakeParser:
    """Returns a maker of parsers like ``make``'s that leave the reasoning out."""
    return lambda: _WithoutReasoning(make())


class _WithoutCutCall:
    """Implements DeltaParser: the deltas of another parser, for an answer whose calls a constraint
    enforces. If the answer ends where the constraint allows only a call, the text that remains is
    the beginning of a call that was cut off, and is dropped."""

    def __init__(self, parser: DeltaParser, begins: Sequence[str], ends: Sequence[str]) -> None:
        self._parser = parser
        self._begins = begins
        self._ends = ends
        self._longest = max(map(len, (*begins, *ends)), default=0)
        self._tail = ""
        """The end of the text so far, which may contain the beginning of a marker."""
        self._is_open = "" in begins
        """Whether nothing but a call may follow."""

    def feed(self, text: str) -> Sequence[Delta]:
        self._watch(text)
        return self._parser.feed(text)

    def end(self) -> Sequence[Delta]:
        deltas = self._parser.end()
        return [each for each in deltas if not (self._is_open and isinstance(each, TextDelta))]

    def _watch(self, text: str) -> None:
        if "" in self._begins:
            return
        num_seen, text = len(self._tail), self._tail + text
        begun, ended = (
            max(_end_of_last(text, each, num_seen) for each in (*markers, ""))
            for markers in (self._begins, self._ends)
        )
        if max(begun, ended) > num_seen:
            self._is_open = begun >= ended  # the end may be a part of the beginning, as "]" is
        self._tail = text[max(len(text) - self._longest + 1, 0) :]


def _end_of_last(text: str, marker: str, num_seen: int) -> int:
    """The end of the last marker that ends after the first ``num_seen`` characters; 0 if none
    does."""
    at = text.rfind(marker, max(num_seen - len(marker) + 1, 0)) if marker else -1
    return at + len(marker) if at >= 0 else 0


def without_cut_call(
    parser: DeltaParser, begins: Sequence[str], ends: Sequence[str]
) -> DeltaParser:
    """A parser that drops the beginning of a call that the end of the answer cuts off. Only calls
    may stand between one of ``begins`` and one of ``ends``; if "" is among ``begins``, the whole
    answer consists of calls."""
    return _WithoutCutCall(parser, begins, [each for each in ends if each])


def parse_answer(parser: DeltaParser, text: str) -> list[Delta]:
    """The deltas of a whole answer."""
    return [*parser.feed(text), *parser.end()]
