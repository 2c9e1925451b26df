"""Implements ``/v1/messages`` and ``/v1/messages/count_tokens`` (docs/anthropic.md) from body to
reply, without HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.anthropic.content_blocks import BlockEvents, Event, blocks_of
from setpoint.frontend.apis.anthropic.messages_body import (
    UNSUPPORTED,
    ConversationBody,
    MessagesBody,
)
from setpoint.frontend.bodies import other_model_warning
from setpoint.frontend.chat.output_limit import with_token_limit
from setpoint.frontend.chat.turn.prepare import Chat, PreparedChat
from setpoint.frontend.chat.turn.token_markers import AnswerParser
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.intake import new_rid
from setpoint.frontend.jobs import Job, SequenceOutput
from setpoint.frontend.refusal import error_of_abort

MESSAGES_ROUTE = "/v1/messages"
COUNT_ROUTE = "/v1/messages/count_tokens"


class MessagesApi:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._chat = Chat(answering)

    async def open(self, raw: dict[str, Any]) -> MessageExchange:
        """Check and tokenize a body. Raises RequestError for one that cannot be honoured."""
        config = self._answering.config
        body, warnings = self._answering.parser.read(
            raw, MessagesBody, route=MESSAGES_ROUTE, unsupported=UNSUPPORTED
        )
        warnings += body.check()
        rid = f"msg_{new_rid()}"
        sampling = body.sampling(config.sampling_defaults)
        prepared = await self._chat.prepare(
            body.chat_request(sampling, RequestOptions(stream=bool(body.stream))), rid=rid
        )
        requests = with_token_limit(prepared.requests, body.max_tokens, config.context_len)
        job = self._answering.jobs.make(
            requests,
            received=raw,
            api="Anthropic",
            tool_schema="input_schema" if prepared.constrains_calls else "",
        )
        return MessageExchange(job, body, prepared, config, [*warnings, *prepared.warnings])

    async def count(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The answer of ``count_tokens``. Raises RequestError (400)."""
        body, warnings = self._answering.parser.read(
            raw, ConversationBody, route=COUNT_ROUTE, unsupported=UNSUPPORTED
        )
        warnings += body.check()
        ids = await self._chat.prompt_ids(body.chat_request(SamplingParams(), RequestOptions()))
        return {"input_tokens": len(ids)} | _warnings_field(warnings)


class MessageExchange:
    """One request between its checked body and its reply."""

    def __init__(
        self,
        job: Job,
        body: MessagesBody,
        prepared: PreparedChat,
        config: FrontendConfig,
        warnings: Sequence[str],
    ) -> None:
        self.job = job
        self.is_stream = bool(body.stream)
        self.rid = job.outputs[0].rid
        self._body = body
        self._prepared = prepared
        self._parser = AnswerParser(prepared.make_parser(), prepared.tokens)
        self._warnings = list(warnings)
        if body.model not in (config.served_model_name, "default"):
            self._warnings.append(other_model_warning(body.model, config.served_model_name))
        hidden = body.thinking is not None and body.thinking.display == "omitted"
        self._events = BlockEvents(show_thinking=not hidden)
        self._model = config.served_model_name

    def reply(self, outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
        """The whole message. Raises RequestError if it was aborted."""
        (output,) = outputs
        events = [
            *self._events.feed(self._parser.whole(output.text, output.marks)),
            *self._events.end(),
        ]
        return self._message(output, blocks_of(events)) | self._stop_fields(output)

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Yields the events of the stream except the last; the events of one piece come together.
        Raises like ``Job.pieces``, and RequestError if the request is aborted."""
        begun = False
        async for pieces in self.job.pieces():
            for piece in pieces:
                output, events = piece.output, []
                if not begun:
                    begun = True
                    events += [self._opening(output), {"type": "ping"}]
                events += self._events.feed(self._parser.feed(piece.text, output.marks))
                if output.finish is not None:
                    events += self._events.feed(self._parser.end(output.marks))
                    events += [*self._events.end(), self._closing(output)]
                if events:
                    yield events

    def _opening(self, output: SequenceOutput) -> Event:
        message = self._message(output, []) | {"stop_reason": None, "stop_sequence": None}
        message["usage"] |= {
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
        }
        return {"type": "message_start", "message": message}

    def _closing(self, output: SequenceOutput) -> Event:
        return {
            "type": "message_delta",
            "delta": self._stop_fields(output),
            "usage": self._usage(output),
        }

    def _message(self, output: SequenceOutput, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.rid,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": self._usage(output) | {"service_tier": "standard"},
        } | _warnings_field(self._warnings)

    def _stop_fields(self, output: SequenceOutput) -> dict[str, Any]:
        finish, sequence = output.finish, None
        assert finish is not None
        if finish.type == "abort":
            raise error_of_abort(finish)
        if finish.type == "length":
            at_limit = output.num_outputs >= self._body.max_tokens
            reason = "max_tokens" if at_limit else "model_context_window_exceeded"
        elif isinstance(finish.matched, str):
            reason, sequence = "stop_sequence", finish.matched
        else:
            reason = "tool_use" if self._events.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, output: SequenceOutput) -> dict[str, Any]:
        """Token counts. As in Anthropic's API, ``input_tokens`` counts the tokens that were not
        cached."""
        return {
            "input_tokens": output.num_prompt - output.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": output.num_cached,
            "output_tokens": output.num_outputs,
            "output_tokens_details": {"thinking_tokens": self._prepared.reasoning_tokens(output)},
        }


def _warnings_field(warnings: Sequence[str]) -> dict[str, Any]:
    return {"warnings": list(warnings)} if warnings else {}
