"""The table of the OpenAI APIs that a service answers, by route."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from setpoint.frontend.apis.openai.chat import ChatApi
from setpoint.frontend.apis.openai.completions import CompletionApi
from setpoint.frontend.apis.openai.embeddings import EmbeddingApi
from setpoint.frontend.apis.openai.replies import Exchange
from setpoint.frontend.apis.openai.responses.api import ResponsesApi
from setpoint.frontend.service import Service


class Api(Protocol):
    """One API. ``open`` checks a body, without running anything yet; it raises RequestError (400)
    for a body that cannot be honoured."""

    @property
    def route(self) -> str: ...

    @property
    def body(self) -> type[msgspec.Struct]:
        """The struct that its bodies are decoded to."""
        ...

    async def open(self, raw: dict[str, Any]) -> Exchange: ...


def chunk_apis(service: Service) -> dict[str, Api]:
    """The APIs whose streams are chunks of one kind, as route -> API."""
    apis: list[Api] = [ChatApi(service), CompletionApi(service), EmbeddingApi(service)]
    return {api.route: api for api in apis}


def openai_apis(service: Service) -> dict[str, Api]:
    """All APIs as batches use them, as route -> API. A batch's responses are in its output; if they
    were kept as well, those of clients would have to go."""
    responses = ResponsesApi(service, keeps=False)
    return {**chunk_apis(service), responses.route: responses}
