"""The calls that a program can make to a model, as coroutines on its event loop: lists of any
length, conversations, streams. They take unchecked Python values. This module does not know on
which thread or loop the caller runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.request import Request, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.sglang.native import NativeApi, PreparedRequest
from setpoint.frontend.apis.sglang.sglang_bodies import EncodeBody, GenerateBody, naming_prompt
from setpoint.frontend.chat.chat_request import ChatRequest
from setpoint.frontend.chat.turn.prepare import Chat
from setpoint.frontend.feed import QUEUE_TARGET, BatchGate, EngineView
from setpoint.frontend.jobs import SequenceOutput
from setpoint.offline.call_arguments import body_of, checked_sampling, prompt_fields

Pieces = AsyncGenerator[list[dict[str, Any]], None]
"""Yields, for each wake-up of a stream, the pieces that it brought."""


class Calls:
    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self._native = NativeApi(answering)
        self._chat = Chat(answering)

    @property
    def chat_defaults(self) -> dict[str, Any]:
        return {**self.answering.config.sampling_defaults, "max_new_tokens": None}

    async def generate(self, prompt: Any, sampling: Any, request: Mapping[str, Any]) -> Any:
        body = self._generate_body(prompt_fields(prompt, request), sampling, request)
        return [] if body.text == [] else await self._generate(body)

    async def chat(
        self,
        messages: Any,
        sampling: Any,
        variables: Mapping[str, Any] | None,
        request: Mapping[str, Any],
    ) -> Any:
        body = await self._chat_body({}, messages, sampling, variables, request)
        return await self._generate(body)

    def stream(self, prompt: Any, sampling: Any, request: Mapping[str, Any]) -> Pieces:
        return self._stream(
            self._generate_body(
                {**prompt_fields(prompt, request), "stream": True}, sampling, request
            )
        )

    async def stream_chat(
        self,
        messages: Any,
        sampling: Any,
        variables: Mapping[str, Any] | None,
        request: Mapping[str, Any],
    ) -> Pieces:
        body = await self._chat_body({"stream": True}, messages, sampling, variables, request)
        async with aclosing(self._stream(body)) as groups:
            async for pieces in groups:
                yield pieces

    async def encode(self, prompt: Any, request: Mapping[str, Any]) -> Any:
        if self.answering.config.pooling is None:
            raise RequestError(
                "This Engine generates text. To get embeddings, create an Engine with"
                " is_embedding=True."
            )
        body = body_of(EncodeBody, prompt_fields(prompt, request), request)
        if body.text == []:
            return []
        prepared = await self._native.prepare_encode(body, max_sequences=None)
        return await self._run(
            prepared, lambda output: self._native.embedding(output, prepared, body.dimensions)
        )

    async def abort(self, rid: str, *, abort_all: bool) -> None:
        if not rid and not abort_all:
            raise RequestError("Give the beginning of a rid, or abort_all=True.")
        self.answering.engine.abort(rid, abort_all=abort_all)

    async def flush_cache(self) -> bool:
        return await self.answering.engine.orders.flush()

    async def _generate(self, body: GenerateBody) -> Any:
        prepared = await self._native.prepare(body, max_sequences=None)
        return await self._run(prepared, lambda output: self._native.result(output, prepared))

    async def _stream(self, body: GenerateBody) -> Pieces:
        if body.text == []:
            return
        prepared = await self._native.prepare(body)
        with self.answering.jobs.make(prepared.flat(), received={}) as job:
            async for pieces in job.pieces():
                results = [
                    self._native.result(piece.output, prepared, piece=piece) for piece in pieces
                ]
                if prepared.is_list:
                    for piece, result in zip(pieces, results, strict=True):
                        result["index"] = piece.output.index
                yield results

    async def _run(
        self, prepared: PreparedRequest, make: Callable[[SequenceOutput], dict[str, Any]]
    ) -> Any:
        """The results of ``make`` for every sequence, in order. Requests are submitted gradually,
        so that the engine's queue stays short. The first failure aborts the others."""
        results: list[list[dict[str, Any]]] = [[] for _ in prepared.requests]
        view = EngineView(self.answering.engine)
        gate = BatchGate(view)

        async def run(index: int, requests: list[Request]) -> None:
            try:
                with (
                    naming_prompt(index, len(results), is_list=len(results) > 1),
                    self.answering.jobs.make(requests, received={}) as job,
                ):
                    results[index] = [make(output) for output in await job.wait()]
            finally:
                gate.closed(len(requests), 0)

        watcher = (
            asyncio.create_task(view.watch(gate.changed)) if len(results) > QUEUE_TARGET else None
        )
        try:
            async with asyncio.TaskGroup() as group:
                for index, requests in enumerate(prepared.requests):
                    while not gate.has_room(0, held_bytes=0):
                        gate.changed.clear()
                        await gate.changed.wait()
                    gate.opened(len(requests), 0)
                    group.create_task(run(index, requests))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            if watcher is not None:
                watcher.cancel()
        flat = [result for each in results for result in each]
        return flat if prepared.is_list else flat[0]

    async def _chat_body(
        self,
        fixed: dict[str, Any],
        messages: Any,
        sampling: Any,
        variables: Mapping[str, Any] | None,
        request: Mapping[str, Any],
    ) -> GenerateBody:
        ids = await self._chat_ids(messages, variables or {})
        return self._generate_body(
            {**fixed, "input_ids": ids},
            self.chat_defaults if sampling is None else sampling,
            request,
        )

    def _generate_body(
        self, fixed: dict[str, Any], sampling: Any, request: Mapping[str, Any]
    ) -> GenerateBody:
        if self.answering.config.pooling is not None:
            raise RequestError(
                "This Engine makes embeddings (is_embedding=True) and does not generate text; call"
                " encode()."
            )
        body = body_of(GenerateBody, fixed, request)
        if isinstance(sampling, Sequence) and not isinstance(sampling, str):
            return msgspec.structs.replace(
                body, sampling_params=[checked_sampling(each) for each in sampling]
            )
        return msgspec.structs.replace(body, sampling_params=checked_sampling(sampling))

    async def _chat_ids(
        self, messages: Any, variables: Mapping[str, Any]
    ) -> list[int] | list[list[int]]:
        """The token ids of a conversation, or of each conversation in a list."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError(
                'messages must be a list like [{"role": "user", "content": "Hello"}], or a list of'
                " such lists, "
                f"{'not an empty one' if messages == [] else f'not {type(messages).__name__}'}."
            )
        if isinstance(messages[0], Mapping):
            return await self._conversation_ids(messages, variables)
        ids = []
        for index, conversation in enumerate(messages):
            with naming_prompt(index, len(messages)):
                ids.append(await self._conversation_ids(conversation, variables))
        return ids

    async def _conversation_ids(self, messages: Any, variables: Mapping[str, Any]) -> list[int]:
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"messages must be a list of dicts, not {type(messages).__name__}.")
        _ = self.answering.text.tokenizer
        if not self.answering.text.has_chat_template:
            raise RequestError(
                'This model has no chat template. Create the Engine with chat_template="FILE", or'
                " call generate()."
            )
        request = ChatRequest(
            messages=messages,
            sampling=SamplingParams(),
            options=RequestOptions(),
            variables=variables,
        )
        ids = await self._chat.prompt_ids(request)
        return ids.tolist()  # type: ignore[no-any-return]
