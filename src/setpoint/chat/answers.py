"""Sources of a chat's answers: an engine that the chat starts, or any server with OpenAI's API.

Both stream an answer in chunks; closing the stream early stops the answer at its source.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2
import msgspec

from setpoint.chat.conversation import Conversation, native_params
from setpoint.core.errors import ContextLengthError, RequestError, reason_of
from setpoint.offline.offline_engine import Engine

_CONNECT_S = 10.0


@dataclass(slots=True, frozen=True)
class AnswerChunk:
    text: str = ""
    num_tokens: int | None = None
    """Number of tokens in the answer so far, if the source reports it."""
    finish: str | None = None
    """"stop", "length" or "abort", with the last text."""


class AnswerSource(Protocol):
    name: str
    """Name of the model."""

    def answer(
        self, conversation: Conversation, question: str
    ) -> Generator[AnswerChunk, None, None]:
        """Stream the answer. Raises RequestError (ContextLengthError if the conversation is too
        long) or EngineDeadError."""

    def close(self) -> None: ...


class LocalSource:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name: str = engine.get_server_info()["served_model_name"]

    def answer(
        self, conversation: Conversation, question: str
    ) -> Generator[AnswerChunk, None, None]:
        sampling = {**self._engine.chat_defaults, **native_params(conversation.params)}
        with closing(self._engine.stream_chat(conversation.messages(question), sampling)) as pieces:
            for piece in pieces:
                meta = piece["meta_info"]
                finish = None if meta["finish_reason"] is None else meta["finish_reason"]["type"]
                yield AnswerChunk(piece["text"], meta["completion_tokens"], finish)

    def close(self) -> None:
        self._engine.shutdown()


class RemoteSource:
    """A server behind a base URL such as ``http://127.0.0.1:30000/v1``."""

    def __init__(self, base_url: str, *, model: str | None, api_key: str | None) -> None:
        """Connect and ask for the list of models, which detects a wrong URL or key at once. Raises
        RequestError."""
        self._url = base_url
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._client = httpx2.Client(
                base_url=base_url,
                headers=headers,
                follow_redirects=True,
                timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            )
            response = self._client.get("models", timeout=_CONNECT_S)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _unreachable(base_url, error) from None
        _check(response, base_url)
        served = _served(response)
        self.name: str = model or _first_model(served, base_url)
        self.is_listed = self.name in served
        """Whether the server has a model of this name; one with another model may answer all the
        same."""

    def answer(
        self, conversation: Conversation, question: str
    ) -> Generator[AnswerChunk, None, None]:
        body = {
            "model": self.name,
            "messages": conversation.messages(question),
            "stream": True,
            "stream_options": {"include_usage": True},
            **conversation.params,
        }
        is_finished = False
        try:
            with self._client.sse("chat/completions", method="POST", json=body) as events:
                _check(events.response, self._url)
                for event in events:
                    if event.data == "[DONE]":
                        break
                    for piece in _answer_chunks(event.data):
                        is_finished = is_finished or piece.finish is not None
                        yield piece
        except httpx2.HTTPError as error:
            raise _unreachable(self._url, error) from None
        if not is_finished:
            raise RequestError("The server broke off in the middle of the answer.", status_code=502)

    def close(self) -> None:
        self._client.close()


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct, frozen=True):
    """The fields of a ``chat.completion.chunk`` that a chat reads."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


def _answer_chunks(data: str) -> Generator[AnswerChunk, None, None]:
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except msgspec.DecodeError as error:
        raise RequestError(
            f"The server sent something that is not part of a chat answer: {error}.",
            status_code=502,
        ) from None
    if chunk.error is not None:
        raise _refusal(chunk.error, 500)
    num_tokens = None if chunk.usage is None else chunk.usage.completion_tokens
    for choice in chunk.choices:
        yield AnswerChunk(choice.delta.content or "", num_tokens, choice.finish_reason)
    if not chunk.choices:
        yield AnswerChunk(num_tokens=num_tokens)


def _check(response: httpx2.Response, url: str) -> None:
    """Raise RequestError for any status but success."""
    if response.is_success:
        return
    if response.status_code in (401, 403):
        raise RequestError(
            f"{url} refused the API key; pass the right one with --api-key, or in the environment"
            " variable OPENAI_API_KEY.",
            status_code=401,
        )
    try:
        content = msgspec.json.decode(response.read())
    except msgspec.DecodeError:
        content = None
    refusal = _refusal(
        content.get("error", content) if isinstance(content, dict) else content,
        response.status_code,
    )
    if response.status_code == 404:
        raise RequestError(
            f"{response.url}: {refusal.message.rstrip('.')} (status 404; a base URL usually ends in"
            " /v1).",
            status_code=404,
        )
    raise refusal


def _refusal(error: Any, status_code: int) -> RequestError:
    """The message of an error body, in each of the shapes that servers use: an object with a
    message, or a text."""
    fields = error if isinstance(error, dict) else {"message": error}
    message = str(
        fields.get("message") or f"The server answered with status {status_code} and no message."
    )
    # Servers do not agree on an error code for this, but all their messages mention tokens and
    # either the context or a length.
    words = message.lower()
    is_too_long = fields.get("code") == "context_length_exceeded" or (
        "token" in words and ("context" in words or "length" in words)
    )
    return (
        ContextLengthError(message)
        if is_too_long
        else RequestError(message, status_code=status_code)
    )


def _served(response: httpx2.Response) -> list[str]:
    """The names in a server's list of models."""
    try:
        return [each.id for each in msgspec.json.decode(response.content, type=_Models).data]
    except msgspec.DecodeError:
        return []


def _first_model(served: list[str], url: str) -> str:
    if not served:
        raise RequestError(
            f"{url} does not list its models; name one: setpoint chat MODEL --base-url {url}",
            status_code=502,
        )
    return served[0]


def _unreachable(url: str, error: Exception) -> RequestError:
    reason = reason_of(error)
    return RequestError(f"{url} cannot be reached: {reason}.", status_code=503)
