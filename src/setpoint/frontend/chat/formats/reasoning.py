"""Reasoning between two markers, before the answer: what most families write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from setpoint.frontend.chat.deltas import Delta, ReasoningDelta, TextDelta
from setpoint.frontend.chat.formats.scanning import Markers, Trimmed
from setpoint.frontend.chat.parser import DeltaParser

_MAX_LEAD = 64
"""Whitespace from this length on is no lead of the marker that opens the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedReasoning:
    """Implements ReasoningFormat."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False
    """Whether the output starts in the reasoning unless the prompt says otherwise, even though the
    chat template does not write ``begin``."""
    variable: str = ""
    needs_special_tokens: bool = False
    ended_by: tuple[str, ...] = ()
    """Markers of calls, which end the reasoning where the model forgets ``end``."""
    always_ends: bool = False

    def starts_inside(self, prompt: str = "", *, started: str = "") -> bool:
        # Only the end of the prompt counts: a user may write a marker, too.
        tail = prompt.rstrip()
        inside = tail.endswith(self.begin.rstrip()) or (self.always and not tail.endswith(self.end))
        if self.begin in started or self.end in started:
            inside = started.rfind(self.begin) > started.rfind(self.end)
        return inside

    def parser(
        self, after: DeltaParser, *, starts_inside: bool, separate: bool = True
    ) -> DeltaParser:
        return _Parser(self, after, starts_inside=starts_inside, separate=separate)


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
    ) -> None:
        self._form = form
        self._after = after
        self._separate = separate
        self._starts_inside = starts_inside
        self._where = "before"
        self._text = ""
        self._ends = Markers(form.end, *form.ended_by)
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
            return (ReasoningDelta(text) if self._separate else TextDelta(text),)
        self._text += text
        return self._run(ended=False)

    def end(self) -> Sequence[Delta]:
        return [*self._run(ended=True), *self._after.end()]

    def _run(self, *, ended: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if self._where == "before":
            self._before(deltas, ended=ended)
        if self._where == "inside":
            self._inside(deltas, ended=ended)
        if self._where == "behind" and self._text:
            text, self._text = self._text, ""
            deltas += self._answer(text)
        return deltas

    def _before(self, deltas: list[Delta], *, ended: bool) -> None:
        text = self._text.lstrip()
        num_spaces = len(self._text) - len(text)
        may_open = num_spaces < _MAX_LEAD
        if (
            may_open
            and not ended
            and self._form.begin.startswith(text)
            and text != self._form.begin
        ):
            return
        opened = may_open and text.startswith(self._form.begin)
        if opened:
            if not self._separate:
                deltas += _text(self._text[:num_spaces] + self._form.begin)
            self._text = text[len(self._form.begin) :]
        self._where = "inside" if opened or self._starts_inside else "behind"
        self._answer_begun = self._where == "behind"

    def _inside(self, deltas: list[Delta], *, ended: bool) -> None:
        found = self._ends.find(self._text, 0)
        if found is not None:
            stop, behind = found.start(), found.end()
            if found.group() != self._form.end:
                behind = stop
        else:
            stop = behind = len(self._text) if ended else self._ends.cut(self._text, 0)
        inside, marker = self._text[:stop], self._text[stop:behind]
        self._text = self._text[behind:]
        if self._separate:
            passed = self._reasoning.feed(inside)
            if passed:
                deltas.append(ReasoningDelta(passed))
        else:
            deltas += _text(inside + marker)
        if found is not None:
            self._where = "behind"

    def _answer(self, text: str) -> Sequence[Delta]:
        if not self._answer_begun and self._separate:
            text = text.lstrip()
            if not text:
                return ()
        self._answer_begun = True
        return self._after.feed(text)


def _text(text: str) -> list[Delta]:
    return [TextDelta(text)] if text else []


MARKED = (
    MarkedReasoning(name="deepseek-r1", always=True),
    MarkedReasoning(name="deepseek-v3", variable="thinking"),
    MarkedReasoning(name="deepseek-v4", variable="thinking"),
    MarkedReasoning(name="deepseek-v41", variable="thinking"),
    MarkedReasoning(
        name="gemma4",
        begin="<|channel>thought\n",
        end="<channel|>",
        variable="enable_thinking",
        needs_special_tokens=True,
    ),
    MarkedReasoning(name="glm45", variable="enable_thinking", ended_by=("<tool_call>",)),
    MarkedReasoning(
        name="granite_thinking_parser",
        begin="Here is my thought process:",
        end="Here is my response:",
        variable="thinking",
    ),
    MarkedReasoning(name="interns1", variable="enable_thinking"),
    MarkedReasoning(name="kimi", begin="◁think▷", end="◁/think▷", needs_special_tokens=True),
    MarkedReasoning(
        name="kimi_k2",
        variable="thinking",
        ended_by=("<|tool_calls_section_begin|>",),
        needs_special_tokens=True,
    ),
    MarkedReasoning(name="mimo", variable="enable_thinking"),
    MarkedReasoning(name="minimax", always=True),
    MarkedReasoning(
        name="minimax-m3", begin="<mm:think>", end="</mm:think>", needs_special_tokens=True
    ),
    MarkedReasoning(name="mistral", begin="[THINK]", end="[/THINK]", needs_special_tokens=True),
    MarkedReasoning(name="nemotron_3", variable="enable_thinking"),
    MarkedReasoning(name="qwen3", variable="enable_thinking"),
    MarkedReasoning(name="qwen3-thinking", always=True),
    MarkedReasoning(name="step3", always=True, needs_special_tokens=True),
    MarkedReasoning(name="step3p5", always=True, needs_special_tokens=True),
)
