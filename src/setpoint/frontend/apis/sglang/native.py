"""SGLang's ``/generate`` and ``/encode`` from body to result, without HTTP (docs/sglang/api.md):
for the routes and the offline Engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from setpoint.core import request as core
from setpoint.core.errors import RequestError
from setpoint.core.sampling import NOT_YET, SamplingParams, unknown_parameter
from setpoint.frontend.bodies import as_id_lists
from setpoint.frontend.embedding import check_dimensions, vector_of
from setpoint.frontend.intake import (
    MAX_SEQUENCES,
    Options,
    check_key,
    check_rid,
    namespace,
    new_rid,
)
from setpoint.frontend.jobs import Piece, SequenceOutput
from setpoint.frontend.logprobs import NativeLogprobs
from setpoint.frontend.service import Service

UNSUPPORTED = (
    *(
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "lora_path",
        "session_params",
        "session_id",
    ),
    *(
        "custom_logit_processor",
        "return_hidden_states",
        "return_routed_experts",
        "return_prompt_token_ids",
        "bootstrap_host",
    ),
    *(
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
        "data_parallel_rank",
        "max_thinking_tokens",
        "require_reasoning",
        "background",
    ),
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
    routing_key: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    no_logs: bool = False
    sampling_params: Any = None
    """SGLang's clients send it; nothing is sampled."""


@dataclass(slots=True, frozen=True)
class Prepared:
    """A body whose every prompt can be honoured."""

    requests: list[list[core.Request]]
    """The n requests of each prompt."""
    is_list: bool
    """The answer is a list; streamed pieces carry an index."""
    text_in_logprobs: bool = False
    warnings: Sequence[str] = ()
    """What the client should hear about its body: in the ``meta_info`` of every answer."""

    def flat(self) -> list[core.Request]:
        return [request for each in self.requests for request in each]


class NativeApi:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def prepare(
        self,
        body: GenerateBody,
        *,
        max_sequences: int | None = MAX_SEQUENCES,
        warnings: Sequence[str] = (),
    ) -> Prepared:
        """Check and tokenize everything. Raises RequestError; of a list of prompts it names the
        index. Nothing runs yet."""
        prompts, is_batch = _prompts(body, max_sequences)
        count = len(prompts)
        samplings = _samplings(body.sampling_params, count)
        num_sequences = sum(sampling.n for sampling in samplings)
        if max_sequences is not None and num_sequences > max_sequences:
            raise RequestError(f"One request may ask for at most {max_sequences} sequences.")
        options = _options(body, count, is_batch)
        rids = _rids(body.rid, count, is_batch)
        check_key(body.routing_key, "routing_key")
        requests = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts), is_list=is_batch):
                ids = await self._ids(prompt)
                requests.append(
                    self._service.intake.requests(
                        ids, samplings[index], options[index], rid=rids[index]
                    )
                )
        return Prepared(
            requests, is_batch or num_sequences > 1, body.return_text_in_logprobs, warnings
        )

    async def prepare_encode(
        self,
        body: EncodeBody,
        *,
        max_sequences: int | None = MAX_SEQUENCES,
        warnings: Sequence[str] = (),
    ) -> Prepared:
        """As ``prepare``."""
        check_dimensions(body.dimensions, self._service.config.pooling)
        prompts, is_batch = _prompts(body, max_sequences)
        rids = _rids(body.rid, len(prompts), is_batch)
        check_key(body.routing_key, "routing_key")
        shared = namespace(body.extra_key, body.cache_salt)
        options = Options(
            namespace=shared, priority=body.priority, routing_key=body.routing_key or ""
        )
        requests = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts), is_list=is_batch):
                ids = await self._ids(prompt)
                requests.append(
                    [self._service.intake.embedding_request(ids, options, rid=rids[index])]
                )
        return Prepared(requests, is_batch, warnings=warnings)

    def result(
        self, output: SequenceOutput, prepared: Prepared, *, piece: Piece | None = None
    ) -> dict[str, Any]:
        """One sequence's answer so far; with ``piece`` only what that adds."""
        meta = self._meta(output, prepared)
        if output.request.return_logprob:
            logprobs = NativeLogprobs(
                self._service.text.tokenizer, with_text=prepared.text_in_logprobs
            )
            blocks = (
                output.logprobs
                if piece is None
                else [piece.logprobs]
                if piece.logprobs is not None
                else []
            )
            meta.update(logprobs.of_outputs(output.request, blocks))
            meta.update(logprobs.of_prompt(output.request, output.prompt_logprobs))
        if piece is not None:
            return {"text": piece.text, "output_ids": piece.ids, "meta_info": meta}
        return {"text": output.text, "output_ids": output.output_ids, "meta_info": meta}

    def embedding(
        self, output: SequenceOutput, prepared: Prepared, dimensions: int | None
    ) -> dict[str, Any]:
        """Raises RequestError if the request was aborted."""
        vector = vector_of(output, self._service.config.pooling, dimensions)
        return {"embedding": vector.tolist(), "meta_info": self._meta(output, prepared)}

    async def _ids(self, prompt: str | list[int]) -> core.Ids:
        intake = self._service.intake
        return (
            await intake.encode(prompt)
            if isinstance(prompt, str)
            else intake.prompt_ids(prompt, name="input_ids")
        )

    def _meta(self, output: SequenceOutput, prepared: Prepared) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": output.rid,
            "finish_reason": None if output.finish is None else _finish_reason(output),
            "prompt_tokens": output.num_prompt,
            "completion_tokens": output.num_outputs,
            "cached_tokens": output.num_cached,
            "cached_tokens_details": {"device": output.num_cached, "host": 0},
            "reasoning_tokens": 0,
            "num_retractions": output.num_retractions,
            "weight_version": self._service.config.weight_version,
            "dp_rank": None,
        }
        if output.finish is not None:
            meta["e2e_latency"] = output.e2e_s
        if prepared.warnings:
            meta["warnings"] = prepared.warnings
        return meta


def _prompts(
    body: GenerateBody | EncodeBody, max_sequences: int | None
) -> tuple[Sequence[str | list[int]], bool]:
    """Texts, or lists of ids; and whether there may be several."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("Give exactly one of text and input_ids.")
    if body.input_ids is not None:
        return as_id_lists(body.input_ids, "input_ids", max_lists=max_sequences)
    texts = [body.text] if isinstance(body.text, str) else body.text or []
    if not texts:
        raise RequestError("text must not be an empty list.")
    if max_sequences is not None and len(texts) > max_sequences:
        raise RequestError(f"One request may ask for at most {max_sequences} sequences.")
    return texts, not isinstance(body.text, str)


def _options(body: GenerateBody, count: int, is_batch: bool) -> list[Options]:
    return_logprob = _spread(body.return_logprob, count, "return_logprob")
    starts = _spread(body.logprob_start_len, count, "logprob_start_len")
    tops = _spread(body.top_logprobs_num, count, "top_logprobs_num")
    picked = _picked_ids(body.token_ids_logprob, count, is_batch)
    options = []
    for wants, start, top, ids in zip(map(bool, return_logprob), starts, tops, picked, strict=True):
        options.append(
            Options(
                stream=body.stream,
                return_logprob=wants,
                logprob_start_len=-1 if start is None or not wants else start,
                top_logprobs_num=(top or 0) if wants else 0,
                token_ids_logprob=tuple(ids) if wants else (),
                namespace=namespace(body.extra_key, body.cache_salt),
                priority=body.priority,
                routing_key=body.routing_key or "",
            )
        )
    return options


@contextmanager
def naming_prompt(index: int, count: int, *, is_list: bool = True) -> Iterator[None]:
    """A RequestError from the block says which prompt of a list it is about; people count from
    1."""
    try:
        yield
    except RequestError as error:
        if is_list:
            error.message = f"prompt {index + 1} of {count}: {error.message}"
            error.args = (error.message,)
        raise


def _rids(rid: str | list[str] | None, count: int, is_batch: bool) -> list[str]:
    if rid is None:
        return [new_rid() for _ in range(count)]
    base, rids = (rid, [rid]) if isinstance(rid, str) else (None, rid)
    if base is not None and is_batch:
        rids = [f"{base}_{index}" for index in range(count)]
    if len(rids) != count:
        raise RequestError(f"rid has {len(rids)} entries for {count} prompts.")
    for each in [base] if base is not None else rids:
        check_rid(each)
    if len(set(rids)) < count:
        raise RequestError("The rids of a batch must differ.")
    return rids


def _finish_reason(output: SequenceOutput) -> dict[str, Any]:
    finish = output.finish
    assert finish is not None
    match finish.type:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {
                "type": "length",
                "length": finish.length if finish.length is not None else output.num_outputs,
            }
        case "abort":
            return {
                "type": "abort",
                "message": finish.message,
                "status_code": finish.status_code,
                "err_type": finish.err_type,
            }


def _samplings(raw: Any, count: int) -> list[SamplingParams]:
    if not isinstance(raw, list):
        return [_sampling(raw)] * count
    samplings = []
    for index, each in enumerate(_spread(raw, count, "sampling_params")):
        with naming_prompt(index, count):
            samplings.append(_sampling(each))
    return samplings


def _sampling(raw: SamplingParams | dict[str, Any] | None) -> SamplingParams:
    if isinstance(raw, SamplingParams):
        return raw
    for key in raw or {}:
        if key not in SamplingParams.__struct_fields__ and key not in NOT_YET:
            raise RequestError(unknown_parameter(key))
    # SGLang sends and accepts null and empty values of keys that are not supported here; they ask
    # for nothing.
    return SamplingParams.parse(
        {
            key: value
            for key, value in (raw or {}).items()
            if key not in NOT_YET or value not in (None, "", [], {})
        }
    )


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
    lists, one_each = as_id_lists(value, "token_ids_logprob", max_lists=None)
    return (
        _spread(lists, count, "token_ids_logprob") if is_batch and one_each else [lists[0]] * count
    )
