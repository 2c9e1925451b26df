"""Implements ``/v1/responses`` (docs/responses.md) from body to response, without HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from setpoint.core.request import Request, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.responses.body import (
    UNSUPPORTED,
    InputBody,
    ResponsesBody,
    chat_request,
)
from setpoint.frontend.apis.openai.responses.items import items_of, messages_of
from setpoint.frontend.apis.openai.responses.reply import ResponseHead
from setpoint.frontend.apis.openai.responses.response_events import Event, OutputEvents
from setpoint.frontend.apis.openai.responses.response_tools import Toolbox
from setpoint.frontend.apis.openai.responses.script import Making
from setpoint.frontend.bodies import parse
from setpoint.frontend.chat.turn.prepare import Chat, PreparedChat
from setpoint.frontend.intake import new_rid
from setpoint.frontend.jobs import Job, SequenceOutput
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.routing import RANK_FIELDS
from setpoint.frontend.storage.background import ID_PREFIX, ResponseInputs
from setpoint.frontend.storage.responses import Item, KeptResponse, ResponseStore

ROUTE = "/v1/responses"
COUNT_ROUTE = "/v1/responses/input_tokens"


class ResponsesApi:
    route = ROUTE
    body: type[msgspec.Struct] = ResponsesBody

    def __init__(self, answering: Answering, *, keeps: bool = True) -> None:
        """keeps: whether responses are stored for later requests if the client wants that."""
        self._answering = answering
        self._keeps = keeps
        self._store = answering.responses
        self._chat = Chat(answering)

    async def open(self, raw: dict[str, Any]) -> ResponseExchange:
        """Check and tokenize a body. Raises RequestError: 400 for a body that cannot be honoured,
        404 for a ``previous_response_id`` that is not stored."""
        config = self._answering.config
        body, warnings = self._answering.parser.read(
            raw, ResponsesBody, route=ROUTE, unsupported=UNSUPPORTED
        )
        body.check()
        toolbox = Toolbox.of(body.tools)
        inputs, earlier = items_of(body.input, self._store.item), self._earlier(body)
        own_id = ID_PREFIX + new_rid()
        sampling = body.sampling(config.sampling_defaults)
        prepared = await self._prepare(body, toolbox, sampling, earlier, inputs, own_id)
        head = ResponseHead.of(
            own_id,
            body,
            sampling,
            config,
            warnings=[
                *warnings,
                *toolbox.warnings,
                *body.without_effect(),
                *prepared.warnings,
            ],
            reasoning_tokens=prepared.reasoning_tokens,
        )
        making = Making(
            head, prepared.make_parser, prepared.tokens, toolbox, prepared.constrains_calls
        )
        return ResponseExchange(
            self._job(prepared.requests, raw, making),
            body,
            raw,
            making,
            self._store,
            is_kept=self._keeps and body.store is not False,
            inputs=inputs,
            earlier=earlier,
        )

    async def again(self, asked: ResponseInputs, response: dict[str, Any]) -> Making:
        """The Making for a response that an earlier server began. Raises RequestError for a
        response that this server could not answer."""
        body = parse(asked.body, ResponsesBody, unsupported=UNSUPPORTED)
        toolbox = Toolbox.of(body.tools)
        prepared = await self._prepare(
            body,
            toolbox,
            body.sampling(self._answering.config.sampling_defaults),
            asked.earlier,
            asked.inputs,
            response["id"],
        )
        head = ResponseHead.again(response, reasoning_tokens=prepared.reasoning_tokens)
        return Making(
            head, prepared.make_parser, prepared.tokens, toolbox, prepared.constrains_calls
        )

    def job_again(self, asked: ResponseInputs, making: Making, prior_ids: bytes) -> Job:
        """A job that continues after these outputs. Raises RequestError like ``JobMaker.make``."""
        request = msgspec.structs.replace(asked.request, prior_output_ids=prior_ids)
        # This server may have fewer engines.
        received = {key: value for key, value in asked.body.items() if key not in RANK_FIELDS}
        return self._job([request], received, making)

    async def _prepare(
        self,
        body: ResponsesBody,
        toolbox: Toolbox,
        sampling: SamplingParams,
        earlier: Sequence[Item],
        inputs: Sequence[Item],
        own_id: str,
    ) -> PreparedChat:
        options = body.options(top_logprobs_num=None)
        passed_over: list[str] = []
        messages = messages_of(body.instructions, earlier, inputs, passed_over)
        request = chat_request(body, toolbox, messages, sampling, options)
        request = msgspec.structs.replace(request, passed_over=passed_over)
        return await self._chat.prepare(request, rid=body.rid or own_id)

    def _job(self, requests: Sequence[Request], received: dict[str, Any], making: Making) -> Job:
        return self._answering.jobs.make(
            requests,
            received=received,
            api="OpenAI",
            tool_schema="parameters" if making.constrains_calls else "",
        )

    async def count(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The answer of ``input_tokens``. Raises like ``open``."""
        body, warnings = self._answering.parser.read(
            raw, InputBody, route=COUNT_ROUTE, unsupported=UNSUPPORTED
        )
        body.check()
        messages = messages_of(
            body.instructions, self._earlier(body), items_of(body.input, self._store.item), []
        )
        toolbox = Toolbox.of(body.tools)
        warnings += toolbox.warnings
        request = chat_request(body, toolbox, messages, SamplingParams(), RequestOptions())
        ids = await self._chat.prompt_ids(request)
        warnings_field = {"warnings": warnings} if warnings else {}
        return {"object": "response.input_tokens", "input_tokens": len(ids)} | warnings_field

    def _earlier(self, body: InputBody) -> list[Item]:
        """The conversation that the request continues."""
        if body.previous_response_id is None:
            return []
        kept = self._store.get(body.previous_response_id, name="previous_response_id")
        return kept.conversation


class ResponseExchange:
    """Implements ``replies.Exchange``."""

    def __init__(
        self,
        job: Job,
        body: ResponsesBody,
        raw: dict[str, Any],
        making: Making,
        store: ResponseStore,
        *,
        is_kept: bool,
        inputs: Sequence[Item],
        earlier: Sequence[Item],
    ) -> None:
        """raw: the body as the client sent it. is_kept: whether ``store`` gets the complete
        response."""
        self.job = job
        self.is_stream = bool(body.stream)
        self.is_background = bool(body.background)
        self._is_kept = is_kept
        self.raw = raw
        self.making = making
        self._head = making.head
        self._parser = making.parser()
        self._output = OutputEvents(making.toolbox)
        self._store = store
        self.inputs, self.earlier = inputs, earlier
        self._num_events = 0

    def reply(self, outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
        self._read_whole(outputs[0])
        return self._keep(self._head.ended(outputs[0], self._output.items))

    async def chunks(self) -> AsyncGenerator[Event, None]:
        """Yields the events of the stream; the last one says how it ended. Raises like
        ``Job.pieces``."""
        begun = False
        async for pieces in self.job.pieces():
            for piece in pieces:
                events: list[Event] = []
                if not begun:
                    begun = True
                    response = self._head.begun("in_progress")
                    for name in ("created", "in_progress"):
                        events.append({"type": f"response.{name}", "response": response})
                events += self._output.feed(self._parser.feed(piece.text, piece.output.marks))
                if piece.output.finish is not None:
                    events += self._output.feed(self._parser.end(piece.output.marks))
                    is_complete = piece.output.finish.type == "stop"
                    events += self._output.end(is_complete=is_complete)
                    response = self._keep(self._head.ended(piece.output, self._output.items))
                    events.append({"type": f"response.{response['status']}", "response": response})
                for event in self._numbered(events):
                    yield event

    def failure(self, refusal: Refusal) -> Event:
        """The last event of a stream that an error has ended."""
        response = self._keep(self._head.failed(refusal, self._output.items))
        (event,) = self._numbered([{"type": "response.failed", "response": response}])
        return event

    def _read_whole(self, output: SequenceOutput) -> None:
        self._output.feed(self._parser.whole(output.text, output.marks))
        is_complete = output.finish is not None and output.finish.type == "stop"
        self._output.end(is_complete=is_complete)

    def _numbered(self, events: Sequence[Event]) -> Sequence[Event]:
        for number, event in enumerate(events, self._num_events):
            event["sequence_number"] = number
        self._num_events += len(events)
        return events

    def _keep(self, response: dict[str, Any]) -> dict[str, Any]:
        if self._is_kept:
            self._store.put(
                KeptResponse(response=response, inputs=self.inputs, earlier=self.earlier)
            )
        return response
