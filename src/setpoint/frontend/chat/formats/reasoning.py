"""Reasoning between two markers, before the answer: what most families write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from setpoint.frontend.chat.deltas import Delta, ReasoningDelta, TextDelta
from setpoint.frontend.chat.formats.call_search import CallSearch
from setpoint.frontend.chat.formats.late_end import LateEnd
from setpoint.frontend.chat.formats.scanning import Markers, Trimmed, is_cut
from setpoint.frontend.chat.formats.tool_format import ToolFormat
from setpoint.frontend.chat.parser import DeltaParser

_MAX_LEAD = 64
"""Whitespace from this length on is no lead of the marker that opens the reasoning."""
_SEARCHED_AT_ONCE = 64
"""Characters after the marker of a call that are looked at together; most mentions of a marker are
known by then."""
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedReasoning:
    """Implements ReasoningFormat."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False
    """Whether the output starts in the reasoning unless the prompt says otherwise, even though the
    chat template does not write ``begin``."""
    needs_special_tokens: bool = False
    always_ends: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    def starts_inside(self, prompt: str = "", *, started: str = "") -> bool:
        # Only the end of the prompt counts: a user may write a marker, too.
        tail = prompt.rstrip()
        inside = tail.endswith(self.begin.rstrip()) or (self.always and not tail.endswith(self.end))
        if self.begin in started or self.end in started:
            inside = started.rfind(self.begin) > started.rfind(self.end)
        return inside

    def parser(
        self,
        after: DeltaParser,
        *,
        starts_inside: bool,
        separate: bool = True,
        calls: ToolFormat | None = None,
    ) -> DeltaParser:
        return _Parser(self, after, starts_inside=starts_inside, separate=separate, calls=calls)


class _Parser:
    """Before the reasoning (whitespace and ``begin``), in it, and after it, where everything goes
    to ``after``. Whitespace around the reasoning is dropped unless it is shown as text."""

    def __init__(
        self,
        form: MarkedReasoning,
        after: DeltaParser,
        *,
        starts_inside: bool,
        separate: bool,
        calls: ToolFormat | None,
    ) -> None:
        self._form = form
        self._after = after
        self._separate = separate
        self._where: Literal["before", "inside", "at a call", "behind"] = "before"
        self._is_inside = starts_inside
        """Whether the reasoning has begun."""
        self._text = ""
        self._at = 0
        self._searched = 0
        """Index after the text in which a call was looked for, after the marker of one."""
        self._call_marker_end = 0
        self._ends = Markers(form.end, *(() if calls is None else calls.openings))
        self._end = Markers(form.end)
        self._calls = CallSearch(calls)
        self._reasoning = Trimmed(at_start=True)
        self._answer_begun = False

    def feed(self, text: str) -> Sequence[Delta]:
        if self._where == "behind":
            return self._answer(text)
        if (
            self._where == "inside"
            and not self._text
            and text
            and not self._ends.may_begin_in(text)
            and self._reasoning.is_passing(text)
        ):
            self._calls.passed(text)
            return (ReasoningDelta(text) if self._separate else TextDelta(text),)
        self._text += text
        return self._run(ended=False)

    def end(self) -> Sequence[Delta]:
        return [*self._run(ended=True), *self._after.end()]

    def _run(self, *, ended: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if self._where == "before":
            self._before(deltas, ended=ended)
        while self._where in ("inside", "at a call"):
            read = self._inside if self._where == "inside" else self._at_a_call
            if not read(deltas, ended=ended):
                break
        self._text = self._text[self._at :]
        self._at = 0
        if self._where == "behind" and self._text:
            text, self._text = self._text, ""
            deltas += self._answer(text)
        return deltas

    def _before(self, deltas: list[Delta], *, ended: bool) -> None:
        """Pass ``begin``, which some models write twice. Without it an ``end`` is of a reasoning
        that is empty."""
        begin, end = self._form.begin, self._form.end
        while True:
            start = _space_end(self._text, self._at)
            may_open = start - self._at < _MAX_LEAD
            markers = [begin] if self._is_inside else [begin, end]
            if may_open and not ended and any(is_cut(self._text, start, each) for each in markers):
                return
            met = [each for each in markers if may_open and self._text.startswith(each, start)]
            if not met:
                break
            if not self._separate:
                deltas += _text(self._text[self._at : start] + met[0])
            self._at = start + len(met[0])
            if met[0] == end:
                self._where = "behind"
                return
            self._is_inside = True
        self._where = "inside" if self._is_inside else "behind"
        self._answer_begun = not self._is_inside

    def _inside(self, deltas: list[Delta], *, ended: bool) -> bool:
        """Whether the end of the reasoning, or of this part of it, was found."""
        found = self._ends.find(self._text, self._at)
        if found is None:
            text = self._text
            self._pass_to(len(text) if ended else self._ends.cut(text, self._at), deltas)
            return False
        self._pass_to(found.start(), deltas)
        if found.group() == self._form.end:
            if not self._separate:
                deltas += _text(self._form.end)
            self._at = found.end()
            self._where = "behind"
        elif self._calls.is_quoted:
            self._pass_to(found.end(), deltas)
        else:
            self._calls.begin()
            self._searched = self._at
            self._call_marker_end = found.end()
            self._where = "at a call"
        return True

    def _at_a_call(self, deltas: list[Delta], *, ended: bool) -> bool:
        """The marker of a call is here, and what follows says whether it is one: whether that is
        known."""
        is_call = None
        while is_call is None:
            part = self._text[self._searched : self._searched + _SEARCHED_AT_ONCE]
            is_last = ended and self._searched + len(part) == len(self._text)
            end = self._end.find(part, 0)
            stop = self._end.cut(part, 0) if end is None and not is_last else len(part)
            stop = stop if end is None else end.start()
            known = part[:stop] if end is None else part[: end.end()]
            is_call = self._calls.feed(known, ended=is_last or end is not None)
            self._searched += stop
            if is_call is None and not stop:
                self._searched -= self._at  # the text before goes
                self._call_marker_end -= self._at
                return False
        if not is_call:
            self._pass_to(self._call_marker_end, deltas)
        elif self._separate:
            self._after = LateEnd(self._after, self._form.end)
        self._where = "behind" if is_call else "inside"
        return True

    def _pass_to(self, stop: int, deltas: list[Delta]) -> None:
        """The text up to here is reasoning."""
        passed, self._at = self._text[self._at : stop], stop
        self._calls.passed(passed)
        if not self._separate:
            deltas += _text(passed)
        elif shown := self._reasoning.feed(passed):
            deltas.append(ReasoningDelta(shown))

    def _answer(self, text: str) -> Sequence[Delta]:
        if not self._answer_begun and self._separate:
            text = text.lstrip()
            if not text:
                return ()
        self._answer_begun = True
        return self._after.feed(text)


def _space_end(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()


def _text(text: str) -> list[Delta]:
    return [TextDelta(text)] if text else []


MARKED = (
    MarkedReasoning(name="deepseek-r1", always=True),
    MarkedReasoning(name="deepseek-v3"),
    MarkedReasoning(name="deepseek-v4"),
    MarkedReasoning(name="deepseek-v41"),
    MarkedReasoning(
        name="gemma4",
        begin="<|channel>thought\n",
        end="<channel|>",
        needs_special_tokens=True,
    ),
    MarkedReasoning(name="glm45"),
    MarkedReasoning(
        name="granite",
        begin="Here is my thought process:",
        end="Here is my response:",
    ),
    MarkedReasoning(name="granite_thinking_parser"),
    MarkedReasoning(name="interns1"),
    MarkedReasoning(name="kimi", begin="◁think▷", end="◁/think▷", needs_special_tokens=True),
    MarkedReasoning(
        name="kimi_k2",
        needs_special_tokens=True,
    ),
    MarkedReasoning(name="mimo"),
    MarkedReasoning(name="minimax", always=True),
    MarkedReasoning(
        name="minimax-m3", begin="<mm:think>", end="</mm:think>", needs_special_tokens=True
    ),
    MarkedReasoning(name="mistral", begin="[THINK]", end="[/THINK]", needs_special_tokens=True),
    MarkedReasoning(name="nemotron_3"),
    MarkedReasoning(name="qwen3"),
    MarkedReasoning(name="qwen3-thinking", always=True),
    MarkedReasoning(name="step3", always=True, needs_special_tokens=True),
    MarkedReasoning(name="step3p5", always=True, needs_special_tokens=True),
)
