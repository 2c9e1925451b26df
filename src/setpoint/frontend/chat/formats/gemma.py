"""The calls of Gemma 4, whose objects have bare keys, and strings between marks:

    <|tool_call>call:weather{place:<|"|>Bern<|"|>,days:3}<tool_call|>

and those of FunctionGemma, which are the same with other marks:

    <start_function_call>call:weather{place:<escape>Bern<escape>,days:3}<end_function_call>

Gemma 3 has no format of its own: it answers as its prompt asks.
"""

from __future__ import annotations

import re
from typing import Literal

from setpoint.frontend.chat.formats.headed import HeadedCalls
from setpoint.frontend.chat.formats.json_scan import json_text
from setpoint.frontend.chat.formats.scanning import Markers, is_cut
from setpoint.frontend.chat.formats.xml_values import ANY, as_json

_HEADER = re.compile(r"\s*call:(?P<name>[^\s{]+)\s*")
_KEY_END = re.compile(r"[:}]")
_BARE_END = re.compile(r"[,}\]]")


class GemmaScan:
    """Reads one object, and writes it as JSON. A value that is neither marked as a string nor JSON
    becomes a string."""

    is_broken = False
    taken_back = ""

    def __init__(self, quote: str) -> None:
        """quote: the mark before and after a string."""
        self.is_done = False
        self._quote = quote
        self._quotes = Markers(quote)
        self._open: list[str] = []
        """The brackets that are open, each "{" or "["."""
        self._expected: Literal["key", "value", "string", "bare", "end"] = "value"
        """"string" and "bare": more of such a value. "end": the text after one."""
        self._parts: list[str] = []
        """The present key, or the present value without marks, as far as it has come."""
        self._comma = ""
        """The comma that is due before the next key or value."""
        self.told: list[str] = []
        """Text between the brackets that is no key and no value."""

    def feed(self, text: str, at: int) -> tuple[str, int]:
        parts: list[str] = []
        read = {
            "key": self._key,
            "value": self._value,
            "string": self._string,
            "bare": self._bare,
            "end": self._end,
        }
        while at < len(text) and not self.is_done:
            stop = read[self._expected](text, at, parts)
            if stop == at:
                break
            at = stop
        return "".join(parts), at

    @property
    def is_in_string(self) -> bool:
        return self._expected == "string"

    def end(self) -> str:
        return ""

    def _key(self, text: str, at: int, parts: list[str]) -> int:
        found = _KEY_END.search(text, at)
        self._parts.append(text[at : len(text) if found is None else found.start()])
        if found is None:
            return len(text)
        raw = "".join(self._parts)
        self._parts.clear()
        if found.group() == "}":
            self.told.append(raw)
            return self._close(found.end(), parts)
        key = raw.replace(self._quote, "").strip().strip('"')
        parts.append(f"{self._comma}{json_text(key)}: ")
        self._comma = ""
        self._expected = "value"
        return found.end()

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
            self._comma = ""
            self._expected = "string"
            return at + len(self._quote)
        if is_cut(text, at, self._quote):
            return at
        self._expected = "bare"
        return self._bare(text, at, parts)

    def _string(self, text: str, at: int, parts: list[str]) -> int:
        found = self._quotes.find(text, at)
        stop = self._quotes.cut(text, at) if found is None else found.start()
        parts.append(json_text(text[at:stop])[1:-1])
        if found is None:
            return stop
        parts.append('"')
        self._expected = "end"
        return found.end()

    def _bare(self, text: str, at: int, parts: list[str]) -> int:
        found = _BARE_END.search(text, at)
        stop = len(text) if found is None else found.start()
        self._parts.append(text[at:stop])
        if found is not None:
            parts.append(self._comma + as_json("".join(self._parts).strip(), ANY))
            self._comma = ""
            self._parts.clear()
            self._expected = "end"
        return self._end(text, stop, parts) if found is not None else stop

    def _end(self, text: str, at: int, parts: list[str]) -> int:
        sign = text[at]
        if sign in "}]":
            return self._close(at + 1, parts)
        if sign == ",":
            self._comma = ", "
            self._expected = "key" if self._open[-1] == "{" else "value"
        else:
            self.told.append(sign)
        return at + 1

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
