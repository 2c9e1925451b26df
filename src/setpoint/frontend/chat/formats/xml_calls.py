"""Calls as elements, with one element for each argument. Values are plain text, and become JSON of
the types in the tool's schema."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.json_scan import json_text
from setpoint.frontend.chat.formats.machine import State
from setpoint.frontend.chat.formats.scanning import MAX_NAME_CHARS, Markers, is_cut
from setpoint.frontend.chat.formats.sections import SectionMachine, opening_markers
from setpoint.frontend.chat.formats.xml_structure import XmlWriting, xml_structure
from setpoint.frontend.chat.formats.xml_tags import MAX_GAP, Tag, XmlTags, is_name
from setpoint.frontend.chat.formats.xml_values import ANY, STRING, ArgumentTypes, as_json
from setpoint.frontend.chat.parser import DeltaParser

_KEY = re.compile(r'\s*+(?P<key>[^"<>\s]++(?:\s++[^"<>\s]++)*+)\s*+')
"""Possessive, because there is only one way to match: text that is not a key is tried once."""


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
    def markers(self) -> tuple[str, ...]:
        return (
            *(*self.section, *self.passed, self.begin, self.name_end, self.end),
            *(self.key_begin, self.key_end, self.value_begin, self.value_end),
        )

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
    """A value ends where the format says so. Whether a tag in it is one, or a part of the value, is
    decided by what follows (docs/tools-and-reasoning.md has the rules): the text is held until then
    (``_nested``). If the tags in it do not match, it is read again, and the tags in it end values
    (``_split_value``); so no text is read more than twice."""

    def __init__(self, form: XmlCalls, tools: Sequence[Tool]) -> None:
        super().__init__(form.begin, section=form.section, passed=form.passed, bare=form.bare)
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._name_ends = Markers(*filter(None, (form.name_end, form.key_begin, form.end)))
        self._tags = XmlTags(form)
        self._types_of = ArgumentTypes()
        self._function = ""
        self._given: dict[str, None] = {}
        """The names of the present call's arguments so far."""
        self._told: list[str] = []
        """Text in the present call that is no argument: it follows the call."""
        self._is_open_value = False
        """Whether the value that was read last has no closing tag."""
        self._held: list[str] = []
        """Text of the present value, from the first tag in it that may not belong to it."""
        self._open = {"key": 0, "call": 0}
        """How many tags of each kind that the held text opens are still to be closed."""
        self._latest: dict[str, int] = {}
        """Where in the answer each argument begins for the last time in the held text."""
        self._settled = 0
        """The index in the answer before which no tag opens a part of a value."""

    def _header(self) -> bool:
        text, at = self._text, self._at
        limit = at + MAX_NAME_CHARS + self._name_ends.longest
        found = self._name_ends.find(text, at, limit)
        if found is None and len(text) < limit and not self._ended:
            return False
        if found is None or not is_name(name := text[at : found.start()].strip()):
            return self._give_up()
        self._function = name
        self._at = found.end() if found.group() == self._form.name_end else found.start()
        self._lead.append(text[at : self._at])
        self._state = self._begun
        return True

    def _begun(self) -> bool:
        """A name has been read. It is a call's if a tag follows, or if the answer ends here."""
        start = self._at
        self._skip_space()
        self._lead.append(self._text[start : self._at])
        begins = self._tags.begins_call(self._text, self._at, ended=self._ended)
        if begins is None:
            return False
        if not begins:
            return self._give_up()
        self._begin_call(self._function)
        self._tool = self._tools.get(self._function)
        self._given = {}
        self._is_open_value = False
        self._state = self._argument
        return True

    def _argument(self) -> bool:
        """An argument or the end of the call is due. What is neither is told behind the call."""
        tag, start = self._tags.find(
            self._text, self._at, ended=self._ended, malformed=True, leads=True
        )
        self._told.append(self._text[self._at : start])
        self._at = start
        if tag is None:
            return self._end_in_call() if self._ended else False
        if tag.kind == "key":
            self._at = tag.stop
            self._start_value(tag)
        elif tag.kind == "value_end":
            self._at = tag.stop
            self._told.append(self._text[start : tag.stop])
        else:
            self._at = tag.stop if tag.kind == "end" else start
            is_doubtful = self._is_open_value or "".join(self._told).strip()
            if tag.kind != "end" and is_doubtful:
                self._cut_call()
                self._leave_call(self._between)
            else:
                self._finish(self._between)
        return True

    def _finish(self, then: State) -> None:
        """The call is complete."""
        self._argue("}" if self._given else "{}")
        self._leave_call(then)

    def _leave_call(self, then: State) -> None:
        told = "".join(self._told)
        self._say(told[: self._tags.lead(told)].lstrip())
        self._told.clear()
        self._state = then

    def _end_in_call(self) -> bool:
        """The answer has ended between two arguments. The call is complete if only a part of its
        end has been cut off."""
        text, at = self._text, self._at
        self._at = len(text)
        others = (self._form.key_begin, self._form.value_end)
        is_end = at < len(text) and is_cut(text, at, self._form.end)
        has_more = any(is_cut(text, at, each) for each in others) or "".join(self._told).strip()
        if is_end and not has_more:
            self._finish(self._outside)
        else:
            self._cut_call()
            self._leave_call(self._outside)
        return True

    def _start_value(self, tag: Tag) -> None:
        self._name = tag.name
        self._types = (
            {"true": STRING, "false": ANY}[tag.string]
            if tag.string
            else self._types_of.of(self._tool, tag.name)
        )
        self._parts: list[str] = []
        self._has_begun = self._is_open_value = False
        self._state = self._value_start

    def _value_start(self) -> bool:
        if self._at == len(self._text):
            return self._cut_value("") if self._ended else False
        if self._form.framed and self._text[self._at] == "\n":
            self._at += 1
        if self._types == STRING:
            self._argue(self._key_text() + '"')
        self._state = self._value
        return True

    def _key_text(self) -> str:
        before = ", " if self._given else "{"
        self._given[self._name] = None
        return before + json_text(self._name) + ": "

    def _take(self, part: str) -> None:
        """More of the value."""
        if not part:
            return
        self._has_begun = True
        if self._types == STRING:
            self._argue(json_text(part)[1:-1])
        else:
            self._parts.append(part)

    def _close_value(self, last: str, at: int) -> bool:
        """The value ends with the text ``last``. at: where reading goes on."""
        self._take(last)
        if self._types == STRING:
            self._argue('"')
        else:
            value = as_json("".join(self._parts), self._types)
            self._argue(self._key_text() + value)
        self._at = at
        self._state = self._argument
        return True

    def _unframed(self, text: str) -> str:
        """Text at the end of a value, without the line end that the format writes there."""
        return text.removesuffix("\n") if self._form.framed else text

    def _value(self) -> bool:
        if self._offset + self._at < self._settled:
            return self._split_value()
        text, at = self._text, self._at
        if not (at or self._ended or self._tags.may_begin_in(text)):
            self._take(text)
            self._at = len(text)
            return False
        tag, start = self._tags.find(text, at, ended=self._ended, malformed=True)
        if tag is None and self._ended:
            return self._cut_value(text[at:start])
        closes = tag is not None and tag.kind == "value_end"
        ends = self._tags.follows(text, tag, ended=self._ended) if tag and closes else False
        if tag is not None and ends:
            return self._close_value(self._unframed(text[at:start]), tag.stop)
        lead = at + self._tags.lead(text[at:start])
        self._take(text[at:lead])
        self._at = lead
        if tag is None or ends is None:
            return False
        self._held = []
        self._latest = {}
        self._open = {"key": 0, "call": 0}
        self._state = self._nested
        return True

    def _cut_value(self, last: str) -> bool:
        """The answer has ended in a value."""
        self._take(self._unframed(last))
        self._at = len(self._text)
        self._cut_call()
        self._leave_call(self._outside)
        return True

    def _nested(self) -> bool:
        """A tag in the value may be a part of it: it is, if the tags from here on match."""
        text = self._text
        tag, start = self._tags.find(text, self._at, ended=self._ended)
        if tag is None:
            if self._ended:
                return self._fall_back(sys.maxsize)
            self._hold(start)
            return False
        opened = {"value_end": "key", "end": "call"}.get(tag.kind, "")
        if tag.kind == "key":
            self._latest[tag.name] = self._offset + tag.start
        if tag.kind in self._open:
            self._open[tag.kind] += 1
        elif opened and self._open[opened]:
            self._open[opened] -= 1
        elif opened and not self._open["call"]:
            ends = self._tags.follows(text, tag, ended=self._ended)
            if ends is None:
                return False
            if ends and tag.kind == "end":
                return self._fall_back(self._offset + tag.stop)
            if ends:
                self._hold(start)
                return self._close_value(self._unframed("".join(self._held)), tag.stop)
        self._hold(tag.stop)
        return True

    def _hold(self, stop: int) -> None:
        self._held.append(self._text[self._at : stop])
        self._at = stop

    def _fall_back(self, settled: int) -> bool:
        """The tags do not match: read the held text again."""
        self._hold(len(self._text))
        text = "".join(self._held)
        self._offset += self._at - len(text)
        self._text, self._at = text, 0
        self._settled = settled
        self._state = self._value
        return True

    def _split_value(self) -> bool:
        """The value ends at its closing tag, if the format allows what follows that. If there is
        none before the next argument, the end of the call or the next call, it ends at whatever
        closes something, or else there."""
        text, at = self._text, self._at
        stop: Tag | None = None
        bad: Tag | None = None
        """The beginning of a malformed call. It is one only if an argument follows, for which the
        present value must have ended."""
        while True:
            tag, at = self._tags.find(text, at, ended=self._ended, malformed=True)
            if tag is None or self._offset + tag.start >= self._settled:
                break
            if tag.kind == "bad call":
                bad = bad or (tag if self._is_likely(tag) else None)
            elif tag.kind in ("key", "call"):
                if stop or bad or self._is_likely(tag):
                    stop = stop or bad or tag
                    break
            elif self._tags.follows(text, tag, ended=self._ended):
                if tag.kind == "value_end" or stop is None:
                    stop = tag
                if tag.kind != "section_end":
                    break
            else:
                stop = stop or tag
            at = tag.stop
        if stop is None:
            return self._cut_value(text[self._at : at])
        value = text[self._at : stop.start]
        if stop.kind == "value_end":
            return self._close_value(self._unframed(value), stop.stop)
        self._is_open_value = True
        return self._close_value(value[: self._tags.lead(value)], stop.start)

    def _is_likely(self, tag: Tag) -> bool:
        """Whether a tag in a value that no closing tag ends begins the next argument or call, and
        is not text: the request defines its name, and no later text gives the same argument, or it
        begins a line."""
        before = self._text[max(tag.start - MAX_GAP, self._at) : tag.start]
        lead = self._tags.lead(before)
        if "\n" in before[lead:] or not (lead or self._has_begun):
            return tag.name not in self._given
        if tag.kind != "key":
            return tag.name in self._tools
        schema = self._tool.parameters if self._tool is not None else None
        properties = schema.get("properties") if isinstance(schema, dict) else None
        is_known = not isinstance(properties, dict) or tag.name in properties
        is_last = self._latest.get(tag.name, 0) <= self._offset + tag.start
        return is_known and is_last and tag.name not in (*self._given, self._name)
