"""SGLang's own routes: ``/generate``, ``/encode``, and tokenization (FACTS §5.1, §5.3–5.5)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from setpoint.core import request as core
from setpoint.core.errors import RequestError
from setpoint.core.sampling import NOT_YET, SamplingParams
from setpoint.frontend.bodies import as_id_lists, parse
from setpoint.frontend.embedding import check_dimensions, vector_of
from setpoint.frontend.http.bodies import read_object, read_openai_object
from setpoint.frontend.http.errors import UnknownSamplingKeyError, json_response, native_stream_error
from setpoint.frontend.http.sse import EventStream, cancelled_with_client, event
from setpoint.frontend.intake import MAX_SEQUENCES, Options, namespace, new_rid
from setpoint.frontend.jobs import Job, Piece, SequenceOutput
from setpoint.frontend.logprobs import NativeLogprobs
from setpoint.frontend.service import Service

UNSUPPORTED = (
    *("input_embeds", "image_data", "video_data", "audio_data", "lora_path", "session_params", "session_id"),
    *("custom_logit_processor", "return_hidden_states", "return_routed_experts", "return_prompt_token_ids", "bootstrap_host"),
    *("bootstrap_port", "bootstrap_room", "routed_dp_rank", "data_parallel_rank", "max_thinking_tokens", "require_reasoning", "background"),
)


class GenerateBody(msgspec.Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool = False
    priority: int | None = None
    routing_key: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    no_logs: bool = False


class EncodeBody(msgspec.Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    dimensions: int | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    no_logs: bool = False
    sampling_params: Any = None
    """SGLang's clients send it; nothing is sampled."""


class TokenizeBody(msgspec.Struct):
    prompt: str | list[str]
    add_special_tokens: bool = True
    model: str | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[Any]
    skip_special_tokens: bool = True
    model: str | None = None


@dataclass(slots=True, frozen=True)
class _Form:
    """How the answer is laid out."""

    is_batch: bool
    """The answer is a list; streamed chunks carry an index."""
    return_text_in_logprobs: bool


class NativeRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._config = service.config

    def install(self, app: FastAPI) -> None:
        router = APIRouter(tags=["native"])
        router.add_api_route("/generate", self.generate, methods=["POST", "PUT"], response_model=None)
        router.add_api_route("/encode", self.encode, methods=["POST", "PUT"], response_model=None)
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], response_model=None)
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"], response_model=None)
        router.add_api_route("/v1/tokenize", self.tokenize, methods=["POST"], response_model=None)
        router.add_api_route("/v1/detokenize", self.detokenize, methods=["POST"], response_model=None)
        app.include_router(router)

    async def generate(self, request: Request) -> Response:
        raw = await read_object(request)
        body = parse(raw, GenerateBody, route="/generate", unsupported=UNSUPPORTED)
        requests, form = await self._requests(body)
        job = self._service.job(requests, received=raw, no_logs=body.no_logs)
        if body.stream:
            return EventStream(job, self._stream(job, form), native_stream_error)
        with job, cancelled_with_client(job, request.receive):
            outputs = await job.wait()
        results = [self._result(output, form) for output in outputs]
        return json_response(results if form.is_batch else results[0])

    async def encode(self, request: Request) -> Response:
        raw = await read_object(request)
        body = parse(raw, EncodeBody, route="/encode", unsupported=UNSUPPORTED)
        check_dimensions(body.dimensions, self._config.pooling)
        prompts, is_batch = await self._prompts(body.text, body.input_ids)
        options = Options(namespace=(body.extra_key or "") + (body.cache_salt or ""), priority=body.priority)
        rids = self._rids(body.rid, len(prompts), is_batch)
        make = self._service.intake.embedding_request
        requests = [make(prompt, options, rid=rid) for prompt, rid in zip(prompts, rids, strict=True)]
        with self._service.job(requests, received=raw, no_logs=body.no_logs) as job, cancelled_with_client(job, request.receive):
            outputs = await job.wait()
        vectors = [vector_of(output, self._config.pooling, body.dimensions) for output in outputs]
        results = [{"embedding": vector.tolist(), "meta_info": self._meta(output)} for vector, output in zip(vectors, outputs, strict=True)]
        return json_response(results if is_batch else results[0])

    async def tokenize(self, request: Request) -> Response:
        body = parse(await self._read(request), TokenizeBody, route="/tokenize")
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        tokens = [(await self._service.text.encode(text, add_special_tokens=body.add_special_tokens)).tolist() for text in texts]
        counts = [len(ids) for ids in tokens]
        one = isinstance(body.prompt, str)
        answer = {"tokens": tokens[0] if one else tokens, "count": counts[0] if one else counts, "max_model_len": self._config.context_len}
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        body = parse(await self._read(request), DetokenizeBody, route="/detokenize")
        lists, is_batch = as_id_lists(body.tokens, "tokens")
        texts = []
        for ids in lists:
            self._service.intake.check_ids(ids, name="tokens")
            texts.append(await self._service.text.decode(ids, skip_special_tokens=body.skip_special_tokens))
        return json_response({"text": texts if is_batch else texts[0]})

    async def _read(self, request: Request) -> dict[str, Any]:
        return await (read_openai_object(request) if request.url.path.startswith("/v1/") else read_object(request))

    async def _requests(self, body: GenerateBody) -> tuple[list[core.Request], _Form]:
        prompts, is_batch = await self._prompts(body.text, body.input_ids)
        count = len(prompts)
        samplings = [_parse_sampling(raw) for raw in _spread(body.sampling_params, count, "sampling_params")]
        if sum(sampling.n for sampling in samplings) > MAX_SEQUENCES:
            raise RequestError(f"One request may ask for at most {MAX_SEQUENCES} sequences.")
        return_logprob = _spread(body.return_logprob, count, "return_logprob")
        starts = _spread(body.logprob_start_len, count, "logprob_start_len")
        tops = _spread(body.top_logprobs_num, count, "top_logprobs_num")
        picked = _picked_ids(body.token_ids_logprob, count, is_batch)
        rids = self._rids(body.rid, count, is_batch)
        requests: list[core.Request] = []
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            start = starts[index]
            wants = bool(return_logprob[index])
            options = Options(
                stream=body.stream,
                return_logprob=wants,
                logprob_start_len=-1 if start is None or not wants else start,
                top_logprobs_num=(tops[index] or 0) if wants else 0,
                token_ids_logprob=tuple(picked[index]) if wants else (),
                namespace=namespace(body.extra_key, body.cache_salt),
                priority=body.priority,
                routing_key=body.routing_key or "",
            )
            requests += self._service.intake.requests(prompt, sampling, options, rid=rids[index])
        form = _Form(is_batch or len(requests) > 1, body.return_text_in_logprobs)
        return requests, form

    async def _prompts(self, text: str | list[str] | None, input_ids: list[Any] | None) -> tuple[list[core.Ids], bool]:
        if (text is None) == (input_ids is None):
            raise RequestError("Give exactly one of text and input_ids.")
        if input_ids is not None:
            lists, is_batch = as_id_lists(input_ids, "input_ids")
            return [self._service.intake.prompt_ids(ids, name="input_ids") for ids in lists], is_batch
        texts = [text] if isinstance(text, str) else text or []
        if not texts:
            raise RequestError("text must not be an empty list.")
        if len(texts) > MAX_SEQUENCES:
            raise RequestError(f"One request may ask for at most {MAX_SEQUENCES} sequences.")
        return [await self._service.intake.encode(one) for one in texts], not isinstance(text, str)

    def _rids(self, rid: str | list[str] | None, count: int, is_batch: bool) -> list[str]:
        if rid is None:
            return [new_rid() for _ in range(count)]
        base, rids = (rid, [rid]) if isinstance(rid, str) else (None, rid)
        if base is not None and is_batch:
            rids = [f"{base}_{index}" for index in range(count)]
        if len(rids) != count:
            raise RequestError(f"rid has {len(rids)} entries for {count} prompts.")
        if "" in rids or base == "":
            raise RequestError("A rid must not be empty.")
        if len(set(rids)) < count:
            raise RequestError("The rids of a batch must differ.")
        return rids

    async def _stream(self, job: Job, form: _Form) -> AsyncGenerator[bytes, None]:
        async for pieces in job.pieces():
            for piece in pieces:
                if self._config.incremental_streaming_output:
                    result = self._result(piece.output, form, piece=piece)
                else:
                    result = self._result(piece.output, form)
                if form.is_batch:
                    result["index"] = piece.output.index
                yield event(result)

    def _result(self, output: SequenceOutput, form: _Form, *, piece: Piece | None = None) -> dict[str, Any]:
        """One sequence's answer so far; with ``piece`` only what that adds."""
        meta = self._meta(output)
        if output.request.return_logprob:
            logprobs = NativeLogprobs(self._service.text.tokenizer, with_text=form.return_text_in_logprobs)
            blocks = output.logprobs if piece is None else [piece.logprobs] if piece.logprobs is not None else []
            meta.update(logprobs.of_outputs(output.request, blocks))
            if output.request.logprob_start_len >= 0:
                meta.update(logprobs.of_prompt(output.request, output.prompt_logprobs))
        if piece is not None:
            return {"text": piece.text, "output_ids": piece.ids, "meta_info": meta}
        return {"text": output.text, "output_ids": output.output_ids, "meta_info": meta}

    def _meta(self, output: SequenceOutput) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": output.rid,
            "finish_reason": None if output.finish is None else _finish_reason(output),
            "prompt_tokens": output.num_prompt,
            "completion_tokens": output.num_outputs,
            "cached_tokens": output.num_cached,
            "cached_tokens_details": {"device": output.num_cached, "host": 0},
            "reasoning_tokens": 0,
            "num_retractions": output.num_retractions,
            "weight_version": self._config.weight_version,
            "dp_rank": None,
        }
        if output.finish is not None:
            meta["e2e_latency"] = output.e2e_s
        return meta


def _finish_reason(output: SequenceOutput) -> dict[str, Any]:
    finish = output.finish
    assert finish is not None
    match finish.type:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": finish.length if finish.length is not None else output.num_outputs}
        case "abort":
            return {"type": "abort", "message": finish.message, "status_code": finish.status_code, "err_type": finish.err_type}


def _parse_sampling(raw: dict[str, Any] | None) -> SamplingParams:
    for key in raw or {}:
        if key not in SamplingParams.__struct_fields__ and key not in NOT_YET:
            raise UnknownSamplingKeyError(f"Unknown sampling parameter {key!r}.")
    # SGLang sends and accepts null and empty values of keys that are not supported here; they ask for nothing.
    return SamplingParams.parse({key: value for key, value in (raw or {}).items() if key not in NOT_YET or value not in (None, "", [], {})})


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """A per-prompt option: a list has one entry per prompt, anything else holds for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts.")
    return value


def _picked_ids(value: list[Any] | None, count: int, is_batch: bool) -> list[list[int]]:
    if not value:
        return [[] for _ in range(count)]
    lists, one_each = as_id_lists(value, "token_ids_logprob")
    return _spread(lists, count, "token_ids_logprob") if is_batch and one_each else [lists[0]] * count
