"""Embeddings: ``/v1/embeddings`` (docs/sglang/api.md#openai-routes) from body to reply, without
HTTP."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

import msgspec

from setpoint.core import request as core
from setpoint.frontend.apis.openai.prompts import read_prompts
from setpoint.frontend.apis.openai.protocol import AnyBody
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.embedding import check_dimensions, vector_of
from setpoint.frontend.intake import Options, namespace, new_rid
from setpoint.frontend.jobs import Job, SequenceOutput
from setpoint.frontend.service import Service

UNSUPPORTED = ("lora_path", "routed_dp_rank", "return_hidden_states", "stream")


class EmbeddingBody(AnyBody, kw_only=True):
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class EmbeddingApi:
    route = "/v1/embeddings"
    body: type[msgspec.Struct] = EmbeddingBody

    def __init__(self, service: Service) -> None:
        self._service = service

    async def open(self, raw: dict[str, Any]) -> EmbeddingExchange:
        """Check and tokenize a body. Raises RequestError for one that cannot be honoured."""
        body, warnings = self._service.read(
            raw, EmbeddingBody, route=self.route, unsupported=UNSUPPORTED
        )
        body.check()
        check_dimensions(body.dimensions, self._service.config.pooling)
        job = self._service.job(await self._requests(body), received=raw, api="OpenAI")
        return EmbeddingExchange(job, body, self._service.config, warnings)

    async def _requests(self, body: EmbeddingBody) -> list[core.Request]:
        intake, rid = self._service.intake, body.rid or new_rid()
        prompts = await read_prompts(body.input, intake, name="input")
        shared = namespace(body.extra_key, body.cache_salt)
        options = Options(
            namespace=shared, priority=body.priority, routing_key=body.routing_key or ""
        )
        rids = [rid] if len(prompts) == 1 else [f"{rid}_{index}" for index in range(len(prompts))]
        return [
            intake.embedding_request(prompt, options, rid=own)
            for prompt, own in zip(prompts, rids, strict=True)
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
            {"object": "embedding", "index": output.index, "embedding": self._shown(output)}
            for output in outputs
        ]
        told = {"metadata": {"warnings": " ".join(self._warnings)}} if self._warnings else {}
        return {
            "object": "list",
            "data": data,
            "model": self._config.served_model_name,
            "usage": usage,
            **told,
        }

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        raise AssertionError("a vector comes whole")

    def _shown(self, output: SequenceOutput) -> str | list[float]:
        """The vector as numbers or as base64 of little-endian float32 numbers, which the openai
        client asks for and decodes by itself."""
        vector = vector_of(output, self._config.pooling, self._body.dimensions)
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers
