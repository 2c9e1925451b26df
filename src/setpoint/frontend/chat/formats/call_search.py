"""Says whether the marker of a call, found in the reasoning, begins a call or is only mentioned."""

from __future__ import annotations

from collections.abc import Iterable

from setpoint.frontend.chat.deltas import Delta, TextDelta, ToolCallDelta
from setpoint.frontend.chat.formats.tool_format import ToolFormat
from setpoint.frontend.chat.parser import DeltaParser

MAX_UNCERTAIN_CHARS = 4096
"""Text of this length after a marker is a call, if its parser has not found otherwise by then."""

_FENCE = 3
"""This many back-ticks, or more, open a block of code."""
_QUOTES = frozenset("\"'“‘«")


class CallSearch:
    """Reads along with the reasoning. A marker is quoted if it directly follows a quotation mark,
    or stands in code between back-ticks. After any other marker the parser of calls decides."""

    def __init__(self, form: ToolFormat | None) -> None:
        """form: how the model writes calls; None if no marker is looked for."""
        self._form = form
        self._last = ""
        """The last character."""
        self._num_ticks = 0
        """How many back-ticks stand at the end of the text so far."""
        self._opened_by = 0
        """How many back-ticks have opened the code before those; 0: the text there is no code. One
        or two open code in their line, more open a block of lines."""
        self._parser: DeltaParser
        self._num_fed = 0

    def passed(self, text: str) -> None:
        """Add text of the reasoning."""
        if self._form is None or not text:
            return
        if self._num_ticks or "`" in text:
            for char in text:
                self._pass(char)
        elif "\n" in text:
            self._end_line()
        self._last = text[-1]

    def _pass(self, char: str) -> None:
        if char == "`":
            self._num_ticks += 1
            return
        self._opened_by, self._num_ticks = self._open, 0
        if char == "\n":
            self._end_line()

    def _end_line(self) -> None:
        if self._opened_by < _FENCE:
            self._opened_by = 0

    @property
    def _open(self) -> int:
        """The same as ``_opened_by``, after the back-ticks at the end."""
        opened_by, num_ticks = self._opened_by, self._num_ticks
        if not opened_by:
            return num_ticks
        closes = num_ticks >= opened_by if opened_by >= _FENCE else num_ticks == opened_by
        return 0 if closes else opened_by

    @property
    def is_quoted(self) -> bool:
        """Whether a marker that follows now would be quoted."""
        return self._last in _QUOTES or self._open > 0

    def begin(self) -> None:
        """A marker follows that is not quoted."""
        assert self._form is not None, "a marker that was not looked for"
        self._parser = self._form.parser(())
        self._num_fed = 0

    def feed(self, text: str, *, ended: bool) -> bool | None:
        """Whether a call begins with the marker; None if the text is too short to tell. text: more
        of the text from the marker on. ended: no more of it can belong to a call, because the
        answer ends there, or the reasoning does with the marker that ``text`` ends with."""
        deltas = [*self._parser.feed(text), *(self._parser.end() if ended else ())]
        self._num_fed += len(text)
        found = _first_kind(deltas)
        if found is None and ended:
            return False
        if found is None and self._num_fed >= MAX_UNCERTAIN_CHARS:
            return True
        return found


def _first_kind(deltas: Iterable[Delta]) -> bool | None:
    """Whether the first delta of a text is a call's; None if there is none."""
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            return True
        if isinstance(delta, TextDelta):
            return False
    return None
