"""The common part of the parsers of tool calls: text passes until a marker opens a call; then
states of the format read it. Whitespace around calls is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from setpoint.frontend.chat.deltas import Delta, TextDelta, ToolCallDelta
from setpoint.frontend.chat.formats.json_call import JsonCall, Outcome
from setpoint.frontend.chat.formats.json_scan import Scan
from setpoint.frontend.chat.formats.scanning import Markers, Trimmed, is_cut
from setpoint.frontend.chat.formats.tool_format import new_call_id

State = Callable[[], bool]
"""One step of reading: whether it got any further. It takes text from ``_text`` at ``_at``, as much
as it can tell the meaning of, so that what is left stays short."""


class CallMachine:
    """A DeltaParser. A subclass says in ``_opened`` which state reads on after a marker."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._text = ""
        self._at = 0
        self._offset = 0
        """The index in the answer of the first character of ``_text``."""
        self._ended = False
        self._deltas: list[Delta] = []
        self._num_calls = 0
        self._outside_text = Trimmed(at_start=False)
        self._state: State = self._outside

    def feed(self, text: str) -> Sequence[Delta]:
        if not text:
            return ()
        if (
            not self._text
            and self._outside_text.is_passing(text)
            and self._state == self._outside
            and not self._markers.may_begin_in(text)
        ):
            return (TextDelta(text),)
        self._text += text
        return self._run()

    def end(self) -> Sequence[Delta]:
        self._ended = True
        deltas = self._run()
        left = self._outside_text.last()
        return [*deltas, TextDelta(left)] if left else deltas

    def _run(self) -> Sequence[Delta]:
        while self._state():
            pass
        if self._at:
            self._text = self._text[self._at :]
            self._offset += self._at
            self._at = 0
        deltas, self._deltas = self._deltas, []
        return deltas

    def _opened(self, marker: str) -> None:
        """A marker of ``_markers`` has been passed: set the state that reads on."""
        raise NotImplementedError

    def _outside(self) -> bool:
        found = self._markers.find(self._text, self._at)
        if found is not None:
            self._say(self._text[self._at : found.start()])
            self._at = found.end()
            self._opened(found.group())
            return True
        until = len(self._text) if self._ended else self._markers.cut(self._text, self._at)
        self._say(self._text[self._at : until])
        self._at = until
        return False

    def _say(self, text: str) -> None:
        """Text for the user."""
        passed = self._outside_text.feed(text)
        if passed:
            self._deltas.append(TextDelta(passed))

    def _begin_call(self, name: str, call_id: str = "") -> None:
        self._deltas.append(
            ToolCallDelta(index=self._num_calls, id=call_id or self._new_id(), name=name)
        )
        self._num_calls += 1
        self._outside_text.interrupt()

    def _new_id(self) -> str:
        return new_call_id()

    def _argue(self, arguments: str) -> None:
        """More of the arguments of the call that began last."""
        if arguments:
            self._deltas.append(ToolCallDelta(index=self._num_calls - 1, arguments=arguments))

    def _cut_call(self) -> None:
        """The arguments of the call that began last are not complete: the answer or a marker has
        ended them."""
        self._deltas.append(ToolCallDelta(index=self._num_calls - 1, is_cut=True))

    def _read_arguments(self, scan: Scan, then: State) -> None:
        """Read the arguments of the call that began last, and go on with ``then``."""
        self._scan = scan
        self._then = then
        self._state = self._arguments

    def _arguments(self) -> bool:
        arguments, self._at = self._scan.feed(self._text, self._at)
        if self._ended and not self._scan.is_done:
            arguments += self._scan.end()
        self._argue(arguments)
        if self._scan.is_done:
            if self._scan.is_broken:
                self._cut_call()
            self._put_back(self._scan.taken_back)
            self._state = self._then
        elif self._ended:
            self._at = len(self._text)  # half an escape, which nobody could read
            self._cut_call()
            self._state = self._then
        return self._scan.is_done or self._ended

    def _read_json(self, call: JsonCall) -> Outcome | None:
        """Read on in a call that is JSON. None: its end has not come yet. A call that has begun is
        told, and cut if it is not whole."""
        outcome, self._at = call.feed(self._text, self._at)
        if outcome == "more" and not self._ended:
            return None
        if outcome == "more":
            outcome = call.end()
        if outcome == "more" and call.has_begun:
            self._at = len(self._text)  # half an escape, which nobody could read
        self._put_back(call.taken_back)
        if call.has_begun and not call.is_whole:
            self._cut_call()
        return outcome

    def _put_back(self, text: str) -> None:
        """Text that has been read is still to be read."""
        if text:
            self._text = text + self._text[self._at :]
            self._offset += self._at - len(text)
            self._at = 0

    def _skip_space(self) -> bool:
        """Pass whitespace. Whether anything follows it."""
        text, at = self._text, self._at
        while at < len(text) and text[at].isspace():
            at += 1
        self._at = at
        return at < len(text)

    def _meets(self, marker: str) -> bool | None:
        """Pass the marker, if it is here; None if the text is too short to tell."""
        if self._text.startswith(marker, self._at):
            self._at += len(marker)
            return True
        return None if self._is_cut(marker) else False

    def _is_cut(self, marker: str) -> bool:
        """Whether the text that is still to come may complete the marker here."""
        return not self._ended and is_cut(self._text, self._at, marker)

    def _closes(self, marker: str) -> bool | None:
        """Like ``_meets``, for a marker that ends something: the end of the answer may cut it
        off."""
        if self._ended and is_cut(self._text, self._at, marker):
            self._at = len(self._text)
            return True
        return self._meets(marker)
