"""The fields that the bodies of all OpenAI routes share (docs/sglang/api.md#openai-routes), and
their conversion to sampling parameters and options. Pure data and conversions; knows nothing of the
engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from setpoint.core.constraint import KINDS
from setpoint.core.errors import RequestError
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.apis.openai.bodies.response_format import constraint_of
from setpoint.frontend.apis.openai.bodies.vllm_constraints import (
    Constrained,
    StructuredOutputs,
    asked_for,
    without_repeated,
)
from setpoint.frontend.bodies import naming_as_sent, other_model_warning
from setpoint.frontend.intake import Cut, check_key, check_rid, namespace

UNSUPPORTED = (
    "logits_processors",
    "custom_logit_processor",
    "lora_path",
    "session_params",
)

DEFAULT_MODEL = "default"
"""The name that always means the served model."""


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class AnyBody(msgspec.Struct, kw_only=True):
    """The fields that the body of every OpenAI route may have."""

    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    """The older name of ``routed_dp_rank``."""
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    """Names the request on a prefill and a decode server (``frontend.bootstrap_rooms``). Determines
    the engine with --load-balance-method follow_bootstrap_room; otherwise it has no effect."""
    disagg_prefill_dp_rank: int | None = None

    model: str | None = DEFAULT_MODEL
    rid: str | None = None
    priority: int | None = None
    routing_key: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    user: str | None = None
    """An end user's name, for a provider's abuse detection. It has no effect, as in SGLang."""

    def other_model(self, served: str) -> list[str]:
        """A warning if the client has named a model other than the served one, which answers under
        any name."""
        if self.model is None or self.model in (served, DEFAULT_MODEL, ""):
            return []
        return [other_model_warning(self.model, served)]

    def check(self) -> None:
        """Raise RequestError (400) for values that no engine could honour, or that this version
        cannot honour yet."""
        check_key(self.model, "model")
        if ":" in (self.model or ""):
            raise RequestError(
                f"model {self.model!r} names a LoRA adapter, and this server does not support"
                " adapters yet."
            )
        check_key(self.routing_key, "routing_key")
        if self.rid is not None:
            check_rid(self.rid)


class SamplingBody(AnyBody, kw_only=True):
    """The fields that the bodies of all routes that generate may have."""

    stream: bool | None = False
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def sent_as(self) -> dict[str, str]:
        """Sampling parameter -> its name in this body, where it differs."""
        return {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}

    def sampling_with(
        self,
        defaults: Mapping[str, float],
        *,
        max_new_tokens: int | None,
        n: int | None,
        asked: Mapping[str, Any],
        asked_by: str,
    ) -> SamplingParams:
        """The sampling parameters: the request's values, then the model's defaults, then the
        engine's. asked: the constraint in the body's field ``asked_by``, beside which no other is
        allowed. Raises RequestError (400)."""
        raw: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        raw = {key: defaults.get(key) if value is None else value for key, value in raw.items()}
        constraints = self._constraints(asked, asked_by)
        raw.update(
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            min_new_tokens=self.min_tokens,
            stop=self.stop,
            stop_regex=self.stop_regex,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            no_stop_trim=self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            n=n,
            sampling_seed=self.seed,
            logit_bias=self.logit_bias,
            max_new_tokens=max_new_tokens,
            **{each.kind: each.value for each in constraints},
        )
        with naming_as_sent(self.sent_as | {each.kind: each.key for each in constraints}):
            return SamplingParams.parse(raw)

    def _constraints(self, asked: Mapping[str, Any], asked_by: str) -> list[Constrained]:
        """The constraints of a request, each of them once. Raises RequestError (400) for two, but
        not for two sampling parameters, which SamplingParams refuses."""
        own = [
            Constrained(kind, kind, getattr(self, kind))
            for kind in KINDS
            if getattr(self, kind) is not None
        ]
        in_a_field = [Constrained(asked_by, kind, asked[kind]) for kind in KINDS if kind in asked]
        found = without_repeated([*in_a_field, *own, *asked_for(self)])
        if len(found) > 1 and not all(each in own for each in found):
            raise RequestError(f"{found[0].key} and {found[1].key} cannot be combined.")
        return found

    def options(
        self, *, top_logprobs_num: int | None, logprob_start_len: int = -1
    ) -> RequestOptions:
        """The options of a request. top_logprobs_num: None if the answer has no logprobs."""
        return RequestOptions(
            stream=bool(self.stream),
            logprobs=(
                None
                if top_logprobs_num is None
                else LogprobOptions(logprob_start_len, top_logprobs_num)
            ),
            namespace=namespace(self.extra_key, self.cache_salt),
            priority=self.priority,
            routing_key=self.routing_key or "",
        )


Side = Literal["left", "right"]


class Shortening(Protocol):
    """A body that may ask for shortened prompts."""

    truncate_prompt_tokens: int | None
    """Maximum tokens that are kept of a prompt, as in vLLM; -1: as many as fit."""
    truncation_side: Side | None
    """The side that is cut off. None means the beginning of a prompt for generation, and the end of
    a prompt for an embedding."""


def cut_of(body: Shortening, *, keeps_end: bool) -> Cut | None:
    """How to shorten prompts; None if the body does not ask for it. keeps_end: whether the end of a
    prompt is kept by default."""
    if body.truncate_prompt_tokens is None:
        return None
    side = body.truncation_side
    return Cut(body.truncate_prompt_tokens, keeps_end if side is None else side == "left")


class CommonBody(SamplingBody, kw_only=True):
    """The fields that the bodies of chat and text completions may have."""

    timings_per_token: bool | None = False
    """Whether every chunk of a stream has ``timings``, not only the last one, as in llama.cpp."""
    return_token_ids: bool | None = False
    """Whether the answer has the token ids of the output and of the prompt, as in SGLang and
    vLLM."""
    return_prompt_token_ids: bool | None = False
    """Whether the answer has the token ids of the prompt."""
    return_tokens_as_token_ids: bool | None = False
    """Whether logprobs name a token "token_id:5" instead of by its text, as in vLLM."""
    logprob_token_ids: list[int] | None = None
    """Tokens whose logprobs are returned in place of those of the likeliest tokens, as in vLLM."""
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    stream_options: StreamOptions | None = None
    return_hidden_states: bool | None = False
    n: int | None = 1
    max_tokens: int | None = None
    response_format: dict[str, Any] | None = None

    @property
    def sent_as(self) -> dict[str, str]:
        return {**super().sent_as, "max_new_tokens": "max_tokens"}

    @property
    def num_samples(self) -> int | None:
        """The number of sequences to generate for each prompt."""
        return self.n

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def options(
        self, *, top_logprobs_num: int | None, logprob_start_len: int = -1
    ) -> RequestOptions:
        picked = tuple(self.logprob_token_ids or ())
        if picked and top_logprobs_num is not None:
            top_logprobs_num = 0
        options = super().options(
            top_logprobs_num=top_logprobs_num, logprob_start_len=logprob_start_len
        )
        logprobs = options.logprobs
        if logprobs is not None:
            logprobs = msgspec.structs.replace(logprobs, ids=picked)
        return msgspec.structs.replace(
            options, logprobs=logprobs, output_hidden_states=bool(self.return_hidden_states)
        )

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true.")
        if self.logprob_token_ids and not self.shows_logprobs:
            raise RequestError("logprob_token_ids needs logprobs.")
        super().check()

    @property
    def shows_logprobs(self) -> bool:
        raise NotImplementedError

    def sampling(
        self, defaults: Mapping[str, float], *, max_new_tokens: int | None
    ) -> SamplingParams:
        """See ``sampling_with``."""
        return self.sampling_with(
            defaults,
            max_new_tokens=max_new_tokens,
            n=self.num_samples,
            asked=constraint_of(self.response_format),
            asked_by="response_format",
        )
