"""Calls as elements, with one element for each argument. Values are plain text, and become JSON of
the types in the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.json_scan import json_text
from setpoint.frontend.chat.formats.scanning import MAX_NAME_CHARS, Markers, is_cut
from setpoint.frontend.chat.formats.sections import SectionMachine, opening_markers
from setpoint.frontend.chat.formats.xml_structure import XmlWriting, xml_structure
from setpoint.frontend.chat.formats.xml_values import ANY, STRING, ArgumentTypes, as_json
from setpoint.frontend.chat.parser import DeltaParser

_KEY = re.compile(r'\s*+(?P<key>[^"<>\s]*+(?:\s++[^"<>\s]++)*+)\s*+')
"""Possessive, because there is only one way to match: text that is not a key is tried once."""

_NO_NAME = re.compile(r"[\s<>\"{}]")
_MAX_KEY_CHARS = MAX_NAME_CHARS + 32


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlCalls:
    """Implements ToolFormat."""

    name: str
    section: tuple[str, str] = ("", "")
    """The text around a call, or around all of them."""
    passed: tuple[str, ...] = ()
    """What else may come before and after a call."""
    bare: bool = False
    """Whether a call may lack the section around it."""
    begin: str
    """The text before the function's name."""
    name_end: str
    """The text after it. Empty: the name ends where an argument or ``end`` begins."""
    end: str
    key_begin: str
    """The text before the name of an argument."""
    key_end: str
    value_begin: str = ""
    """The text before the value, if that is not ``key_end``."""
    value_end: str
    key: re.Pattern[str] = _KEY
    """Matches all between ``key_begin`` and ``key_end``. Its group "key" is the argument's name;
    its group "string", if it has one, is "true" for a string and "false" for JSON."""
    framed: bool = False
    """Whether a line end comes before and after each value."""
    writing: XmlWriting
    """How a model writes calls that a structural tag asks for."""
    needs_special_tokens: bool = True

    @property
    def openings(self) -> tuple[str, ...]:
        return opening_markers(self.begin, self.section[0], bare=self.bare)

    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        return _Parser(self, tools)

    def structure(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool
    ) -> dict[str, Any] | None:
        return xml_structure(self.writing, tools, required=required, parallel=parallel)


class _Parser(SectionMachine):
    def __init__(self, form: XmlCalls, tools: Sequence[Tool]) -> None:
        super().__init__(form.begin, section=form.section, passed=form.passed, bare=form.bare)
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._name_ends = Markers(
            *([form.name_end] if form.name_end else [form.key_begin, form.end])
        )
        self._value_end = Markers(form.value_end)
        self._types_of = ArgumentTypes()

    def _header(self) -> bool:
        text, at = self._text, self._at
        limit = at + MAX_NAME_CHARS + self._name_ends.longest
        found = self._name_ends.find(text, at, limit)
        if found is None and len(text) < limit and not self._ended:
            return False
        if found is None or found.start() > at + MAX_NAME_CHARS:
            return self._give_up()
        name = text[at : found.start()].strip()
        if not name or _NO_NAME.search(name):
            return self._give_up()
        self._begin_call(name)
        self._tool = self._tools.get(name)
        self._num_arguments = 0
        self._at = found.end() if self._form.name_end else found.start()
        self._state = self._argument
        return True

    def _argument(self) -> bool:
        """An argument or the end of the call is due; anything else ends the call, too."""
        if not self._skip_space():
            return False
        if self._meets(self._form.key_begin):
            self._state = self._key
            return True
        if self._is_cut(self._form.key_begin) or self._closes(self._form.end) is None:
            return False
        if self._ended and is_cut(self._text, self._at, self._form.key_begin):
            self._at = len(self._text)  # in a call, nothing else begins like this
        self._argue("}" if self._num_arguments else "{}")
        self._state = self._between
        return True

    def _key(self) -> bool:
        text, at = self._text, self._at
        stop = text.find(self._form.key_end, at, at + _MAX_KEY_CHARS)
        if stop < 0 and len(text) - at < _MAX_KEY_CHARS and not self._ended:
            return False
        if stop < 0 and len(text) - at < _MAX_KEY_CHARS:
            return self._cut_off()
        found = self._form.key.fullmatch(text, at, stop) if stop >= 0 else None
        if found is None:
            return self._break_off(self._form.key_begin)
        named = found.groupdict()
        self._name = named["key"]
        self._types = (
            {"true": STRING, "false": ANY}[named["string"]]
            if named.get("string")
            else self._types_of.of(self._tool, self._name)
        )
        self._at = stop + len(self._form.key_end)
        self._state = self._value_begin if self._form.value_begin else self._value_start
        return True

    def _break_off(self, read: str) -> bool:
        """What has been read last is no argument: the call ends, and this is text."""
        self._argue("}" if self._num_arguments else "{}")
        self._say(read)
        self._state = self._outside
        return True

    def _cut_off(self) -> bool:
        """The answer has ended in the middle of an argument, which goes."""
        self._at = len(self._text)
        return self._break_off("")

    def _value_begin(self) -> bool:
        follows = self._skip_space()
        if self._ended and (not follows or is_cut(self._text, self._at, self._form.value_begin)):
            return self._cut_off()
        if not follows:
            return False
        met = self._meets(self._form.value_begin)
        if met is None:
            return False
        if not met:
            return self._break_off(f"{self._form.key_begin}{self._name}{self._form.key_end}")
        self._state = self._value_start
        return True

    def _value_start(self) -> bool:
        if self._at == len(self._text):
            return False
        if self._form.framed and self._text[self._at] == "\n":
            self._at += 1
        self._parts: list[str] = []
        self._state = self._value
        if self._types == STRING:
            self._argue(self._key_text() + '"')
            self._state = self._string
        return True

    def _key_text(self) -> str:
        self._num_arguments += 1
        return ("{" if self._num_arguments == 1 else ", ") + json_text(self._name) + ": "

    def _taken(self) -> tuple[str, bool]:
        """More of the value, and whether it has ended."""
        text, at = self._text, self._at
        found = self._value_end.find(text, at)
        stop = self._value_end.cut(text, at) if found is None else found.start()
        framed = self._form.framed and text.endswith("\n", at, stop)
        if found is None:
            self._at = stop - framed
            return text[at : self._at], False
        self._at = found.end()
        return text[at : stop - framed], True

    def _string(self) -> bool:
        part, is_whole = self._taken()
        self._argue(json_text(part)[1:-1] + ('"' if is_whole else ""))
        if is_whole:
            self._state = self._argument
        return is_whole

    def _value(self) -> bool:
        part, is_whole = self._taken()
        self._parts.append(part)
        if is_whole:
            self._argue(self._key_text() + as_json("".join(self._parts), self._types))
            self._state = self._argument
        return is_whole
