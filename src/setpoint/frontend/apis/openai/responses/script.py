"""Makes the events of a response in a repeatable way: the same tokens give the same events, with
the same numbers and ids, however the tokens are grouped and on whichever server. Knows no
engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.request import Request
from setpoint.frontend.apis.openai.responses.reply import ResponseHead
from setpoint.frontend.apis.openai.responses.response_events import Event, OutputEvents
from setpoint.frontend.apis.openai.responses.response_tools import Toolbox
from setpoint.frontend.chat.parser import MakeParser
from setpoint.frontend.chat.turn.token_markers import AnswerParser
from setpoint.frontend.jobs import SequenceOutput
from setpoint.frontend.new_ids import RepeatableIds
from setpoint.frontend.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class Making:
    """Everything that is needed to convert tokens to a response."""

    head: ResponseHead
    make_parser: MakeParser
    tokens: Sequence[str]
    """See PreparedChat."""
    toolbox: Toolbox
    constrains_calls: bool
    """Whether the constraint of the request consists of the tools' schemas alone."""

    def parser(self) -> AnswerParser:
        """A parser of the answer."""
        return AnswerParser(self.make_parser(), self.tokens)


class Script:
    """Makes the events of a response in the background, in order. Call ``begin`` first, then
    ``feed`` with each group of tokens, and ``end`` with the last tokens."""

    def __init__(self, making: Making, request: Request, tokenizer: Tokenizer | None) -> None:
        """request: the request without outputs."""
        self._head = making.head
        self._ids = RepeatableIds(making.head.id)
        self._sequence = SequenceOutput(request, 0, tokenizer)
        self._parser = making.parser()
        self._output = OutputEvents(making.toolbox)
        self._has_tokens = False
        self._num_events = 0

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items so far."""
        return self._output.items

    def begin(self) -> list[Event]:
        response = self._head.begun("queued")
        return self._with_numbers(
            {"type": f"response.{name}", "response": response} for name in ("created", "queued")
        )

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """The events of these tokens, which must not include the token that ends the response."""
        events: list[Event] = []
        if ids and not self._has_tokens:
            self._has_tokens = True
            response = self._head.begun("in_progress")
            events.append({"type": "response.in_progress", "response": response})
        # One token after the other, so that any grouping makes the same events.
        for token_id in ids:
            events += self._events_of(TokenEvent(0, [token_id]))
        return self._with_numbers(events)

    def end(self, ids: Sequence[int], finish: Finish | None) -> list[Event]:
        """The events up to the last one, which ``last`` makes. finish: how the engine ended the
        response; None if it was cancelled or has failed."""
        events: list[Event] = []
        if finish is None:
            events += self.feed(ids)
        elif isinstance(finish.matched, int) and ids:
            events += self.feed(ids[:-1])
            events += self._with_numbers(self._events_of(TokenEvent(0, [ids[-1]], finish)))
        else:
            events += self.feed(ids)
            events += self._with_numbers(self._events_of(TokenEvent(0, [], finish)))
        with self._ids.used():
            rest = self._output.feed(self._parser.end(self._sequence.marks))
            is_complete = finish is not None and finish.type == "stop"
            rest += self._output.end(is_complete=is_complete)
        return [*events, *self._with_numbers(rest)]

    def last(self, response: dict[str, Any]) -> list[Event]:
        return self._with_numbers(
            [{"type": f"response.{response['status']}", "response": response}]
        )

    def _events_of(self, event: TokenEvent) -> list[Event]:
        piece = self._sequence.feed(event)
        with self._ids.used():
            return self._output.feed(self._parser.feed(piece.text, self._sequence.marks))

    def _with_numbers(self, events: Any) -> list[Event]:
        numbered = list(events)
        for number, event in enumerate(numbered, self._num_events):
            event["sequence_number"] = number
        self._num_events += len(numbered)
        return numbered
