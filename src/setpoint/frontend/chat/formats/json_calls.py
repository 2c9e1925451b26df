"""Calls as JSON objects that have the function's name and the arguments, alone or in a list. The
formats differ in the text around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.arguments_text import OtherArguments
from setpoint.frontend.chat.formats.guarded_scan import GuardedScan
from setpoint.frontend.chat.formats.headed import read_header
from setpoint.frontend.chat.formats.json_call import JsonCall
from setpoint.frontend.chat.formats.json_scan import json_text
from setpoint.frontend.chat.formats.machine import CallMachine
from setpoint.frontend.chat.formats.scanning import Markers
from setpoint.frontend.chat.formats.structure import calls, calls_in_section, held_arguments, tag
from setpoint.frontend.chat.formats.tool_format import plain
from setpoint.frontend.chat.parser import DeltaParser


class JsonWriting(NamedTuple):
    """How a model writes calls."""

    before: str = ""
    """The text before each object."""
    behind: str = ""
    between: str = ", "
    section: tuple[str, str] = ("", "")
    """The text around all objects together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Implements ToolFormat for one call, or a list of calls, after a marker."""

    name: str
    begin: str
    """The marker. Empty: there is none, and a call begins at the start of the answer."""
    end: str = ""
    """The marker after the call or list. Empty: there is none."""
    may_be_bare: bool = False
    """Whether a call at the start of the answer may lack the marker. Without a marker only the
    names of the request's tools make a call."""
    header: re.Pattern[str] | None = None
    """Matches what a model may also write after the marker: a header (``HeadedCalls``), which the
    arguments follow."""
    separators: str = ""
    """Characters of which one may come between calls that are in no list, or none. Empty: only
    one call can come there."""
    arguments: str = "arguments"
    """What the model calls them; either name is understood."""
    written: JsonWriting
    """How a model writes calls that a structural tag asks for."""
    needs_special_tokens: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, "" if self.header is None else plain(self.header))

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.begin,) if self.begin else ()

    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        return JsonMachine(self, tools)

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
        written = self.written
        before = "" if required and self.may_be_bare else written.before
        tags = [
            tag(
                f'{before}{{"name": {json_text(tool.name)}, "{self.arguments}": ',
                held_arguments(tool, required=required),
                "}" + written.behind,
            )
            for tool in tools
        ]
        if written.section[0]:
            return calls_in_section(
                tags,
                section=written.section,
                trigger=self.begin,
                separator=written.between,
                required=required,
                parallel=parallel,
            )
        return calls(
            tags,
            trigger=self.begin,
            separator=written.between,
            required=required,
            parallel=parallel,
        )


class JsonMachine(CallMachine):
    def __init__(self, form: JsonCalls, tools: Sequence[Tool]) -> None:
        self._begins = Markers(*filter(None, (form.begin,)))
        super().__init__(self._begins)
        self._form = form
        self._ends = Markers(*filter(None, (form.begin, form.end)))
        self._names = frozenset(tool.name for tool in tools)
        self._lead: list[str] = []
        """What has been read before the present call; it is text if there is no call."""
        self._marked = False
        self._in_list = False
        if form.may_be_bare or not form.begin:
            self._state = self._first

    def _first(self) -> bool:
        """The start of an answer that may be a call without a marker."""
        if not self._skip_space_as_text():
            return False
        self._state = self._open if self._text[self._at] in "[{" else self._outside
        return True

    def _skip_space_as_text(self) -> bool:
        start = self._at
        follows = self._skip_space()
        self._say(self._text[start : self._at])
        return follows

    def _opened(self, marker: str) -> None:
        self._markers = self._begins
        if marker == self._form.end:  # of the call before
            self._outside_text.interrupt()
            return
        self._lead = [marker]
        self._marked = True
        self._state = self._open

    def _open(self) -> bool:
        """A list or a call is due."""
        start = self._at
        follows = self._skip_space()
        self._lead.append(self._text[start : self._at])
        if not follows:
            return self._give_up() if self._ended else False
        sign = self._text[self._at]
        if self._form.separators and self._num_calls:
            repeats = self._meets(self._form.begin)
            if repeats is None:
                return False
            if repeats:
                self._lead.append(self._form.begin)
                return True
        if sign not in "[{":
            self._state = self._header
            return True
        self._in_list = sign == "["
        if self._in_list:
            self._lead.append(sign)
            self._at += 1
        self._next_call()
        return True

    def _header(self) -> bool:
        """No JSON follows the marker: a name and the arguments, or nothing that is known."""
        if self._form.header is None:
            return self._give_up()
        found = read_header(
            self._form.header, self._text, self._at, end="", ended=self._ended, markers=self._ends
        )
        if found is None:
            return False
        if not found.name:
            return self._give_up()
        self._lead = []
        self._begin_call(found.name, found.call_id)
        self._at = found.stop
        scan = GuardedScan(self._ends) if found.is_object else OtherArguments(self._ends)
        self._read_arguments(scan, self._behind)
        return True

    def _give_up(self) -> bool:
        """What has been read is no call."""
        self._say("".join(self._lead))
        self._lead = []
        self._state = self._outside
        return True

    def _next_call(self) -> None:
        names = None if self._marked or self._num_calls else self._names
        self._call = JsonCall(self._begin_call, self._argue, names=names, markers=self._ends)
        self._state = self._inside

    def _inside(self) -> bool:
        outcome = self._read_json(self._call)
        if outcome is None:
            return False
        if not self._call.has_begun:
            self._lead.append(self._call.raw())
            return self._give_up()
        self._lead = []
        self._in_list = self._in_list and outcome == "done"
        self._state = self._behind
        return True

    def _behind(self) -> bool:
        """Another call, the end of the list, or the end marker is due; any of them may be
        missing."""
        if not self._skip_space():
            return False
        sign = self._text[self._at]
        if self._in_list and sign in ",]":
            self._at += 1
            if sign == ",":
                self._lead = [sign]
                self._next_call()
            self._in_list = sign == ","
            return True
        if self._form.separators and sign in "{" + self._form.separators:
            is_separator = sign != "{"
            self._lead = [sign] if is_separator else []
            self._at += is_separator
            self._state = self._open
            return True
        closes = self._closes(self._form.end) if self._form.end else True
        if closes is None:
            return False
        if not closes:
            self._markers = self._ends
        self._state = self._outside
        return True
