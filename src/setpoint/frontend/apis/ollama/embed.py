"""Implements ``/api/embed`` and the older ``/api/embeddings`` (docs/ollama.md) from body to reply,
without HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.request import Ids
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.ollama.ollama_bodies import (
    EmbedBody,
    EmbeddingsBody,
)
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.embedding import check_dimensions, vector_of
from setpoint.frontend.intake import MAX_SEQUENCES
from setpoint.frontend.jobs import Job, SequenceOutput

EMBED_ROUTE = "/api/embed"
EMBEDDINGS_ROUTE = "/api/embeddings"


class EmbedApi:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def open(self, raw: dict[str, Any]) -> EmbedExchange:
        """Check and tokenize a body. Raises RequestError for one that cannot be honoured."""
        body, warnings = self._answering.parser.read(raw, EmbedBody, route=EMBED_ROUTE)
        warnings += body.warnings(self._answering.config)
        texts = [body.input] if isinstance(body.input, str) else body.input
        return await self._exchange(raw, body, texts, warnings)

    async def open_one(self, raw: dict[str, Any]) -> EmbedExchange:
        """Like ``open``, for the older route."""
        body, warnings = self._answering.parser.read(raw, EmbeddingsBody, route=EMBEDDINGS_ROUTE)
        warnings += body.warnings(self._answering.config)
        return await self._exchange(raw, body, [body.prompt], warnings)

    async def _exchange(
        self,
        raw: dict[str, Any],
        body: EmbedBody | EmbeddingsBody,
        texts: Sequence[str],
        warnings: list[str],
    ) -> EmbedExchange:
        dimensions = body.dimensions if isinstance(body, EmbedBody) else None
        truncate = bool(body.truncate) if isinstance(body, EmbedBody) else True
        config, intake = self._answering.config, self._answering.intake
        if len(texts) > MAX_SEQUENCES:
            raise RequestError(f"input must have at most {MAX_SEQUENCES} texts.")
        check_dimensions(dimensions, config.pooling)
        requests = []
        for index, text in enumerate(texts):
            ids = await (self._cut(text, index, warnings) if truncate else intake.encode(text))
            requests.append(intake.embedding_request(ids))
        job = self._answering.jobs.make(requests, received=raw, api="Ollama")
        return EmbedExchange(self._answering.config, job, body.keep_s, dimensions, warnings)

    async def _cut(self, text: str, index: int, warnings: list[str]) -> Ids:
        """The token ids of ``text``, as many as fit into the context."""
        config = self._answering.config
        most = min(config.context_len, config.max_req_input_len) - 1
        head = text[: (most + 1) * self._answering.text.tokenizer.max_token_chars]
        ids = await self._answering.text.encode(head)
        if len(ids) > most:
            warnings.append(f"input[{index}] was cut to its first {most} tokens.")
        return ids[:most]


class EmbedExchange:
    """One request between its checked body and its reply."""

    def __init__(
        self,
        config: FrontendConfig,
        job: Job,
        keep_s: float,
        dimensions: int | None,
        warnings: list[str],
    ) -> None:
        self.job = job
        self.keep_s = keep_s
        self._config = config
        self._dimensions = dimensions
        self._warnings = {"warnings": warnings} if warnings else {}

    def reply(self, outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
        last = max((output.e2e_s for output in outputs), default=0.0)
        return {
            "model": self._config.served_model_name,
            "embeddings": [self._vector(output) for output in outputs],
            "total_duration": round(last * 1e9),
            "load_duration": round(max((each.held_s for each in outputs), default=0.0) * 1e9),
            "prompt_eval_count": sum(output.num_prompt for output in outputs),
            **self._warnings,
        }

    def reply_one(self, outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
        """The answer of the older route."""
        return {"embedding": self._vector(outputs[0]), **self._warnings}

    def _vector(self, output: SequenceOutput) -> list[float]:
        numbers: list[float] = vector_of(output, self._config.pooling, self._dimensions).tolist()
        return numbers
