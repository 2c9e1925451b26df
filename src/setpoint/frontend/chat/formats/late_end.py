"""The marker that ends reasoning, behind a call that has ended it already."""

from __future__ import annotations

from collections.abc import Sequence

from setpoint.frontend.chat.deltas import Delta, TextDelta
from setpoint.frontend.chat.formats.scanning import Markers
from setpoint.frontend.chat.parser import DeltaParser


class LateEnd:
    """Implements DeltaParser: the deltas of another, without the first such marker in the text, and
    without the whitespace behind it. In the arguments of a call it stays."""

    def __init__(self, parser: DeltaParser, marker: str) -> None:
        self._parser = parser
        self._markers = Markers(marker)
        self._held = ""
        """The end of the text so far, which may be the beginning of the marker."""
        self._has_come = False
        self._skips = False
        """Whether whitespace is dropped."""

    def feed(self, text: str) -> Sequence[Delta]:
        return self._without(self._parser.feed(text))

    def end(self) -> Sequence[Delta]:
        return [*self._without(self._parser.end()), *self._taken()]

    def _without(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        if self._has_come and not self._skips:
            return deltas
        left: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, TextDelta):
                left += [*self._taken(), delta]
                continue
            text = self._text(delta.text)
            if text:
                left.append(TextDelta(text))
        return left

    def _text(self, text: str) -> str:
        if self._has_come:
            text = text.lstrip() if self._skips else text
            self._skips = self._skips and not text
            return text
        text = self._held + text
        found = self._markers.find(text, 0)
        if found is None:
            stop = self._markers.cut(text, 0)
            self._held = text[stop:]
            return text[:stop]
        self._held = ""
        self._has_come = self._skips = True
        return text[: found.start()] + self._text(text[found.end() :])

    def _taken(self) -> list[Delta]:
        held, self._held = self._held, ""
        return [TextDelta(held)] if held else []
