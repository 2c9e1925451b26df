"""Calls in Python's syntax, of Llama 4, of LFM2, and of models whose template asks for them:

    [weather(place="Bern"), time()]

Each call is passed on once its closing parenthesis has come. LFM2 also writes the list as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.json_call import JsonCall
from setpoint.frontend.chat.formats.machine import CallMachine
from setpoint.frontend.chat.formats.python_values import PythonScan, call_arguments
from setpoint.frontend.chat.formats.scanning import MAX_NAME_CHARS, Markers
from setpoint.frontend.chat.parser import DeltaParser

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicCalls:
    """Implements ToolFormat."""

    name: str
    section: tuple[str, str]
    """The text around the list."""
    bare: bool = True
    """Whether the markers may be missing. Then only the names of the request's tools make a
    call."""
    needs_special_tokens: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        return self.section

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.section[0],)

    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        return _Parser(self, tools)

    def structure(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool
    ) -> dict[str, Any] | None:
        return None


class _Parser(CallMachine):
    def __init__(self, form: PythonicCalls, tools: Sequence[Tool]) -> None:
        begin, self._end = form.section
        super().__init__(Markers(begin, "[") if form.bare else Markers(begin))
        self._tools = {tool.name: tool for tool in tools}
        self._section = Markers(*form.section)
        self._marked = False
        self._lead: list[str] = []
        """What has been read since the last call, and is text if none follows."""
        self._start_list()

    def _opened(self, marker: str) -> None:
        self._start_list()
        self._lead = [marker]
        self._marked = marker != "["
        self._state = self._list if self._marked else self._call

    def _list(self) -> bool:
        """The marker has passed: a list is due."""
        if not self._space_is_passed():
            return False
        if self._text.startswith("[", self._at):
            self._pass(1)
            self._state = self._call
            return True
        if self._text.startswith("{", self._at):
            self._state = self._call
            return True
        return self._give_up()

    def _space_is_passed(self) -> bool:
        start = self._at
        follows = self._skip_space()
        self._lead.append(self._text[start : self._at])
        return follows or self._ended

    def _pass(self, num_chars: int) -> None:
        self._lead.append(self._text[self._at : self._at + num_chars])
        self._at += num_chars

    def _give_up(self) -> bool:
        """What has been read since the last call is none."""
        self._tell()
        self._say("".join(self._lead))
        self._start_list()
        self._state = self._outside
        return True

    def _start_list(self) -> None:
        self._lead = []
        self._waiting: list[tuple[str, str]] = []
        """Names and arguments of calls before the first one that shows that this is a list of
        calls: any one behind a marker, otherwise one of a function that the request defines."""
        self._is_certain = False
        self._malformed: list[str] = []
        """What stands in the list and is no call: it is told behind it."""

    def _tell(self) -> None:
        if self._is_certain and self._malformed:
            self._say("\n".join(self._malformed))
        self._malformed = []

    def _call(self) -> bool:
        """A call is due: a name and a parenthesis, or JSON."""
        if not self._space_is_passed():
            return False
        if self._marked and self._text.startswith("{", self._at):
            self._json = JsonCall(self._begin_json, self._argue, markers=self._section)
            self._state = self._inside_json
            return True
        found = _NAME.match(self._text, self._at, self._at + MAX_NAME_CHARS)
        stop = self._at if found is None else found.end()
        if stop == len(self._text) and not self._ended:
            return False
        name = self._text[self._at : stop]
        if not name or not self._text.startswith("(", stop):
            return self._give_up()
        self._name = name
        self._pass(len(name) + 1)
        self._parts: list[str] = []
        self._parens = PythonScan()
        self._state = self._arguments_of_call
        return True

    def _arguments_of_call(self) -> bool:
        stop = self._parens.feed(self._text, self._at, ended=self._ended)
        self._parts.append(self._text[self._at : stop])
        self._at = stop
        if not self._parens.is_done and not self._ended:
            return False
        inside = "".join(self._parts)
        self._lead.append(inside)
        if not self._parens.is_done:
            return self._give_up()
        arguments = call_arguments(self._parens, inside, self._tools.get(self._name))
        if not arguments:
            self._malformed.append(f"{self._name}({inside}")
        else:
            self._waiting.append((self._name, arguments))
            self._is_certain |= self._marked or self._name in self._tools
        if self._is_certain:
            self._make_calls()
        self._state = self._behind
        return True

    def _make_calls(self) -> None:
        for name, arguments in self._waiting:
            self._begin_call(name)
            self._argue(arguments)
        self._waiting = []
        self._lead = []

    def _begin_json(self, name: str) -> None:
        self._is_certain = True
        self._make_calls()
        self._begin_call(name)

    def _inside_json(self) -> bool:
        outcome = self._read_json(self._json)
        if outcome is None:
            return False
        if not self._json.has_begun:
            self._lead.append(self._json.raw())
            return self._give_up()
        self._state = self._behind if outcome == "done" else self._close
        return True

    def _behind(self) -> bool:
        """Another call or the end of the list is due."""
        if not self._space_is_passed():
            return False
        sign = self._text[self._at : self._at + 1]
        if sign == ",":
            self._pass(1)
            self._state = self._call
        elif not self._is_certain:
            self._pass(len(sign) if sign == "]" else 0)
            return self._give_up()
        else:
            self._at += sign == "]"
            self._state = self._close
        return True

    def _close(self) -> bool:
        """The end marker is due; it may be missing."""
        if not self._skip_space() and not self._ended:
            return False
        if self._closes(self._end) is None:
            return False
        self._lead = []
        return self._give_up()


PYTHONIC = PythonicCalls(name="pythonic", section=("<|python_start|>", "<|python_end|>"))
LFM2 = PythonicCalls(name="lfm2", section=("<|tool_call_start|>", "<|tool_call_end|>"), bare=False)
