"""The answers of gpt-oss, which consist of messages in channels: reasoning, calls, and text.

    <|channel|>analysis<|message|>They ask for the weather.<|end|><|start|>assistant<|channel|>
    commentary to=functions.weather <|constrain|>json<|message|>{"place": "Bern"}<|call|>

(on one line). The last message of an answer is ``<|channel|>final<|message|>It rains.<|return|>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from setpoint.frontend.chat.formats.arguments_text import OtherArguments
from setpoint.frontend.chat.formats.json_scan import JsonScan
from setpoint.frontend.chat.formats.scanning import Markers, Trimmed
from setpoint.frontend.chat.formats.tool_format import ToolFormat, new_call_id
from setpoint.frontend.chat.parser import DeltaParser

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_FINAL = f"{_CHANNEL}final{_MESSAGE}"
_MARKERS = Markers(_START, _CHANNEL, "<|end|>", "<|call|>", "<|return|>")
_TOKENS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_HEADER_ENDS = Markers(_MESSAGE, _START, "<|end|>", "<|call|>", "<|return|>")
"""What ends a header, and what shows that there is none."""
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")
_RECIPIENT = re.compile(r"\bto=(?P<name>[^\s<]+)")
_MAX_HEADER_CHARS = 1024

Part = tuple[Literal["header", "body", "end"], str]
"""A message's header with its markers, more of its body, or the marker that ends it. Text outside
of messages is a body, too."""


class _Messages:
    """Divides an answer into the parts of its messages."""

    def __init__(self) -> None:
        self._text = ""
        self._in_header = False

    def is_body(self, text: str) -> bool:
        """Whether the next text is certain to be more of a body; then it need not be fed."""
        return not self._text and not self._in_header and not _MARKERS.may_begin_in(text)

    def feed(self, text: str, *, ended: bool = False) -> Iterator[Part]:
        self._text += text
        at, before = 0, -1
        while at != before:
            before = at
            part, at = self._header(at, ended) if self._in_header else self._body(at, ended)
            if part[1]:
                yield part
        self._text = self._text[at:]

    def _header(self, at: int, ended: bool) -> tuple[Part, int]:
        text = self._text
        end = _HEADER_ENDS.find(text, at + 1, at + _MAX_HEADER_CHARS)
        if end is not None and end.group() == _MESSAGE:
            self._in_header = False
            return ("header", text[at : end.end()]), end.end()
        if end is None and len(text) - at < _MAX_HEADER_CHARS and not ended:
            return ("header", ""), at
        self._in_header = False  # what follows the marker is no header
        found = _MARKERS.find(text, at)
        stop = at if found is None else found.end()
        return ("body", text[at:stop]), stop

    def _body(self, at: int, ended: bool) -> tuple[Part, int]:
        text = self._text
        found = _MARKERS.find(text, at)
        if found is None:
            stop = len(text) if ended else _MARKERS.cut(text, at)
            return ("body", text[at:stop]), stop
        if found.start() > at:
            return ("body", text[at : found.start()]), found.start()
        if found.group() in (_START, _CHANNEL):
            self._in_header = True
            return self._header(at, ended)
        return ("end", found.group()), found.end()


def _called(header: str) -> str:
    """The function that a message calls; empty if it calls none."""
    found = _RECIPIENT.search(header)
    name = "" if found is None else found["name"]
    return name.removeprefix("functions.") if name.startswith("functions.") else ""


class HarmonyCalls:
    """Implements ToolFormat."""

    name = "gpt-oss"
    needs_special_tokens = True
    markers = _TOKENS
    openings = ()
    """None: the header of a message says whether it is a call or reasoning."""

    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        return _CallParser()

    def structure(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool
    ) -> dict[str, Any] | None:
        # Headers consist of special tokens, which the text of a structural tag does not produce.
        return None


class _CallParser:
    """Messages to functions become calls; the bodies of all others are text."""

    def __init__(self) -> None:
        self._messages = _Messages()
        self._is_call = False
        """Whether the present message is a call."""
        self._scan: JsonScan | OtherArguments | None = None
        """Reads its arguments, once they have begun."""
        self._rest = ""
        """Half an escape at the end of the arguments, or behind them what may be half a marker."""
        self._behind = Trimmed(at_start=True)
        """Text behind the arguments."""
        self._num_calls = 0

    def feed(self, text: str) -> Sequence[Delta]:
        if text and self._messages.is_body(text):
            return self._deltas("body", text)
        return [delta for part in self._messages.feed(text) for delta in self._deltas(*part)]

    def end(self) -> Sequence[Delta]:
        parts = self._messages.feed("", ended=True)
        deltas = [delta for part in parts for delta in self._deltas(*part)]
        return [*deltas, *self._close(ended=True)]

    def _deltas(self, kind: str, text: str) -> Sequence[Delta]:
        if kind == "header":
            return [*self._close(), *self._begin(_called(text))]
        if kind == "end":
            return self._close()
        return self._argue(text) if self._is_call else (TextDelta(text),)

    def _begin(self, name: str) -> Sequence[Delta]:
        """A message begins that calls a function; an empty name: one that is text."""
        self._is_call = bool(name)
        if not name:
            return ()
        self._scan, self._rest = None, ""
        self._behind = Trimmed(at_start=True)
        self._num_calls += 1
        return (ToolCallDelta(index=self._num_calls - 1, id=new_call_id(), name=name),)

    def _argue(self, text: str) -> Sequence[Delta]:
        text = self._rest + text
        if self._scan is None:
            text = text.lstrip()
            if not text:
                return ()
            self._scan = JsonScan() if text[0] == "{" else OtherArguments(Markers())
        arguments, at = ("", 0) if self._scan.is_done else self._scan.feed(text, 0)
        stop = _MARKERS.cut(text, at) if self._scan.is_done else at
        self._rest = text[stop:]
        behind = self._behind.feed(text[at:stop])
        return [*self._more(arguments), *([TextDelta(behind)] if behind else ())]

    def _more(self, arguments: str) -> list[Delta]:
        index = self._num_calls - 1
        return [ToolCallDelta(index=index, arguments=arguments)] if arguments else []

    def _close(self, *, ended: bool = False) -> Sequence[Delta]:
        """The present message ends. ended: because the answer does."""
        if not self._is_call:
            return ()
        self._is_call = False
        if self._scan is None and not ended:
            return self._more("{}")
        last: list[Delta] = []
        if self._scan is not None and not self._scan.is_done:
            last = self._more(self._scan.end())
        if self._scan is None or not self._scan.is_done or self._scan.is_broken:
            last.append(ToolCallDelta(index=self._num_calls - 1, is_cut=True))
        return last


class HarmonyReasoning:
    """Implements ReasoningFormat: the analysis channel is reasoning."""

    name = "gpt-oss"
    needs_special_tokens = True
    begin = f"{_CHANNEL}analysis{_MESSAGE}"
    end = _FINAL
    markers = _TOKENS
    always_ends = True

    def starts_inside(self, prompt: str = "", *, started: str = "") -> bool:
        return (started or prompt).endswith(self.begin)

    def parser(
        self,
        after: DeltaParser,
        *,
        starts_inside: bool,
        separate: bool = True,
        calls: ToolFormat | None = None,
    ) -> DeltaParser:
        return _ReasoningParser(after, starts_inside=starts_inside, separate=separate)


class _ReasoningParser:
    """Gives ``after`` calls as they are written, and of other messages the bodies."""

    def __init__(self, after: DeltaParser, *, starts_inside: bool, separate: bool) -> None:
        self._messages = _Messages()
        self._after = after
        self._separate = separate
        self._kind: Literal["reasoning", "call", "text"] = "reasoning" if starts_inside else "text"
        """What the present message holds."""

    def feed(self, text: str) -> Sequence[Delta]:
        if text and self._messages.is_body(text):
            return self._deltas("body", text)
        return [delta for part in self._messages.feed(text) for delta in self._deltas(*part)]

    def end(self) -> Sequence[Delta]:
        parts = self._messages.feed("", ended=True)
        return [*(delta for part in parts for delta in self._deltas(*part)), *self._after.end()]

    def _deltas(self, kind: str, text: str) -> Sequence[Delta]:
        if kind == "header":
            is_other = _RECIPIENT.search(text) is not None or _ANALYSIS.search(text) is not None
            self._kind = "call" if _called(text) else "reasoning" if is_other else "text"
        deltas: Sequence[Delta] = ()
        if self._kind == "call" or (self._kind == "text" and kind == "body"):
            deltas = self._after.feed(text)
        elif self._kind == "reasoning" and not self._separate:
            deltas = (TextDelta(text),)
        elif self._kind == "reasoning" and kind == "body":
            deltas = (ReasoningDelta(text),)
        if kind == "end":
            self._kind = "text"
        return deltas


GPT_OSS_CALLS = HarmonyCalls()
GPT_OSS_REASONING = HarmonyReasoning()
