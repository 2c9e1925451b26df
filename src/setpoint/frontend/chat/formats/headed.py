"""Calls whose arguments are a JSON object after a header with the function's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.arguments_text import OtherArguments
from setpoint.frontend.chat.formats.guarded_scan import GuardedScan, TellingScan
from setpoint.frontend.chat.formats.json_scan import Scan
from setpoint.frontend.chat.formats.scanning import MAX_NAME_CHARS, Markers, is_cut
from setpoint.frontend.chat.formats.sections import SectionMachine, opening_markers
from setpoint.frontend.chat.formats.structure import Format, calls, calls_in_section, held_arguments
from setpoint.frontend.chat.formats.tool_format import plain
from setpoint.frontend.chat.parser import DeltaParser

_MAX_HEADER_CHARS = MAX_NAME_CHARS + 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedCalls:
    """Implements ToolFormat."""

    name: str
    section: tuple[str, str] = ("", "")
    """The text around all calls."""
    begin: str
    """The text before the header."""
    header: re.Pattern[str]
    """Matches all between ``begin`` and the arguments. Its group "name" is the function; its group
    "id", if it has one, the call; its group "due", if it has one, the text behind which nothing but
    arguments can come."""
    between: str = ""
    """What may come between the arguments and ``end``."""
    end: str = ""
    scan: Callable[[], TellingScan] | None = None
    """Reads arguments that are not JSON."""
    quote: str = '"'
    """What ends a string in them."""
    counts: bool = False
    """Whether a number may stand for the name; then the arguments show which function it is."""
    tag: Callable[[str, Format], Format] | None = None
    """The call of a function, given its name and the format of its arguments, as a structural tag
    describes it. None: it cannot."""
    separator: str = ""
    """What a model writes between two calls."""
    needs_special_tokens: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.section, self.begin, plain(self.header), self.between, self.end)

    @property
    def openings(self) -> tuple[str, ...]:
        return opening_markers(self.begin, self.section[0], bare=True)

    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        return _Parser(self, tools)

    def structure(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool
    ) -> dict[str, Any] | None:
        if self.tag is None:
            return None
        tags = [self.tag(tool.name, held_arguments(tool, required=required)) for tool in tools]
        if not self.section[0]:
            return calls(
                tags,
                trigger=self.begin,
                separator=self.separator,
                required=required,
                parallel=parallel,
            )
        return calls_in_section(
            tags,
            section=self.section,
            separator=self.separator,
            required=required,
            parallel=parallel,
        )


class CallHeader(NamedTuple):
    """The text before the arguments of a call."""

    name: str
    """Empty: the text is no header."""
    call_id: str = ""
    stop: int = 0
    """The index after the header."""
    is_empty: bool = False
    """Whether the call has no arguments: its end follows."""
    is_object: bool = True
    """Whether the arguments begin with a brace."""


def read_header(
    pattern: re.Pattern[str], text: str, at: int, *, end: str, ended: bool, markers: Markers
) -> CallHeader | None:
    """The header that begins at ``at``; None if the text is too short to tell. It ends where a
    brace or ``end`` follows, or behind the text that makes arguments due. markers: what ends
    arguments."""
    limit = at + _MAX_HEADER_CHARS
    due = pattern.match(text, at, limit)
    if due is not None and due.groupdict().get("due"):
        stop = due.end()
        marker = markers.find(text, stop, stop + markers.longest)
        if marker is None or marker.start() != stop:
            if markers.cut(text, stop) == stop:  # also where nothing follows yet
                if not ended:
                    return None
                if end or stop == len(text):
                    return CallHeader("")  # the answer has ended in a marker
            is_object = text[stop] == "{"
            return CallHeader(
                due["name"], due.groupdict().get("id") or "", stop, is_object=is_object
            )
    brace = text.find("{", at, limit)
    empty = text.find(end, at, brace if brace >= 0 else limit) if end else -1
    stop = empty if empty >= 0 else brace
    if stop < 0:
        return None if len(text) < limit and not ended else CallHeader("")
    found = pattern.fullmatch(text, at, stop)
    if found is None:
        return CallHeader("")
    named = found.groupdict()
    return CallHeader(named["name"], named.get("id") or "", stop, empty >= 0)


def _fits(arguments: str, tool: Tool) -> bool:
    """Whether a text is a JSON object with all arguments that a tool requires, and no others than
    it has."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any]).keys()
    except (ValueError, RecursionError):
        return False
    schema = tool.parameters or {}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return given <= properties.keys() and all(each in given for each in required)


class _Parser(SectionMachine):
    def __init__(self, form: HeadedCalls, tools: Sequence[Tool]) -> None:
        super().__init__(form.begin, section=form.section)
        self._form = form
        self._ends = Markers(*filter(None, (form.begin, form.end, *form.section)))
        closing = form.between + form.end
        self._behind_ends = Markers(*filter(None, (form.begin, form.end, closing, *form.section)))
        """What ends the text behind the arguments, and arguments that are no object."""
        self._tools = {tool.name: tool for tool in tools}
        self._telling: TellingScan | None = None
        """Has text in the present call that is no argument: it follows the call."""

    def _header(self) -> bool:
        found = read_header(
            self._form.header,
            self._text,
            self._at,
            end=self._form.end,
            ended=self._ended,
            markers=self._behind_ends,
        )
        if found is None:
            return False
        if not found.name:
            return self._give_up()
        at, self._at = self._at, found.stop
        if self._form.counts and found.name.isdigit() and found.name not in self._tools:
            self._lead.append(self._text[at : found.stop])
            self._unnamed = self._new_scan()
            self._parts: list[str] = []
            self._state = self._find_name
            return True
        self._begin_call(found.name, found.call_id if found.name != found.call_id else "")
        if found.is_empty:
            self._argue("{}")
            self._state = self._behind
        elif found.is_object:
            self._read_arguments(self._new_scan(), self._behind)
        else:
            self._read_arguments(OtherArguments(self._behind_ends), self._behind)
        return True

    def _new_scan(self) -> Scan:
        self._telling = scan = self._form.scan() if self._form.scan else None
        return GuardedScan(self._ends, scan, quote=self._form.quote)

    def _find_name(self) -> bool:
        """The arguments of a call without a name: it is the function that they fit, if there is
        only one."""
        start = self._at
        part, self._at = self._unnamed.feed(self._text, start)
        self._lead.append(self._text[start : self._at])
        self._parts.append(part)
        if not self._unnamed.is_done and not self._ended:
            return False
        arguments = "".join(self._parts)
        fitting = [tool.name for tool in self._tools.values() if _fits(arguments, tool)]
        if len(fitting) != 1:
            return self._give_up()
        self._begin_call(fitting[0])
        self._argue(arguments)
        self._state = self._behind
        return True

    def _behind(self) -> bool:
        """The end marker is due; a call without one is a call all the same."""
        if self._telling is not None:
            self._say(self._telling.told(ended=not self._scan.is_done))
            self._telling = None
        if not self._form.end:
            self._state = self._between
            return True
        if not self._skip_space():
            return False
        if self._form.between:
            fence = self._closes(self._form.between)
            if fence is None:
                return False
            if fence:
                return True
        closes = self._closes(self._form.end)
        if closes is None:
            return False
        begins = closes or self._begins_here()
        if begins is None:
            return False
        self._state = self._between
        if not begins:
            self._markers = self._behind_ends
            self._state = self._outside
        return True

    def _begins_here(self) -> bool | None:
        """Whether what may follow a call is here, or what the answer's end has left of it. None if
        the text is too short to tell."""
        text, at = self._text, self._at
        follows = [each for each in (self._form.begin, *self._form.section) if each]
        if any(text.startswith(each, at) for each in follows):
            return True
        if any(is_cut(text, at, each) for each in follows):
            return True if self._ended else None
        return False

    def _opened(self, marker: str) -> None:
        if marker in (self._form.end, self._form.between + self._form.end):
            self._outside_text.interrupt()
            self._state = self._between
        else:
            super()._opened(marker)
