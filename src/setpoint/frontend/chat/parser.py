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
    """Makes parsers like ``make``'s that give the reasoning in one piece, when it has ended."""
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
    """Makes parsers like ``make``'s that leave the reasoning out."""
    return lambda: _WithoutReasoning(make())


def parsed(parser: DeltaParser, text: str) -> list[Delta]:
    """The deltas of a whole answer."""
    return [*parser.feed(text), *parser.end()]
