"""Implements SGLang's ``/generate`` and ``/encode`` from body to result, without HTTP
(docs/sglang/api.md), for the routes and the offline Engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from setpoint.core import request as core
from setpoint.core.errors import RequestError
from setpoint.core.request import SAMPLING_MASK, RequestOptions, unpack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.sglang.sglang_bodies import (
    EncodeBody,
    GenerateBody,
    naming_prompt,
    options_of,
    prompts_of,
    rids_of,
    samplings_of,
)
from setpoint.frontend.apis.sglang.sglang_logprobs import NativeLogprobs
from setpoint.frontend.chat.turn.thinking import Reasoning
from setpoint.frontend.embedding import check_dimensions, vector_of
from setpoint.frontend.hidden_states import hidden_states
from setpoint.frontend.intake import MAX_SEQUENCES, check_key, namespace
from setpoint.frontend.jobs import Piece, SequenceOutput
from setpoint.frontend.sessions import SessionParams, SessionTurn
from setpoint.frontend.telemetry.timings import timings_of
from setpoint.frontend.text.processor import IDS_ONLY

_WITH_LENGTH = ("output_token_logprobs", "output_token_sampling_mask")
"""Lists whose length is in the answer, too."""


@dataclass(slots=True, frozen=True)
class PreparedRequest:
    """A checked body, every prompt of which can be honoured."""

    requests: list[list[core.Request]]
    """The n requests of each prompt."""
    is_list: bool
    """Whether the answer is a list, and streamed pieces carry an index."""
    text_in_logprobs: bool = False
    with_prompt_ids: bool = False
    """Whether every answer has the token ids of its prompt."""
    warnings: Sequence[str] = ()
    """Warnings for the client about its body, sent in the ``meta_info`` of every answer."""
    reasoning: Reasoning | None = None
    """Set if the outputs begin with reasoning."""
    turn: SessionTurn | None = None
    """Set if the request belongs to a session."""

    def flat(self) -> list[core.Request]:
        return [request for each in self.requests for request in each]


class NativeApi:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._reasoning = Reasoning.of(answering.config.reasoning_parser, answering.text)

    async def prepare(
        self,
        body: GenerateBody,
        *,
        max_sequences: int | None = MAX_SEQUENCES,
        warnings: Sequence[str] = (),
    ) -> PreparedRequest:
        """Check and tokenize everything; nothing runs yet. Raises RequestError; for a list of
        prompts, the message names the index."""
        prompts, is_batch = prompts_of(body, max_sequences)
        count = len(prompts)
        preferred = self._answering.config.preferred_sampling
        samplings = samplings_of(body.sampling_params, count, preferred=preferred)
        told = [each for one in samplings for each in self._answering.intake.without_effect(one)]
        samplings = await self._enforced(samplings, told)
        if body.return_text_in_logprobs and self._answering.text.known_tokenizer is None:
            told.append(f"return_text_in_logprobs has no effect: {IDS_ONLY}")
        warnings = [*warnings, *dict.fromkeys(told)]
        num_sequences = sum(sampling.n for sampling in samplings)
        if max_sequences is not None and num_sequences > max_sequences:
            raise RequestError(f"One request may ask for at most {max_sequences} sequences.")
        options = options_of(body, samplings, is_batch)
        reasoning = self._reasoning if body.require_reasoning else None
        if body.require_reasoning:
            options = self._behind_reasoning(options, samplings)
        rids = rids_of(body.rid, count, is_batch)
        check_key(body.routing_key, "routing_key")
        if body.session_params is not None and (is_batch or num_sequences > 1):
            raise RequestError("session_params needs a single prompt and n = 1.")
        requests, turn = [], None
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts), is_list=is_batch):
                if body.session_params is None:
                    ids = await self._ids(prompt)
                else:
                    turn = await self._turn(prompt, body.session_params, rids[index])
                    ids = turn.prompt
                requests.append(
                    self._answering.intake.requests(
                        ids, samplings[index], options[index], rid=rids[index]
                    )
                )
        return PreparedRequest(
            requests,
            is_batch or num_sequences > 1,
            body.return_text_in_logprobs,
            body.return_prompt_token_ids,
            warnings,
            reasoning,
            turn,
        )

    async def _enforced(
        self, samplings: Sequence[SamplingParams], told: list[str]
    ) -> list[SamplingParams]:
        """The parameters with schemas as grammars enforce them. told: gets the warnings."""
        found: dict[int, SamplingParams] = {}
        for one in samplings:
            if id(one) not in found:  # several prompts may share one object
                found[id(one)], warnings = await self._answering.enforcement.applied(one)
                told += warnings
        return [found[id(one)] for one in samplings]

    async def prepare_encode(
        self,
        body: EncodeBody,
        *,
        max_sequences: int | None = MAX_SEQUENCES,
        warnings: Sequence[str] = (),
    ) -> PreparedRequest:
        """Like ``prepare``, for ``/encode``."""
        check_dimensions(body.dimensions, self._answering.config.pooling)
        prompts, is_batch = prompts_of(body, max_sequences)
        rids = rids_of(body.rid, len(prompts), is_batch)
        check_key(body.routing_key, "routing_key")
        shared = namespace(body.extra_key, body.cache_salt)
        options = RequestOptions(
            namespace=shared, priority=body.priority, routing_key=body.routing_key or ""
        )
        requests = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts), is_list=is_batch):
                ids = await self._ids(prompt)
                requests.append(
                    [self._answering.intake.embedding_request(ids, options, rid=rids[index])]
                )
        return PreparedRequest(requests, is_batch, warnings=warnings)

    def result(
        self, output: SequenceOutput, prepared: PreparedRequest, *, piece: Piece | None = None
    ) -> dict[str, Any]:
        """The answer of one sequence so far; with ``piece``, only the part that the piece adds."""
        lists = self.output_lists(output, prepared, None if piece is None else piece.num_ids)
        return self.answer(
            output,
            prepared,
            text=output.text if piece is None else piece.text,
            lists={"output_ids": output.output_ids if piece is None else piece.ids, **lists},
            lengths={name: len(entries) for name, entries in lists.items()},
            prompt=self.prompt_fields(output, prepared),
        )

    def output_lists(
        self, output: SequenceOutput, prepared: PreparedRequest, num_new: int | None
    ) -> dict[str, list[Any]]:
        """The lists of ``meta_info`` with an entry for each token of a sequence, or for each of its
        last ``num_new``."""
        options = output.request.options
        lists: dict[str, list[Any]] = {}
        if options.logprobs is not None:
            kept = output.logprobs
            block = kept.block(0 if num_new is None else len(kept) - num_new)
            lists |= self._logprobs(prepared).of_outputs(options.logprobs, block)
        if SAMPLING_MASK in options.token_facts:
            masks = output.token_facts.get(SAMPLING_MASK, [])
            new = masks if num_new is None else masks[len(masks) - num_new :]
            lists["output_token_sampling_mask"] = [unpack_ids(mask).tolist() for mask in new]
        return lists

    def prompt_fields(self, output: SequenceOutput, prepared: PreparedRequest) -> dict[str, Any]:
        """The fields about a sequence's prompt: ``prompt_token_ids`` and those of ``meta_info``, as
        far as they are asked for."""
        fields: dict[str, Any] = {}
        prompt = output.request.prompt()
        asked = output.request.options.logprobs
        if asked is not None:
            if self._answering.config.sharing.role == "decode" and output.prompt_logprobs is None:
                # The prefill server has them, and a router puts its list before this one.
                asked = msgspec.structs.replace(asked, start=-1)
            fields |= self._logprobs(prepared).of_prompt(asked, prompt, output.prompt_logprobs)
        if prepared.with_prompt_ids:
            fields["prompt_token_ids"] = prompt.tolist()
        return fields

    def answer(
        self,
        output: SequenceOutput,
        prepared: PreparedRequest,
        *,
        text: Any,
        lists: Mapping[str, Any],
        lengths: Mapping[str, int],
        prompt: Mapping[str, Any],
    ) -> dict[str, Any]:
        """An answer of one sequence from its parts, which may be encoded already. lists:
        ``output_ids`` and ``output_lists``. lengths: of these lists. prompt: ``prompt_fields``."""
        meta = self._meta(output, prepared) | dict(lists) | dict(prompt)
        for name in _WITH_LENGTH:
            if name in lists:
                meta[f"{name}_length"] = lengths[name]
        told = {"text": text} if self._answering.text.known_tokenizer is not None else {}
        told |= {"output_ids": meta.pop("output_ids"), "meta_info": meta}
        if prepared.with_prompt_ids:
            told["prompt_token_ids"] = meta.pop("prompt_token_ids")
        return told

    def _logprobs(self, prepared: PreparedRequest) -> NativeLogprobs:
        return NativeLogprobs(
            self._answering.text.known_tokenizer if prepared.text_in_logprobs else None
        )

    def embedding(
        self, output: SequenceOutput, prepared: PreparedRequest, dimensions: int | None
    ) -> dict[str, Any]:
        """The answer with a finished request's vector. Raises RequestError if the request was
        aborted."""
        vector = vector_of(output, self._answering.config.pooling, dimensions)
        return {"embedding": vector.tolist(), "meta_info": self._meta(output, prepared)}

    def _behind_reasoning(
        self, options: Sequence[RequestOptions], samplings: Sequence[SamplingParams]
    ) -> list[RequestOptions]:
        """The options, with constraints that begin after the reasoning. Raises RequestError."""
        if self._reasoning is None:
            raise RequestError("require_reasoning needs a server with --reasoning-parser.")
        end = self._reasoning.end_ids
        return [
            msgspec.structs.replace(each, constrain_after=end())
            if sampling.constraint is not None
            else each
            for each, sampling in zip(options, samplings, strict=True)
        ]

    async def _turn(self, prompt: str | list[int], params: SessionParams, rid: str) -> SessionTurn:
        """The turn of a session. A prompt that continues an earlier request gets no token for the
        beginning of a text."""
        answering = self._answering
        await answering.sessions.interrupt(params)
        goes_on = answering.sessions.goes_on(params)
        if isinstance(prompt, str):
            ids = await answering.intake.encode(prompt, add_special_tokens=not goes_on)
        else:
            ids = answering.intake.prompt_ids(prompt, name="input_ids")
            tokenizer = answering.text.known_tokenizer
            bos_id = None if tokenizer is None else tokenizer.bos_id
            if goes_on and len(ids) and ids[0] == bos_id:
                ids = ids[1:]
        return answering.sessions.turn(params, ids, rid=rid)

    async def _ids(self, prompt: str | list[int]) -> core.Ids:
        intake = self._answering.intake
        return (
            await intake.encode(prompt)
            if isinstance(prompt, str)
            else intake.prompt_ids(prompt, name="input_ids")
        )

    def _meta(self, output: SequenceOutput, prepared: PreparedRequest) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": output.rid,
            "finish_reason": None if output.finish is None else _finish_reason(output),
            "prompt_tokens": output.num_prompt,
            "completion_tokens": output.num_outputs,
            "cached_tokens": output.num_cached,
            "cached_tokens_details": _cached_from(output, self._answering.config.storage_backend),
            "reasoning_tokens": (
                prepared.reasoning.num_tokens(output, starts_inside=True, calls=None)
                if prepared.reasoning is not None
                else 0
            ),
            "num_retractions": output.num_retractions,
            "weight_version": self._answering.weights.version,
            # As in SGLang: null where one engine serves.
            "dp_rank": output.dp_rank if len(self._answering.engine.ranks) > 1 else None,
        }
        if output.finish is not None:
            meta["e2e_latency"] = output.e2e_s
            if self._answering.jobs.metrics is not None:
                meta |= timings_of(output)
            if output.request.options.hidden_states:
                size = self._answering.config.hidden_size
                assert size is not None, "checked before the request ran"
                meta["hidden_states"] = hidden_states(output, size)
        if prepared.warnings:
            meta["warnings"] = prepared.warnings
        return meta


def _cached_from(output: SequenceOutput, backend: str | None) -> dict[str, Any]:
    """Where the cached tokens were. backend: the storage, if there is one."""
    details: dict[str, Any] = {
        "device": output.num_cached - output.num_loaded,
        "host": output.num_from_host,
    }
    if backend is not None:
        details["storage"] = output.num_loaded - output.num_from_host
        details["storage_backend"] = backend
    return details


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
