"""The bodies of ``/generate`` and ``/encode`` (docs/sglang/api.md#generate-request), and their
conversion to prompts, sampling parameters and options, one of each per prompt. Pure data and
conversions; knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.request import (
    MAX_SAMPLING_MASK,
    SAMPLING_MASK,
    LogprobOptions,
    RequestOptions,
)
from setpoint.core.sampling import NOT_YET, SamplingParams, unknown_parameter
from setpoint.frontend.bodies import as_id_lists
from setpoint.frontend.intake import check_rid, namespace, new_rid
from setpoint.frontend.sessions import SessionParams

UNSUPPORTED = (
    *(
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "lora_path",
        "session_id",
    ),
    *(
        "custom_logit_processor",
        "return_routed_experts",
    ),
    *(
        "max_thinking_tokens",
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
    return_hidden_states: bool | list[bool] = False
    return_sampling_mask: bool | list[bool] = False
    session_params: SessionParams | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    """The older name of ``routed_dp_rank``."""
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    """Names the request on a prefill and a decode server (``frontend.bootstrap_rooms``). Determines
    the engine with --load-balance-method follow_bootstrap_room; otherwise it has no effect."""
    disagg_prefill_dp_rank: int | None = None
    return_prompt_token_ids: bool = False
    require_reasoning: bool = False
    """Whether the output begins with reasoning. If so, constraints apply after it, and its tokens
    are counted."""


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
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    bootstrap_room: int | list[int] | None = None
    sampling_params: Any = None
    """Accepted because SGLang's clients send it, but ignored, because nothing is sampled."""


def prompts_of(
    body: GenerateBody | EncodeBody, max_sequences: int | None
) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts, as texts or lists of ids, and whether the body holds a list of prompts."""
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


def options_of(
    body: GenerateBody, samplings: Sequence[SamplingParams], is_batch: bool
) -> list[RequestOptions]:
    """The options of each prompt. samplings: the sampling parameters of each prompt."""
    count = len(samplings)
    return_logprob = _spread(body.return_logprob, count, "return_logprob")
    starts = _spread(body.logprob_start_len, count, "logprob_start_len")
    tops = _spread(body.top_logprobs_num, count, "top_logprobs_num")
    picked = _picked_ids(body.token_ids_logprob, count, is_batch)
    hidden = _spread(body.return_hidden_states, count, "return_hidden_states")
    options = []
    masks = _spread(body.return_sampling_mask, count, "return_sampling_mask")
    for index, (sampling, with_mask) in enumerate(zip(samplings, masks, strict=True)):
        if with_mask:
            with naming_prompt(index, count, is_list=is_batch):
                _check_sampling_mask(sampling)
    wanted = zip(map(bool, return_logprob), starts, tops, picked, hidden, masks, strict=True)
    for wants, start, top, ids, with_hidden, with_mask in wanted:
        options.append(
            RequestOptions(
                stream=body.stream,
                logprobs=(
                    LogprobOptions(-1 if start is None else start, top or 0, tuple(ids))
                    if wants
                    else None
                ),
                namespace=namespace(body.extra_key, body.cache_salt),
                priority=body.priority,
                routing_key=body.routing_key or "",
                hidden_states=with_hidden,
                token_facts=(SAMPLING_MASK,) if with_mask else (),
            )
        )
    return options


def _check_sampling_mask(sampling: SamplingParams) -> None:
    """Raise RequestError (400) if a sampling mask may have too many tokens to return."""
    if not (sampling.is_greedy or 1 <= sampling.top_k <= MAX_SAMPLING_MASK):
        raise RequestError(
            "return_sampling_mask requires greedy sampling, or a top_k of at most"
            f" {MAX_SAMPLING_MASK}."
        )


@contextmanager
def naming_prompt(index: int, count: int, *, is_list: bool = True) -> Iterator[None]:
    """A context in which a RequestError names the prompt of a list that it is about, counted from
    1."""
    try:
        yield
    except RequestError as error:
        if is_list:
            error.message = f"prompt {index + 1} of {count}: {error.message}"
            error.args = (error.message,)
        raise


def rids_of(rid: str | list[str] | None, count: int, is_batch: bool) -> list[str]:
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
        twice = next(each for index, each in enumerate(rids) if each in rids[:index])
        raise RequestError(f"Duplicate request ID {twice!r}: the rids of a batch must differ.")
    return rids


def samplings_of(raw: Any, count: int, *, preferred: Mapping[str, Any]) -> list[SamplingParams]:
    """The parameters of each prompt. preferred: values for parameters that a client's object leaves
    out."""
    if not isinstance(raw, list):
        return [_sampling(raw, preferred)] * count
    samplings = []
    for index, each in enumerate(_spread(raw, count, "sampling_params")):
        with naming_prompt(index, count):
            samplings.append(_sampling(each, preferred))
    return samplings


def _sampling(
    raw: SamplingParams | dict[str, Any] | None, preferred: Mapping[str, Any]
) -> SamplingParams:
    if isinstance(raw, SamplingParams):
        return raw
    for key in raw or {}:
        if key not in SamplingParams.__struct_fields__ and key not in NOT_YET:
            raise RequestError(unknown_parameter(key))
    # SGLang's clients send null and empty values for keys that Setpoint does not support; such
    # values ask for nothing.
    return SamplingParams.parse(
        {
            key: value
            for key, value in {**preferred, **(raw or {})}.items()
            if key not in NOT_YET or value not in (None, "", [], {})
        }
    )


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """The values of an option for each prompt: a list has one entry per prompt, and any other value
    applies to all prompts."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts.")
    return value


def _picked_ids(value: list[Any] | None, count: int, is_batch: bool) -> list[list[int]]:
    if not value:
        return [[] for _ in range(count)]
    lists, one_each = as_id_lists(value, "token_ids_logprob", max_lists=None)
    if not one_each:
        return [lists[0]] * count
    if not is_batch:
        raise RequestError(
            "token_ids_logprob must be a flat list of integers, because there is one prompt."
        )
    return _spread(lists, count, "token_ids_logprob")
