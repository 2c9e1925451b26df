"""The table of the OpenAI APIs that a service answers, by route."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.chat import ChatApi
from setpoint.frontend.apis.openai.completions import CompletionApi
from setpoint.frontend.apis.openai.embeddings import EmbeddingApi
from setpoint.frontend.apis.openai.replies import Exchange
from setpoint.frontend.apis.openai.responses.api import ResponsesApi


class Api(Protocol):
    """One API. ``open`` checks a body and runs nothing yet; it raises RequestError (400) for a body
    that cannot be honoured."""

    @property
    def route(self) -> str: ...

    @property
    def body(self) -> type[msgspec.Struct]:
        """The struct that its bodies are decoded to."""
        ...

    async def open(self, raw: dict[str, Any]) -> Exchange: ...


def chunk_apis(answering: Answering) -> dict[str, Api]:
    """Route -> API, for the APIs whose streams consist of chunks of one kind."""
    apis: list[Api] = [ChatApi(answering), CompletionApi(answering), EmbeddingApi(answering)]
    return {api.route: api for api in apis}


def openai_apis(answering: Answering) -> dict[str, Api]:
    """Route -> API, for all APIs, as batches use them. Responses of a batch are only in its output:
    if they were stored, they would displace those of clients."""
    responses = ResponsesApi(answering, keeps=False)
    return {**chunk_apis(answering), responses.route: responses}
