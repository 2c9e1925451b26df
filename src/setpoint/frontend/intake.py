"""Turns a client's prompt and options into core Requests: tokenization, length and vocabulary
checks, clipping.

The checks of docs/sglang/scheduling.md#length-limits. It knows nothing of HTTP; every refusal is a
RequestError.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from setpoint.core.bounds import INT64_MAX, bounds_of, convert_field
from setpoint.core.errors import ContextLengthError, RequestError
from setpoint.core.request import (
    MAX_LOGPROBS,
    Ids,
    LogprobOptions,
    Request,
    RequestOptions,
    pack_ids,
)
from setpoint.core.sampling import MAX_N, SamplingParams, out_of_vocabulary
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.text import stop_regex
from setpoint.frontend.text.processor import TextProcessor

logger = logging.getLogger(__name__)

IdSequence = TypeVar("IdSequence", Sequence[int], Ids)

MAX_SEQUENCES = MAX_N
"""Most sequences (prompts x n) that one HTTP request may ask for."""

MAX_LOGPROBS_IN_ALL = 1 << 19
"""Most logprobs that the answers to one client request may hold together: some 15 MB of JSON. Eight
times as many blocked the event loop for 0.6 s while they were encoded and sent."""

MAX_RID_CHARS = 256
MAX_KEY_CHARS = 1024
"""Longest extra_key, cache_salt, routing_key or model name. The engine keeps the first three, and
answers repeat the last."""


LOGPROB_KEYS = {
    "start": "logprob_start_len",
    "top": "top_logprobs_num",
    "ids": "token_ids_logprob",
}
"""Field of LogprobOptions -> the key of ``/generate`` that it comes from."""
_PRIORITY = next(
    field.type for field in msgspec.structs.fields(RequestOptions) if field.name == "priority"
)


@dataclass(slots=True, frozen=True)
class Cut:
    """How a client wants its prompts to be shortened."""

    most: int
    """Most tokens that are kept; -1: as many as fit."""
    keeps_end: bool


def new_rid() -> str:
    return uuid.uuid4().hex


def check_rid(rid: str, name: str = "rid") -> None:
    """Raise RequestError (400) for a request id that could not be written unchanged to a log line
    or an answer."""
    if not rid:
        raise RequestError(f"A {name} must not be empty.")
    if len(rid) > MAX_RID_CHARS or not rid.isprintable():
        raise RequestError(
            f"A {name} must have at most {MAX_RID_CHARS} characters, all of them printable."
        )


def check_key(value: str | None, name: str) -> None:
    """Raise RequestError (400) for a name that is too long."""
    if value is not None and len(value) > MAX_KEY_CHARS:
        raise RequestError(
            f"{name} must have at most {MAX_KEY_CHARS} characters, got {len(value)}."
        )


def namespace(extra_key: str | None, cache_salt: str | None) -> str:
    """The cache namespace of a request, "" without either key. Two different pairs never give the
    same namespace. Raises RequestError (400).

    If the two were merely joined ("ab" + "c", "a" + "bc"), one client could pose as another and
    learn that client's prompts from timings.
    """
    check_key(extra_key, "extra_key")
    check_key(cache_salt, "cache_salt")
    if not extra_key and not cache_salt:
        return ""
    return f"{len(extra_key or '')}:{extra_key or ''}{cache_salt or ''}"


_BOUNDED_LOGPROB_FIELDS = tuple(
    (field.name, field.type)
    for field in msgspec.structs.fields(LogprobOptions)
    if bounds_of(field.type) is not None
)
"""Reflection takes longer than everything else that happens to a short request, so it happens
once."""


def _check_numbers(options: RequestOptions) -> None:
    """Raise RequestError (400) for a number outside the range that its field declares, named as
    SGLang's clients name it."""
    convert_field(options.priority, _PRIORITY, "priority")
    if options.logprobs is not None:
        for name, kind in _BOUNDED_LOGPROB_FIELDS:
            convert_field(getattr(options.logprobs, name), kind, LOGPROB_KEYS[name])


class Intake:
    def __init__(self, config: FrontendConfig, text: TextProcessor, book: RequestBook) -> None:
        self._config = config
        self._book = book
        self._text = text
        self._random = random.Random(config.random_seed)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, cut: Cut | None = None
    ) -> Ids:
        """The token ids of a prompt. A text that cannot fit the context is refused before it is
        tokenized, unless truncation is allowed."""
        if cut is not None:
            most_chars = self._config.context_len * self._text.tokenizer.max_token_chars
            text = text[-most_chars:] if cut.keeps_end else text[:most_chars]
            ids = await self._text.encode(text, add_special_tokens=add_special_tokens)
            return self._shortened(ids, cut)
        # The length alone clears most texts: no token is longer than the longest, so the bound is
        # never above the number of characters, and finding the longest takes 30 ms, once.
        at_least = self._text.min_tokens(text) if len(text) >= self._config.context_len else 0
        if at_least >= self._config.context_len:
            if not self._config.allow_auto_truncate:
                raise self._too_long(at_least, is_least=True)
            text = text[: self._config.context_len * self._text.tokenizer.max_token_chars]
        return await self._text.encode(text, add_special_tokens=add_special_tokens)

    async def encode_after(self, known: Sequence[int], text: str, *, name: str) -> Ids:
        """The token ids of a prompt that begins with known ones and goes on with a text. A marker
        that ends the one and begins the other stands there once."""
        before = self.prompt_ids(known, name=name)
        ids = await self.encode(text, add_special_tokens=False)
        special = self._text.tokenizer.special_ids
        if len(ids) and before[-1] == ids[0] and int(ids[0]) in special:
            before = before[:-1]
        return np.concatenate([before, ids])

    def prompt_ids(self, ids: Sequence[int], *, name: str, cut: Cut | None = None) -> Ids:
        """A prompt given as token ids, its length checked before each id is."""
        if cut is not None:
            return self.check_ids(self._shortened(ids, cut), name=name)
        if len(ids) >= self._config.context_len:
            if not self._config.allow_auto_truncate:
                raise self._too_long(len(ids))
            ids = ids[: self._config.context_len]
        return self.check_ids(ids, name=name)

    def _shortened(self, ids: IdSequence, cut: Cut) -> IdSequence:
        if not -1 <= cut.most <= self._config.context_len:
            raise RequestError(
                "truncate_prompt_tokens must be between -1 and"
                f" {self._config.context_len}, the context length; got {cut.most}."
            )
        most = self._num_fitting if cut.most == -1 else cut.most
        return ids[max(0, len(ids) - most) :] if cut.keeps_end else ids[:most]

    @property
    def _num_fitting(self) -> int:
        """The most tokens of a prompt that leave room for one of output."""
        return min(self._config.context_len, self._config.max_req_input_len) - 1

    def check_ids(self, ids: Sequence[int], *, name: str) -> Ids:
        """A client's token ids as an array. Raises RequestError (400) for an id outside the
        vocabulary."""
        limit = self._config.vocab_size
        if len(ids) and not 0 <= min(ids) <= max(ids) < limit:
            wrong = next(token for token in ids if not 0 <= token < limit)
            raise RequestError(out_of_vocabulary(name, wrong, limit))
        return np.array(ids, np.int32)

    def requests(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        options: RequestOptions,
        *,
        rid: str | None = None,
    ) -> list[Request]:
        """The ``sampling.n`` requests of one prompt. Raises RequestError (400).

        With n > 1 each rid is the given one with a suffix, so that aborting the given rid aborts
        them all. Each request has its own seed: counted up from a given seed, otherwise drawn.
        """
        if self._config.pooling is not None:
            raise RequestError(
                "This server embeds (--is-embedding) and does not generate; use /v1/embeddings or"
                " /encode."
            )
        self._check_options(options, sampling)
        prompt, sampling = self._fit(prompt, sampling)
        options = _with_start_in(options, len(prompt))
        base = rid or new_rid()
        stops = tuple(filter(self._is_in_vocabulary, sampling.stop_token_ids))
        one = msgspec.structs.replace(sampling, n=1, stop_token_ids=stops)
        return [
            Request(
                rid=base if sampling.n == 1 else f"{base}_{index}",
                prompt_ids=pack_ids(prompt),
                sampling=one,
                seed=self._seed(sampling.sampling_seed, index),
                options=options,
            )
            for index in range(sampling.n)
        ]

    def without_effect(self, sampling: SamplingParams) -> list[str]:
        """Warnings for the client about parameters that are accepted and change nothing."""
        outside = [each for each in sampling.stop_token_ids if not self._is_in_vocabulary(each)]
        if not outside:
            return []
        ids = ", ".join(map(str, outside))
        return [f"stop_token_ids: the vocabulary has no {ids}; these have no effect."]

    def _is_in_vocabulary(self, token: int) -> bool:
        return 0 <= token < self._config.vocab_size

    def _seed(self, given: int | None, index: int) -> int:
        """The seed for sample ``index`` of a prompt; ``given`` is any 64-bit integer."""
        if given is None:
            return self._random.getrandbits(63)
        return (given + index) & INT64_MAX

    def check_logprobs(self, requests: Sequence[Request]) -> None:
        """Raise RequestError (400) if the answers to these requests together could hold too many
        logprobs."""
        total = sum(
            self._most_logprobs(request)
            for request in requests
            if request.options.logprobs is not None
        )
        if total > MAX_LOGPROBS_IN_ALL:
            raise RequestError(
                f"The answer could hold {total} logprobs; at most {MAX_LOGPROBS_IN_ALL} are"
                " allowed. Ask for fewer per token, for fewer tokens, or for fewer answers."
            )

    def _most_logprobs(self, request: Request) -> int:
        logprobs = request.options.logprobs
        if logprobs is None:
            return 0
        num_prompt, wanted = len(request.prompt_ids) // 4, request.sampling.max_new_tokens
        room = self._config.context_len - num_prompt
        positions = (room if wanted is None else min(wanted, room)) + (
            num_prompt if logprobs.start >= 0 else 0
        )
        return positions * (1 + logprobs.top + len(logprobs.ids))

    def embedding_request(
        self, prompt: Ids, options: RequestOptions | None = None, *, rid: str | None = None
    ) -> Request:
        """The request for one prompt's embedding. Raises RequestError (400), also if the server
        generates text."""
        pooling, options = self._config.pooling, options or RequestOptions()
        if pooling is None:
            raise RequestError(
                "This server generates text; start it with --is-embedding to get embeddings."
            )
        _check_numbers(options)
        prompt, sampling = self._fit(prompt, SamplingParams(max_new_tokens=0))
        return Request(
            rid=rid or new_rid(),
            prompt_ids=pack_ids(prompt),
            sampling=sampling,
            seed=0,
            options=msgspec.structs.replace(options, pooling=pooling.kind),
        )

    def _check_options(self, options: RequestOptions, sampling: SamplingParams) -> None:
        sampling.check_vocabulary(self._config.vocab_size)
        self._text.check_sampling(sampling)
        stop_regex.check(sampling.stop_regex)
        _check_numbers(options)
        picked = options.picked_ids
        if len(picked) > MAX_LOGPROBS:
            raise RequestError(
                f"token_ids_logprob may name at most {MAX_LOGPROBS} tokens, got {len(picked)}."
            )
        self.check_ids(picked, name="token_ids_logprob")

    def _fit(self, prompt: Ids, sampling: SamplingParams) -> tuple[Ids, SamplingParams]:
        """Refuse a request that does not fit the context, or shorten it with
        --allow-auto-truncate."""
        context_len, max_input = self._config.context_len, self._config.max_req_input_len
        num_prompt = len(prompt)
        if num_prompt == 0:
            raise RequestError("The prompt is empty: it must have at least one token.")
        if self._config.allow_auto_truncate:
            fitting = self._num_fitting
            if num_prompt > fitting:
                logger.warning(
                    "Truncated a prompt of %d tokens or more to its first %d"
                    " (--allow-auto-truncate).",
                    num_prompt,
                    fitting,
                )
                self._book.truncated_prompts += 1
                prompt, num_prompt = prompt[:fitting], fitting
            if (
                sampling.max_new_tokens is not None
                and num_prompt + sampling.max_new_tokens > context_len
            ):
                limit = context_len - num_prompt
                logger.warning(
                    "Lowered max_new_tokens from %d to %d (--allow-auto-truncate).",
                    sampling.max_new_tokens,
                    limit,
                )
                self._book.lowered_limits += 1
                sampling = msgspec.structs.replace(
                    sampling,
                    max_new_tokens=limit,
                    min_new_tokens=min(sampling.min_new_tokens, limit),
                )
        if num_prompt >= context_len:
            raise self._too_long(num_prompt)
        if num_prompt >= max_input:
            raise ContextLengthError(
                f"Input length ({num_prompt} tokens) exceeds the maximum allowed length"
                f" ({self._num_fitting} tokens). Use a shorter input, or enable"
                " --allow-auto-truncate at the start.",
                num_prompt=num_prompt,
                max_prompt=self._num_fitting,
            )
        wanted = max(sampling.max_new_tokens or 0, sampling.min_new_tokens)
        if num_prompt + wanted > context_len:
            raise ContextLengthError(
                f"Requested token count exceeds the model's maximum context length of {context_len}"
                f" tokens: {num_prompt} of the input plus {wanted} for the completion are"
                f" {num_prompt + wanted}."
            )
        return prompt, sampling

    def _too_long(self, num_tokens: int, *, is_least: bool = False) -> ContextLengthError:
        """is_least: whether the prompt may have more tokens than these."""
        least = "at least " if is_least else ""
        return ContextLengthError(
            f"The input ({least}{num_tokens} tokens) is longer than the model's context length"
            f" ({self._config.context_len} tokens).",
            num_prompt=num_tokens,
            max_prompt=self._num_fitting,
        )


def _with_start_in(options: RequestOptions, num_prompt: int) -> RequestOptions:
    """The options with a logprob start that lies in the prompt. Raises RequestError (400) for one
    behind it."""
    logprobs = options.logprobs
    if logprobs is None or logprobs.start < num_prompt:
        return options
    if logprobs.start > num_prompt:
        raise RequestError(
            f"logprob_start_len is {logprobs.start}, but the prompt has {num_prompt} tokens."
        )
    # A start at the end of the prompt reports nothing.
    none = msgspec.structs.replace(logprobs, start=-1)
    return msgspec.structs.replace(options, logprobs=none)
