"""The calls of Gemma 4, whose objects have bare keys, and strings between marks:

    <|tool_call>call:weather{place:<|"|>Bern<|"|>,days:3}<tool_call|>

and those of FunctionGemma, which are the same with other marks:

    <start_function_call>call:weather{place:<escape>Bern<escape>,days:3}<end_function_call>

Gemma 3 has no format of its own: it answers as its prompt asks.
"""

from __future__ import annotations

import re
from typing import Literal

from setpoint.frontend.chat.formats.arguments_text import decoded_string
from setpoint.frontend.chat.formats.headed import HeadedCalls
from setpoint.frontend.chat.formats.json_scan import json_text
from setpoint.frontend.chat.formats.scanning import Markers, is_cut
from setpoint.frontend.chat.formats.xml_values import ANY, as_json

_HEADER = re.compile(r"\s*call:(?P<name>[^\s{}()\[\]<>\"'=,]+)\s*")
_ARGUMENT = re.compile(r"\s*[\w.\-]+\s*:")
_NEXT = re.compile(r"[,{\[]\s*(?:[\w.\-]+\s*:\s*)?\Z")
"""The end of a string whose last quote opens another string."""
_MAX_NEXT_CHARS = 80
_JSON_STRING_END = re.compile(r"""[^\\](?:\\\\)*+"\s*\Z""")
"""The end of a string of JSON, from its first quote on."""


class GemmaScan:
    """Reads one object, and writes it as JSON. A value that is neither marked as a string nor JSON
    becomes a string. A quote where none can be shows that one is missing before: then the rest is
    told, and the object does not end."""

    is_broken = False
    taken_back = ""

    def __init__(self, quote: str) -> None:
        """quote: the mark before and after a string."""
        self.is_done = False
        self._quote = quote
        self._quotes = Markers(quote)
        self._key_ends = Markers(quote, *":,}")
        self._value_ends = Markers(quote, *",}]")
        self._open: list[str] = []
        """The brackets that are open, each "{" or "["."""
        self._expected: Literal["key", "value", "string", "bare", "end", "lost"] = "value"
        """"string" and "bare": more of such a value. "end": the text after one. "lost": the text
        after a place where a quote is missing."""
        self._parts: list[str] = []
        """The present key, the present value without marks, or the text after a value, as far as it
        has come."""
        self._is_quoted = False
        """Whether the text in ``_parts`` ends in a string."""
        self._tail = ""
        """The end of the last value, if that is a string, or of the present one."""
        self._is_json_string = False
        """Whether the present bare value begins as a string of JSON."""
        self._comma = ""
        """The comma that is due before the next key or value."""
        self._told: list[str] = []

    def feed(self, text: str, at: int) -> tuple[str, int]:
        parts: list[str] = []
        read = {
            "key": self._key,
            "value": self._value,
            "string": self._string,
            "bare": self._bare,
            "end": self._end,
            "lost": self._lost,
        }
        while at < len(text) and not self.is_done:
            before = self._expected
            stop = read[before](text, at, parts)
            if stop == at and self._expected == before:
                break
            at = stop
        return "".join(parts), at

    @property
    def is_in_string(self) -> bool:
        return self._expected == "string"

    def told(self, *, ended: bool) -> str:
        is_open = self._expected in ("end", "lost") or (self._expected == "key" and not ended)
        told = [*self._told, *(["".join(self._parts)] if is_open else [])]
        return ", ".join(each.strip() for each in told if each.strip())

    def end(self) -> str:
        return ""

    def _until(self, ends: Markers, text: str, at: int) -> tuple[str, int]:
        """Read up to one of the ends outside of strings. Returns it, empty if it has not come, and
        the index behind."""
        while (found := ends.find(text, at)) is not None:
            sign = found.group()
            if sign == self._quote:
                self._is_quoted = not self._is_quoted
            elif not self._is_quoted:
                self._parts.append(text[at : found.start()])
                return sign, found.end()
            self._parts.append(text[at : found.end()])
            at = found.end()
        stop = ends.cut(text, at)
        self._parts.append(text[at:stop])
        return "", stop

    def _taken(self) -> str:
        taken = "".join(self._parts)
        self._parts.clear()
        return taken

    def _lose(self, text: str) -> None:
        """A quote is missing before this text."""
        self._parts = [text]
        self._expected = "lost"

    def _lost(self, text: str, at: int, parts: list[str]) -> int:
        self._parts.append(text[at:])
        return len(text)

    def _key(self, text: str, at: int, parts: list[str]) -> int:
        sign, stop = self._until(self._key_ends, text, at)
        if not sign:
            return stop
        raw = self._taken()
        key = raw.strip().strip('"')
        if key.startswith(self._quote) and key.endswith(self._quote):
            key = key[len(self._quote) : -len(self._quote)]
        if sign == ":" and key and self._quote not in key:
            parts.append(f"{self._comma}{json_text(key)}: ")
            self._comma = ""
            self._tail = ""
            self._expected = "value"
        elif sign == ":":
            self._parts = [raw + sign]
            self._expected = "end"
        else:
            self._told.append(raw)
            if sign == "}":
                return self._close(stop, parts)
        return stop

    def _value(self, text: str, at: int, parts: list[str]) -> int:
        sign = text[at]
        if sign.isspace():
            return at + 1
        if sign in "{[":
            self._open.append(sign)
            parts.append(self._comma + sign)
            self._comma = ""
            self._expected = "key" if sign == "{" else "value"
            return at + 1
        if sign == "]" and self._open[-1] == "[":
            return self._close(at + 1, parts)
        if text.startswith(self._quote, at):
            parts.append(f'{self._comma}"')
            self._tail = ""
            self._comma = ""
            self._expected = "string"
            return at + len(self._quote)
        if is_cut(text, at, self._quote):
            return at
        self._expected = "bare"
        self._is_json_string = sign == '"'
        self._tail = ""
        return self._bare(text, at, parts)

    def _string(self, text: str, at: int, parts: list[str]) -> int:
        found = self._quotes.find(text, at)
        stop = self._quotes.cut(text, at) if found is None else found.start()
        self._tail = (self._tail + text[at:stop])[-_MAX_NEXT_CHARS:]
        parts.append(json_text(text[at:stop])[1:-1])
        if found is None:
            return stop
        parts.append('"')
        self._expected = "end"
        return found.end()

    def _bare(self, text: str, at: int, parts: list[str]) -> int:
        found = self._value_ends.find(text, at)
        stop = self._value_ends.cut(text, at) if found is None else found.start()
        self._parts.append(text[at:stop])
        self._tail = (self._tail + text[at:stop])[-_MAX_NEXT_CHARS:]
        if found is None:
            return stop
        if found.group() == self._quote:
            self._lose(self._taken() + self._quote)
            return found.end()
        if self._is_json_string and not _JSON_STRING_END.search(self._tail):
            self._parts.append(found.group())
            self._tail += found.group()
            return found.end()
        value = self._taken().strip()
        decoded = decoded_string(value)
        written = as_json(value, ANY) if decoded is None else json_text(decoded)
        parts.append(self._comma + written)
        self._comma = ""
        self._tail = ""
        self._expected = "end"
        return stop

    def _end(self, text: str, at: int, parts: list[str]) -> int:
        sign, stop = self._until(self._value_ends, text, at)
        if not sign:
            return stop
        behind = self._taken()
        if self._is_lost(behind):
            self._lose(behind + sign)
            return stop
        self._told.append(behind)
        if sign in "}]":
            return self._close(stop, parts)
        self._comma = ", "
        self._expected = "key" if self._open[-1] == "{" else "value"
        return stop

    def _is_lost(self, behind: str) -> bool:
        """Whether the text behind a value shows that a quote is missing. It does not if only the
        comma before the next argument is."""
        if not behind.strip():
            return False
        if _NEXT.search(self._tail):
            return True
        return not _ARGUMENT.match(behind) and bool(self._tail or self._quote in behind)

    def _close(self, at: int, parts: list[str]) -> int:
        parts.append("}" if self._open.pop() == "{" else "]")
        self._comma = ""
        self._expected = "end"
        self.is_done = not self._open
        return at


GEMMA4 = HeadedCalls(
    name="gemma4",
    begin="<|tool_call>",
    header=_HEADER,
    scan=lambda: GemmaScan('<|"|>'),
    quote='<|"|>',
    end="<tool_call|>",
)
FUNCTION_GEMMA = HeadedCalls(
    name="functiongemma",
    begin="<start_function_call>",
    header=_HEADER,
    scan=lambda: GemmaScan("<escape>"),
    quote="<escape>",
    end="<end_function_call>",
)
