"""The APIs that servers offer: turns a prompt into a request body, and the bytes of an answer into
its RequestRecord.

Works on JSON bytes. It knows nothing of connections and times nothing itself: the caller passes
``now``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from setpoint.bench.request_record import Prompt, RequestRecord

DONE = b"[DONE]"


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerationOptions:
    """What all requests of a run have in common."""

    model: str
    stream: bool = True
    ignore_eos: bool = True
    extra: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Backend:
    path: str
    body: Callable[[Prompt, GenerationOptions], dict[str, Any]]
    read: Callable[[RequestRecord, bytes, float], None]
    """Reads one event of a stream, or a whole answer, into the record. Raises msgspec.MsgspecError
    for bytes that are not in this API's format."""
    takes_ids: bool = True
    generates: bool = True


def on_event(backend: Backend, record: RequestRecord, data: bytes, now: float) -> None:
    """Read an event's data into the record. Never raises: if it cannot be read, the record
    fails."""
    if data == DONE:
        record.is_finished = True
        return
    try:
        backend.read(record, data, now)
    except msgspec.MsgspecError as error:
        record.fail(f"the answer cannot be read: {error}")


# -- SGLang's /generate


class _Meta(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    cached_tokens_details: dict[str, Any] | None = None
    finish_reason: dict[str, Any] | None = None


class _Generated(msgspec.Struct):
    text: str = ""
    meta_info: _Meta | None = None
    error: Any = None


_generated = msgspec.json.Decoder(_Generated)


def _generate_body(prompt: Prompt, options: GenerationOptions) -> dict[str, Any]:
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": prompt.output_len,
        "ignore_eos": options.ignore_eos,
    }
    key = "text" if isinstance(prompt.content, str) else "input_ids"
    return {
        key: prompt.content,
        "sampling_params": sampling,
        "stream": options.stream,
        **options.extra,
    }


def _read_generated(record: RequestRecord, data: bytes, now: float) -> None:
    chunk = _generated.decode(data)
    if chunk.error is not None:
        record.fail(_message(chunk.error))
    meta = chunk.meta_info
    if meta is None:
        return
    before = record.num_outputs or 0
    new = (
        (1 if chunk.text else 0)
        if meta.completion_tokens is None
        else meta.completion_tokens - before
    )
    if new > 0:
        record.add_tokens(now, new)
    record.num_outputs, record.num_prompt = meta.completion_tokens, meta.prompt_tokens
    record.cached = _cached(meta)
    if len(record.pieces) == 1 and chunk.text.startswith(record.pieces[0]):
        record.pieces = [chunk.text]  # the answer so far; some servers send only what is new
    elif chunk.text:
        record.pieces.append(chunk.text)
    if meta.finish_reason is not None:
        record.is_finished = True
        if meta.finish_reason.get("type") == "abort":
            record.fail(f"aborted: {meta.finish_reason.get('message', '')}")


def _cached(meta: _Meta) -> dict[str, int]:
    details = {
        name: count
        for name, count in (meta.cached_tokens_details or {}).items()
        if isinstance(count, int)
    }
    return details or {"device": meta.cached_tokens}


# -- OpenAI's


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Embeddings(msgspec.Struct):
    data: list[msgspec.Raw]
    usage: _Usage | None = None


_completion = msgspec.json.Decoder(_Completion)
_embeddings = msgspec.json.Decoder(_Embeddings)


def _common_fields(prompt: Prompt, options: GenerationOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "temperature": 0.0,
        "stream": options.stream,
        "ignore_eos": options.ignore_eos,
    }
    if options.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _completion_body(prompt: Prompt, options: GenerationOptions) -> dict[str, Any]:
    return {
        **_common_fields(prompt, options),
        "prompt": prompt.content,
        "max_tokens": prompt.output_len,
        **options.extra,
    }


def _chat_body(prompt: Prompt, options: GenerationOptions) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt.content}]
    return {
        **_common_fields(prompt, options),
        "messages": messages,
        "max_completion_tokens": prompt.output_len,
        **options.extra,
    }


def _embedding_body(prompt: Prompt, options: GenerationOptions) -> dict[str, Any]:
    return {"model": options.model, "input": prompt.content, **options.extra}


def _read_completion(record: RequestRecord, data: bytes, now: float) -> None:
    chunk = _completion.decode(data)
    if chunk.error is not None:
        record.fail(_message(chunk.error))
    for choice in chunk.choices:
        if text := _text(choice):
            record.add_tokens(now, 1)
            record.pieces.append(text)
        if choice.finish_reason is not None:
            record.is_finished = True
            if choice.finish_reason == "abort":
                record.fail("aborted")
    if chunk.usage is not None:
        _read_usage(record, chunk.usage)


def _read_embeddings(record: RequestRecord, data: bytes, now: float) -> None:
    answer = _embeddings.decode(data)
    if not answer.data:
        record.fail("the answer holds no embedding")
    if answer.usage is not None:
        _read_usage(record, answer.usage)
    record.num_outputs = 0
    record.is_finished = True


def _read_usage(record: RequestRecord, usage: _Usage) -> None:
    record.num_outputs, record.num_prompt = usage.completion_tokens, usage.prompt_tokens
    details = usage.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        record.cached = {"device": details.cached_tokens}


def _text(choice: _Choice) -> str:
    message = choice.delta or choice.message
    if message is None:
        return choice.text or ""
    return (message.reasoning_content or message.reasoning or "") + (message.content or "")


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


_NATIVE = Backend("/generate", _generate_body, _read_generated)
_TEXT = Backend("/v1/completions", _completion_body, _read_completion)
_CHAT = Backend("/v1/chat/completions", _chat_body, _read_completion, takes_ids=False)
_EMBEDDING = Backend("/v1/embeddings", _embedding_body, _read_embeddings, generates=False)

BACKENDS = {
    "sglang": _NATIVE,
    "sglang-native": _NATIVE,
    "sglang-oai": _TEXT,
    "sglang-oai-chat": _CHAT,
    "sglang-embedding": _EMBEDDING,
    "vllm": _TEXT,
    "vllm-chat": _CHAT,
    "vllm-embedding": _EMBEDDING,
}
