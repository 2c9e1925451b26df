"""Implements ``/v1/completions`` (docs/sglang/api.md#openai-routes) from body to reply, without
HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from setpoint.core import request as core
from setpoint.core.bounds import convert_field
from setpoint.core.errors import RequestError
from setpoint.core.request import LogprobCount
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.bodies.openai_bodies import UNSUPPORTED, CommonBody, cut_of
from setpoint.frontend.apis.openai.bodies.prompt_fields import read_prompts
from setpoint.frontend.apis.openai.bodies.response_format import is_strict
from setpoint.frontend.apis.openai.openai_logprobs import CompletionLogprobs, Names, join
from setpoint.frontend.apis.openai.replies import Reply, TextExchange, finish_fields
from setpoint.frontend.bodies import naming_as_sent
from setpoint.frontend.intake import MAX_SEQUENCES, new_rid
from setpoint.frontend.jobs import Job, Piece, SequenceOutput


class CompletionBody(CommonBody, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        self._check_best_of()
        if self.suffix:
            raise RequestError(
                "suffix is not supported, because the served model can only continue a text."
            )
        if self.logprob_token_ids and self.echo:
            raise RequestError("logprob_token_ids and echo cannot be combined.")
        if self.logprobs is not None:
            convert_field(self.logprobs, LogprobCount, "logprobs")

    def _check_best_of(self) -> None:
        if self.best_of is None or not self.chooses:
            return
        num_shown = self.n or 1
        if not num_shown < self.best_of <= MAX_SEQUENCES:
            raise RequestError(
                f"best_of must be between n ({num_shown}) and {MAX_SEQUENCES}, got {self.best_of}."
            )
        if self.stream:
            raise RequestError("best_of must not be larger than n if stream is true.")

    @property
    def chooses(self) -> bool:
        """Whether more samples are generated than returned."""
        return self.best_of not in (None, self.n or 1)

    @property
    def num_samples(self) -> int | None:
        return self.best_of if self.chooses else self.n

    @property
    def shows_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def max_new_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens


class CompletionApi:
    route = "/v1/completions"
    body: type[msgspec.Struct] = CompletionBody

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def open(self, raw: dict[str, Any]) -> TextExchange:
        """Check and tokenize a body. Raises RequestError for one that cannot be honoured."""
        body, warnings = self._answering.parser.read(
            raw, CompletionBody, route=self.route, unsupported=(*UNSUPPORTED, "tools")
        )
        body.check()
        rid = body.rid or new_rid()
        sampling = body.sampling(
            self._answering.config.sampling_defaults, max_new_tokens=body.max_new_tokens
        )
        warnings += self._answering.intake.without_effect(sampling)
        sampling, told = await self._answering.enforcement.applied(
            sampling, strict=is_strict(body.response_format)
        )
        warnings += told
        requests = await self._requests(body, sampling, rid)
        names = Names(self._answering.text.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        job = self._answering.jobs.make(requests, received=raw, api="OpenAI")
        reply = Reply(
            rid,
            body,
            kind="text_completion",
            config=self._answering.config,
            weight_version=self._answering.weights.version,
            warnings=warnings,
        )
        maker = CompletionChoices(
            names,
            echo=bool(body.echo),
            logprobs=body.shows_logprobs,
            every_token=bool(body.return_token_ids),
        )
        if body.chooses:
            return _BestOfExchange(job, reply, maker, body)
        return TextExchange(job, reply, maker, is_stream=bool(body.stream))

    async def _requests(
        self, body: CompletionBody, sampling: SamplingParams, rid: str
    ) -> list[core.Request]:
        cut = cut_of(body, keeps_end=True)
        prompts = await read_prompts(body.prompt, self._answering.intake, name="prompt", cut=cut)
        if len(prompts) * sampling.n > MAX_SEQUENCES:
            raise RequestError(f"One request may ask for at most {MAX_SEQUENCES} sequences.")
        start = 0 if body.echo and body.logprobs is not None else -1
        # The logprobs determine the best of several samples.
        num_top = 0 if body.logprobs is None and body.chooses else body.logprobs
        options = body.options(top_logprobs_num=num_top, logprob_start_len=start)
        rids = [rid] if len(prompts) == 1 else [f"{rid}_{index}" for index in range(len(prompts))]
        make = self._answering.intake.requests
        with naming_as_sent({"token_ids_logprob": "logprob_token_ids"}):
            return [
                item
                for prompt, own in zip(prompts, rids, strict=True)
                for item in make(prompt, sampling, options, rid=own)
            ]


class _BestOfExchange(TextExchange):
    """Returns the ``n`` likeliest of the ``best_of`` samples of each prompt."""

    def __init__(
        self, job: Job, reply: Reply, maker: CompletionChoices, body: CompletionBody
    ) -> None:
        super().__init__(job, reply, maker, is_stream=False)
        self._num_shown, self._num_samples = body.n or 1, body.num_samples or 1

    def reply(self, outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
        shown: list[SequenceOutput] = []
        for first in range(0, len(outputs), self._num_samples):
            samples = outputs[first : first + self._num_samples]
            shown += sorted(samples, key=_likelihood, reverse=True)[: self._num_shown]
        return self._reply.complete(outputs, self._maker, shown=shown)


def _likelihood(output: SequenceOutput) -> float:
    """The mean logprob of a sequence's tokens; 0 without any."""
    values = output.logprobs.values
    return sum(values) / len(values) if values else 0.0


class CompletionChoices:
    """Makes the choices of text completions, whole or in pieces. With ``echo``, the prompt comes
    first."""

    def __init__(
        self, names: Names, *, echo: bool, logprobs: bool, every_token: bool = False
    ) -> None:
        """logprobs: whether they are shown. every_token: whether each piece of a stream has a
        choice, even one without text."""
        self._names = names
        self._every_token = every_token
        self._echo = echo
        self._shows_logprobs = logprobs
        self._logprobs: dict[int, CompletionLogprobs] = {}
        """Index of each sequence of a stream -> its logprobs; made when the sequence's stream
        opens."""

    def whole(self, output: SequenceOutput) -> dict[str, Any]:
        prompt = self._prompt_text(output) if self._echo else ""
        logprobs = None
        if self._shows_logprobs:
            maker = self._logprobs_of(output)
            echoed = maker.of_prompt(output.request, output.prompt_logprobs) if self._echo else None
            logprobs = maker.of_outputs(output.logprobs.block())
            logprobs = logprobs if echoed is None else join(echoed, logprobs)
        return {
            "index": output.index,
            "text": prompt + output.text,
            "logprobs": logprobs,
            **finish_fields(output),
        }

    def opening(self, output: SequenceOutput) -> dict[str, Any] | None:
        maker = self._logprobs[output.index] = self._logprobs_of(output)
        if not self._echo:
            return None
        logprobs = None
        if self._shows_logprobs:
            logprobs = maker.of_prompt(output.request, output.prompt_logprobs)
        return _chunk_choice(output, self._prompt_text(output), logprobs)

    def choice(self, piece: Piece) -> dict[str, Any] | None:
        logprobs = (
            None
            if (block := piece.logprobs) is None
            else self._logprobs[piece.output.index].of_outputs(block)
        )
        output = piece.output
        is_wanted = self._every_token or logprobs is not None or output.finish is not None
        if not piece.text and not is_wanted:
            return None
        return {**_chunk_choice(output, piece.text, logprobs), **finish_fields(output)}

    def _logprobs_of(self, output: SequenceOutput) -> CompletionLogprobs:
        return CompletionLogprobs(
            self._names,
            skip_special_tokens=output.request.sampling.skip_special_tokens,
            picked=output.request.options.picked_ids,
        )

    def _prompt_text(self, output: SequenceOutput) -> str:
        return self._names.tokenizer.decode(output.request.prompt().tolist())


def _chunk_choice(
    output: SequenceOutput, text: str, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None,
        "matched_stop": None,
    }
