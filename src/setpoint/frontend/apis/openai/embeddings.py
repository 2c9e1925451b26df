"""Implements ``/v1/embeddings`` (docs/sglang/api.md#openai-routes) from body to reply, without
HTTP."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

import msgspec

from setpoint.core import request as core
from setpoint.core.errors import RequestError
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.bodies.openai_bodies import AnyBody, Side, cut_of
from setpoint.frontend.apis.openai.bodies.prompt_fields import read_prompts
from setpoint.frontend.apis.openai.vector_bytes import Dtype, packed_vector
from setpoint.frontend.chat.chat_request import ChatRequest
from setpoint.frontend.chat.turn.prepare import Chat
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.embedding import check_dimensions, vector_of
from setpoint.frontend.intake import MAX_SEQUENCES, namespace, new_rid
from setpoint.frontend.jobs import Job, SequenceOutput

UNSUPPORTED = ("lora_path", "return_hidden_states", "stream")


class EmbeddingBody(AnyBody, kw_only=True):
    """The texts are in ``input`` or, as in vLLM, in ``messages``, which holds one conversation or
    several."""

    input: str | list[Any] | None = None
    messages: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = False
    continue_final_message: bool | None = False
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Dtype | None = None
    """Type of the numbers in base64, float32 by default."""
    endianness: Literal["native", "big", "little"] | None = None
    """Byte order of these numbers; "native" means little."""
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None

    def check(self) -> None:
        super().check()
        if (self.input is None) == (self.messages is None):
            raise RequestError("Give exactly one of input and messages.")

    def conversations(self) -> list[list[Any]] | None:
        """The conversations to embed; None if the body has texts or token ids instead. Raises
        RequestError (400)."""
        if self.messages is None:
            given = self.input if isinstance(self.input, list) else []
            if given and all(map(_is_message, given)):
                return [given]
            return given if given and all(map(_is_conversation, given)) else None
        if not self.messages:
            raise RequestError("messages must not be empty.")
        if all(isinstance(each, dict) for each in self.messages):
            return [self.messages]
        if all(map(_is_conversation, self.messages)):
            return self.messages
        raise RequestError("messages must be a conversation, or a list of conversations.")


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and "role" in given


def _is_conversation(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(map(_is_message, given))


class EmbeddingApi:
    route = "/v1/embeddings"
    body: type[msgspec.Struct] = EmbeddingBody

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._chat = Chat(answering)

    async def open(self, raw: dict[str, Any]) -> EmbeddingExchange:
        """Check and tokenize a body. Raises RequestError for one that cannot be honoured."""
        body, warnings = self._answering.parser.read(
            raw, EmbeddingBody, route=self.route, unsupported=UNSUPPORTED
        )
        body.check()
        check_dimensions(body.dimensions, self._answering.config.pooling)
        job = self._answering.jobs.make(await self._requests(body), received=raw, api="OpenAI")
        return EmbeddingExchange(job, body, self._answering.config, warnings)

    async def _requests(self, body: EmbeddingBody) -> list[core.Request]:
        intake, rid = self._answering.intake, body.rid or new_rid()
        prompts = await self._prompts(body)
        shared = namespace(body.extra_key, body.cache_salt)
        options = RequestOptions(
            namespace=shared, priority=body.priority, routing_key=body.routing_key or ""
        )
        rids = [rid] if len(prompts) == 1 else [f"{rid}_{index}" for index in range(len(prompts))]
        return [
            intake.embedding_request(prompt, options, rid=own)
            for prompt, own in zip(prompts, rids, strict=True)
        ]

    async def _prompts(self, body: EmbeddingBody) -> list[core.Ids]:
        cut = cut_of(body, keeps_end=False)
        conversations = body.conversations()
        if conversations is None:
            assert body.input is not None, "checked"
            return await read_prompts(body.input, self._answering.intake, name="input", cut=cut)
        if len(conversations) > MAX_SEQUENCES:
            raise RequestError(f"One request may ask for at most {MAX_SEQUENCES} sequences.")
        return [
            await self._chat.prompt_ids(
                ChatRequest(
                    messages=messages,
                    sampling=SamplingParams(),
                    options=RequestOptions(),
                    variables=body.chat_template_kwargs or {},
                    cut=cut,
                    continue_final_message=bool(body.continue_final_message),
                    add_generation_prompt=bool(body.add_generation_prompt),
                )
            )
            for messages in conversations
        ]


class EmbeddingExchange:
    """Implements ``replies.Exchange``."""

    is_stream = False

    def __init__(
        self, job: Job, body: EmbeddingBody, config: FrontendConfig, warnings: list[str]
    ) -> None:
        self.job = job
        self._body = body
        self._config = config
        self._warnings = [*warnings, *body.other_model(config.served_model_name)]

    def reply(self, outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
        num_prompt = sum(output.num_prompt for output in outputs)
        usage: dict[str, Any] = {"prompt_tokens": num_prompt, "total_tokens": num_prompt}
        if self._config.enable_cache_report:
            usage["prompt_tokens_details"] = {
                "cached_tokens": sum(output.num_cached for output in outputs)
            }
        data = [
            {"object": "embedding", "index": output.index, "embedding": self._vector(output)}
            for output in outputs
        ]
        warnings_field = {"warnings": self._warnings} if self._warnings else {}
        return {
            "object": "list",
            "data": data,
            "model": self._config.served_model_name,
            "usage": usage,
            **warnings_field,
        }

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        raise AssertionError("a vector comes whole")

    def _vector(self, output: SequenceOutput) -> str | list[float]:
        """The vector as numbers or as base64 of numbers in the type and byte order of the body. The
        openai client asks for base64 of little-endian float32, the default, and decodes it
        itself."""
        body = self._body
        vector = vector_of(output, self._config.pooling, body.dimensions)
        if body.encoding_format == "base64":
            packed = packed_vector(vector, body.embed_dtype or "float32")
            if body.endianness == "big":
                packed = packed.byteswap()
            return base64.b64encode(packed.tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers
