"""Chat completions: ``/v1/chat/completions`` (docs/sglang/api.md#openai-routes) from body to reply,
without HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from setpoint.core import request as core
from setpoint.frontend.apis.openai.logprobs import chat_logprobs
from setpoint.frontend.apis.openai.protocol import UNSUPPORTED, ChatBody, flatten_messages
from setpoint.frontend.apis.openai.replies import Reply, TextExchange, finish_fields
from setpoint.frontend.intake import new_rid
from setpoint.frontend.jobs import Piece, SequenceOutput
from setpoint.frontend.service import Service
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.tokenizer import Tokenizer


class ChatApi:
    route = "/v1/chat/completions"
    body: type[msgspec.Struct] = ChatBody

    def __init__(self, service: Service) -> None:
        self._service = service

    async def open(self, raw: dict[str, Any]) -> TextExchange:
        """Check and tokenize a body. Raises RequestError for one that cannot be honoured."""
        body, warnings = self._service.read(
            raw, ChatBody, route=self.route, unsupported=UNSUPPORTED
        )
        body.check()
        rid = body.rid or new_rid()
        job = self._service.job(await self._requests(body, rid), received=raw, openai=True)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        reply = Reply(rid, body, kind=kind, config=self._service.config, warnings=warnings)
        return TextExchange(
            job, reply, ChatChoices(self._service.text.tokenizer), is_stream=bool(body.stream)
        )

    async def _requests(self, body: ChatBody, rid: str) -> list[core.Request]:
        sampling = body.sampling(
            self._service.config.sampling_defaults, max_new_tokens=body.max_new_tokens
        )
        top = (body.top_logprobs or 0) if body.logprobs else None
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        text = await chat_prompt(
            self._service.text,
            body.messages,
            variables=variables,
            continue_final_message=body.continue_final_message,
        )
        # The template writes the special tokens itself.
        prompt = await self._service.intake.encode(text, add_special_tokens=False)
        return self._service.intake.requests(
            prompt, sampling, body.options(top_logprobs_num=top), rid=rid
        )


async def chat_prompt(
    text: TextProcessor,
    messages: list[dict[str, Any]],
    *,
    variables: Mapping[str, Any],
    continue_final_message: bool | None = False,
) -> str:
    """What the model reads. Raises RequestError for messages that are not text, or that the
    template refuses."""
    flat = flatten_messages(messages)
    started = ""
    if continue_final_message and flat[-1]["role"] == "assistant":
        started = flat.pop()["content"]
    return await text.render_chat(flat, variables=variables) + started


class ChatChoices:
    """Choices of a chat, whole or as a stream: the role first, then deltas, the finish reason in
    one of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(self, output: SequenceOutput) -> dict[str, Any]:
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "reasoning_content": None},
            "logprobs": (
                chat_logprobs(self._tokenizer, output.logprobs)
                if output.request.return_logprob
                else None
            ),
            **finish_fields(output),
        }

    def opening(self, output: SequenceOutput) -> dict[str, Any]:
        return _chunk_choice(
            output, {"role": "assistant", "content": "", "reasoning_content": None}
        )

    def choice(self, piece: Piece) -> dict[str, Any] | None:
        logprobs = (
            None if piece.logprobs is None else chat_logprobs(self._tokenizer, [piece.logprobs])
        )
        if not piece.text and logprobs is None:
            return None
        return _chunk_choice(
            piece.output, {"content": piece.text, "reasoning_content": None}, logprobs=logprobs
        )

    def closing(self, output: SequenceOutput) -> dict[str, Any]:
        return {**_chunk_choice(output, {"reasoning_content": None}), **finish_fields(output)}


def _chunk_choice(
    output: SequenceOutput, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "index": output.index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": None,
        "matched_stop": None,
    }
