"""The seam between the text that a model generates and the deltas of a chat's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from setpoint.frontend.chat.deltas import Delta, TextDelta


class DeltaParser(Protocol):
    """Of one sequence: it may hold text back until it is certain what that is.

    ``feed`` is given every piece of the sequence's text in order, and ``end`` is called once, after
    the last. However a text is cut, it becomes the same text, reasoning and calls.
    """

    def feed(self, text: str) -> Sequence[Delta]: ...

    def end(self) -> Sequence[Delta]:
        """What was held back."""
        ...


MakeParser = Callable[[], DeltaParser]
"""Of a parser for one more sequence."""


class PlainParser:
    """Implements DeltaParser for models whose every word is for the user."""

    def feed(self, text: str) -> Sequence[Delta]:
        return (TextDelta(text),) if text else ()

    def end(self) -> Sequence[Delta]:
        return ()


def parsed(parser: DeltaParser, text: str) -> list[Delta]:
    """The deltas of a whole answer."""
    return [*parser.feed(text), *parser.end()]
