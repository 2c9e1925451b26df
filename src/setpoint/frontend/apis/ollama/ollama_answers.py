"""Makes parts of the answers of Ollama's routes: whole tool calls, durations, time stamps."""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

import msgspec

from setpoint.frontend.chat.deltas import Answer, ReasoningDelta, TextDelta, ToolCallDelta
from setpoint.frontend.chat.turn.token_markers import AnswerParser
from setpoint.frontend.jobs import SequenceOutput

NOTHING = Answer("", "", [])

DURATIONS = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)


class PieceParser:
    """Parses the text of one sequence piece by piece. Ollama's clients expect whole tool calls, so
    the pieces of a call are held back until something else follows, and a call that is cut is left
    out."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._call: ToolCallDelta | None = None
        """The call that may not be complete yet."""
        self.warnings: list[str] = []
        """Warnings about the answer, complete after its last piece."""

    def feed(self, text: str, marks: Collection[int], *, is_last: bool) -> Answer:
        deltas = [*self._parser.feed(text, marks), *(self._parser.end(marks) if is_last else ())]
        shown = reasoning = ""
        calls = []
        for delta in deltas:
            last = self._call
            if isinstance(delta, ToolCallDelta) and last and last.index == delta.index:
                joined = last.arguments + delta.arguments
                self._call = msgspec.structs.replace(last, arguments=joined, is_cut=delta.is_cut)
                continue
            if last is not None:
                calls.append(last)
            self._call = delta if isinstance(delta, ToolCallDelta) else None
            shown += delta.text if isinstance(delta, TextDelta) else ""
            reasoning += delta.text if isinstance(delta, ReasoningDelta) else ""
        if is_last and self._call is not None:
            if self._call.is_cut:
                self.warnings.append(
                    f"The answer ended inside a call of {self._call.name!r}, which is left out."
                )
            else:
                calls.append(self._call)
        return Answer(shown, reasoning, calls)


def durations(output: SequenceOutput) -> dict[str, Any]:
    """Token counts, and times in nanoseconds, of a finished sequence. The time of the prompt
    includes its wait in the queue, but not that for its model to be loaded."""
    ended_at = output.finished_at or time.perf_counter()
    first_at = output.first_token_at or ended_at
    return {
        "total_duration": _ns(ended_at - output.arrived_at),
        "load_duration": _ns(output.held_s),
        "prompt_eval_count": output.num_prompt,
        "prompt_eval_duration": _ns(first_at - output.arrived_at - output.held_s),
        "eval_count": output.num_outputs,
        # Clients divide by it, even if there is only one token.
        "eval_duration": max(1, _ns(ended_at - first_at)),
    }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def stamp() -> str:
    """The time of day as Ollama writes it."""
    return stamp_of(datetime.now(UTC))


def stamp_of(moment: datetime) -> str:
    """A moment in UTC as Ollama writes it."""
    return moment.isoformat().replace("+00:00", "Z")
