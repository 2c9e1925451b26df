"""Implements ``/api/chat`` and ``/api/generate`` (docs/ollama.md) from body to reply, without
HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.logprobs import LogprobBlock
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.ollama.ollama_answers import (
    DURATIONS,
    NOTHING,
    PieceParser,
    durations,
    stamp,
)
from setpoint.frontend.apis.ollama.ollama_bodies import (
    UNSUPPORTED,
    OllamaChatBody,
    OllamaGenerateBody,
    TextBody,
)
from setpoint.frontend.apis.openai.openai_logprobs import Names, chat_logprobs
from setpoint.frontend.chat.chat_request import ChatRequest
from setpoint.frontend.chat.deltas import Answer, arguments_of
from setpoint.frontend.chat.output_limit import with_token_limit
from setpoint.frontend.chat.parser import PlainParser
from setpoint.frontend.chat.turn.prepare import Chat, PreparedChat
from setpoint.frontend.chat.turn.token_markers import AnswerParser
from setpoint.frontend.intake import new_rid
from setpoint.frontend.jobs import Job, SequenceOutput
from setpoint.frontend.refusal import error_of_abort
from setpoint.frontend.residence import Residence

CHAT_ROUTE = "/api/chat"
GENERATE_ROUTE = "/api/generate"

_ANSWER = "AN_EARLIER_ANSWER"
_EARLIER = (
    {"role": "user", "content": "A question."},
    {"role": "assistant", "content": _ANSWER},
)
"""Stand for a conversation of which only the token ids are known, while a turn after it is
rendered."""

Render = Callable[[Answer], dict[str, Any]]
"""Makes the fields of a route's answer that hold its content."""


class TextApi:
    def __init__(self, answering: Answering, residence: Residence) -> None:
        self._residence = residence
        self._answering = answering
        self._chat = Chat(answering)

    async def chat(self, raw: dict[str, Any]) -> OllamaExchange | LoadReply:
        """Check and tokenize a body. Raises RequestError for one that cannot be honoured."""
        self._answering.text.check_text()
        body, warnings = self._answering.parser.read(raw, OllamaChatBody, route=CHAT_ROUTE)
        warnings += body.warnings(self._answering.config)
        if not body.messages:
            return self._load(body, warnings, _message)
        turn = body.chat_request(body.history(), self._defaults, tools=body.tools)
        prepared = await self._chat.prepare(turn, rid=new_rid())
        return self._exchange(raw, body, prepared, warnings, _message)

    async def generate(self, raw: dict[str, Any]) -> OllamaExchange | LoadReply:
        """Like ``chat``, for one prompt."""
        self._answering.text.check_text()
        body, warnings = self._answering.parser.read(
            raw,
            OllamaGenerateBody,
            route=GENERATE_ROUTE,
            unsupported=UNSUPPORTED,
        )
        warnings += body.warnings(self._answering.config)
        if not body.prompt:
            return self._load(body, warnings, _response)
        turn = body.chat_request(body.history(), self._defaults)
        if body.raw or not self._answering.text.has_chat_template:
            intake = self._answering.intake
            ids = (
                await intake.encode_after(body.context, body.prompt, name="context")
                if body.context
                else await intake.encode(body.prompt)
            )
            sampling, all_warnings = await self._answering.enforcement.applied(turn.sampling)
            requests = self._answering.intake.requests(ids, sampling, turn.options)
            prepared = PreparedChat(requests, PlainParser, warnings=all_warnings)
        elif body.context:
            prepared = await self._continued(turn, body.context)
        else:
            prepared = await self._chat.prepare(turn, rid=new_rid())
        return self._exchange(raw, body, prepared, warnings, _response)

    async def _continued(self, turn: ChatRequest, context: list[int]) -> PreparedChat:
        """The turn after a conversation of which only the token ids are known. The chat template
        writes it after an answer that stands for the known ones, and what it writes behind that
        follows them."""
        turn = msgspec.structs.replace(turn, messages=[*_EARLIER, *turn.messages])
        _, found, written = (await self._chat.prompt_text(turn)).partition(_ANSWER)
        if not found:
            raise RequestError("context: the model's chat template leaves earlier answers out.")
        prepared = await self._chat.prepare(turn, rid=new_rid())
        (first,) = prepared.requests
        ids = await self._answering.intake.encode_after(context, written, name="context")
        options = msgspec.structs.replace(first.options, logprobs=turn.options.logprobs)
        requests = self._answering.intake.requests(ids, first.sampling, options, rid=first.rid)
        return replace(prepared, requests=requests)

    @property
    def _defaults(self) -> Mapping[str, float]:
        return self._answering.config.sampling_defaults

    def _load(self, body: TextBody, warnings: list[str], render: Render) -> LoadReply:
        """The answer to a body that only asks to load the model, or to unload it."""
        return LoadReply(
            self._answering.config.served_model_name, self._residence, body, warnings, render
        )

    def _exchange(
        self,
        raw: dict[str, Any],
        body: TextBody,
        prepared: PreparedChat,
        warnings: list[str],
        render: Render,
    ) -> OllamaExchange:
        requests = with_token_limit(
            prepared.requests, body.own_options.max_new_tokens, self._answering.config.context_len
        )
        job = self._answering.jobs.make(
            requests,
            received=raw,
            api="Ollama",
            tool_schema="parameters" if prepared.constrains_calls else "",
        )
        all_warnings = [*warnings, *prepared.warnings]
        return OllamaExchange(self._answering, job, prepared, all_warnings, render, body)


class LoadReply:
    """An answer of one object, which says that the model is loaded, or is unloaded as soon as its
    requests have ended."""

    def __init__(
        self,
        model: str,
        residence: Residence,
        body: TextBody,
        warnings: list[str],
        render: Render,
    ) -> None:
        self.is_stream = body.is_stream
        self._residence, self._keep_s = residence, body.keep_s
        self.content = {
            "model": model,
            "created_at": stamp(),
            **render(NOTHING),
            "done": True,
            "done_reason": "load" if body.keep_s else "unload",
            **dict.fromkeys(DURATIONS, 0),
            **({"warnings": warnings} if warnings else {}),
        }

    async def carry_out(self) -> None:
        """Load the model, or unload it with ``keep_alive`` 0. Raises SetpointError if that is
        impossible."""
        if not self._keep_s:
            self._residence.dismiss()
            return
        self._residence.keep(self._keep_s)
        await self._residence.load()


class OllamaExchange:
    """One request between its checked body and its reply."""

    def __init__(
        self,
        answering: Answering,
        job: Job,
        prepared: PreparedChat,
        warnings: Sequence[str],
        render: Render,
        body: TextBody,
    ) -> None:
        self.job = job
        self.is_stream = body.is_stream
        self.keep_s = body.keep_s
        self._tokenizer = answering.text.tokenizer
        self._model = answering.config.served_model_name
        self._parser = PieceParser(AnswerParser(prepared.make_parser(), prepared.tokens))
        self._warnings = list(warnings)
        self._render = render
        self._logprobs = bool(body.logprobs)
        self._shows_context = isinstance(body, OllamaGenerateBody) and not body.raw

    def reply(self, output: SequenceOutput) -> dict[str, Any]:
        """The whole answer. Raises RequestError if it was aborted."""
        answer = self._parser.feed(output.text, output.marks, is_last=True)
        logprobs = self._shown_logprobs(output.logprobs.block())
        return self._object(answer) | self._end(output) | logprobs

    async def objects(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the objects of the stream; the last one has no content. Raises like
        ``Job.pieces``, and RequestError if the request is aborted."""
        async for pieces in self.job.pieces():
            for piece in pieces:
                is_last = piece.output.finish is not None
                answer = self._parser.feed(piece.text, piece.output.marks, is_last=is_last)
                logprobs = self._shown_logprobs(piece.logprobs)
                if answer != NOTHING or logprobs:
                    yield self._object(answer) | {"done": False} | logprobs
                if is_last:
                    yield self._object(NOTHING) | self._end(piece.output)

    def _object(self, answer: Answer) -> dict[str, Any]:
        return {"model": self._model, "created_at": stamp(), **self._render(answer)}

    def _end(self, output: SequenceOutput) -> dict[str, Any]:
        finish = output.finish
        assert finish is not None
        if finish.type == "abort":
            raise error_of_abort(finish)
        warnings = [*self._warnings, *self._parser.warnings]
        return {
            "done": True,
            "done_reason": finish.type,
            **durations(output),
            **({"context": _context(output)} if self._shows_context else {}),
            **({"warnings": warnings} if warnings else {}),
        }

    def _shown_logprobs(self, block: LogprobBlock | None) -> dict[str, Any]:
        if not self._logprobs or block is None:
            return {}
        return {"logprobs": chat_logprobs(Names(self._tokenizer), block)["content"]}


def _context(output: SequenceOutput) -> list[int]:
    """The token ids of a prompt and its answer, with which a client continues."""
    return [*output.request.prompt().tolist(), *output.output_ids]


def _response(answer: Answer) -> dict[str, Any]:
    """The content of ``/api/generate``, which has no tools."""
    return {"response": answer.text} | _thinking(answer)


def _message(answer: Answer) -> dict[str, Any]:
    """The content of ``/api/chat``."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text} | _thinking(answer)
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "function": {
                    "index": call.index,
                    "name": call.name,
                    "arguments": arguments_of(call.arguments),
                },
            }
            for call in answer.calls
        ]
    return {"message": message}


def _thinking(answer: Answer) -> dict[str, Any]:
    return {"thinking": answer.reasoning} if answer.reasoning else {}
