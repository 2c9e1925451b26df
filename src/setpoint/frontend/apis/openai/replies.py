"""Converts a job's outputs to OpenAI's replies, whole or in chunks, with envelope, usage and finish
reasons. Works on SequenceOutputs and plain dicts; each API makes its choices itself.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Protocol

from setpoint.frontend.apis.openai.bodies.openai_bodies import CommonBody
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.hidden_states import last_hidden_state
from setpoint.frontend.jobs import Job, Piece, SequenceOutput
from setpoint.frontend.telemetry.timings import phase_timings


class ChoiceMaker(Protocol):
    """The part of a reply that differs between APIs: makes choices from sequences or from pieces of
    their text."""

    def whole(self, output: SequenceOutput) -> dict[str, Any]:
        """The choice of a sequence that has ended."""

    def opening(self, output: SequenceOutput) -> dict[str, Any] | None:
        """A choice sent before the first piece of a sequence."""

    def choice(self, piece: Piece) -> dict[str, Any] | None:
        """The choice of a piece; None if there is nothing to show. The choice of a sequence's last
        piece has the finish reason and is never None."""


class Reply:
    """Makes the envelope of one request's answer: id, model, creation time, usage."""

    def __init__(
        self,
        rid: str,
        body: CommonBody,
        *,
        kind: str,
        config: FrontendConfig,
        weight_version: str,
        warnings: Sequence[str],
        reasoning_tokens: Callable[[SequenceOutput], int] = lambda output: 0,
    ) -> None:
        """reasoning_tokens: how many tokens of a sequence are reasoning."""
        self._head: dict[str, Any] = {
            "id": rid,
            "object": kind,
            "created": int(time.time()),
            "model": config.served_model_name,
        }
        self._body = body
        self._is_chat = kind.startswith("chat")
        self._continuous_usage = body.continuous_usage or config.stream_always_usage
        self._config = config
        self._reasoning_tokens = reasoning_tokens
        self._metadata: dict[str, Any] = {"weight_version": weight_version}
        warnings = [*warnings, *body.other_model(config.served_model_name)]
        # Not in the metadata, which OpenAI's clients declare as a map from strings to strings.
        self._warnings_field = {"warnings": warnings} if warnings else {}

    def complete(
        self,
        outputs: Sequence[SequenceOutput],
        maker: ChoiceMaker,
        *,
        shown: Sequence[SequenceOutput] | None = None,
    ) -> dict[str, Any]:
        """shown: the outputs that become choices; None means all outputs."""
        choices = []
        for index, output in enumerate(outputs if shown is None else shown):
            choice = maker.whole(output) | {"index": index}
            choice |= self._prompt_ids(output)
            if self._body.return_token_ids:
                choice["token_ids"] = output.output_ids
                if self._is_chat:
                    choice["response_token_ids"] = output.output_ids  # SGLang's name
            choices.append(self._with_hidden_state(choice, output))
        return {
            **self._head,
            **(self._prompt_ids(outputs[0]) if self._is_chat else {}),
            "choices": choices,
            "usage": self.usage(outputs),
            "metadata": self._metadata,
            **self._warnings_field,
            "timings": phase_timings(outputs),
        }

    async def stream(self, job: Job, maker: ChoiceMaker) -> AsyncGenerator[dict[str, Any], None]:
        opened: set[int] = set()
        is_begun = False
        told = self._warnings_field
        async for pieces in job.pieces():
            for piece in pieces:
                output = piece.output
                choices: list[dict[str, Any]] = []
                is_first = output.index not in opened
                if is_first:
                    opened.add(output.index)
                    choices += [opening] if (opening := maker.opening(output)) else []
                choice = maker.choice(piece)
                if choice is not None:
                    if self._body.return_token_ids:
                        choice["token_ids"] = piece.ids
                    if output.finish is not None:
                        choice = self._with_hidden_state(choice, output)
                    choices.append(choice)
                if is_first and choices:
                    choices[0] |= self._prompt_ids(output)
                for number, choice in enumerate(choices, 1):
                    chunk = self._chunk([choice], [output] if self._continuous_usage else None)
                    if not is_begun:
                        chunk |= told | (self._prompt_ids(output) if self._is_chat else {})
                        is_begun = True
                    is_last = output.finish is not None and number == len(choices)
                    if is_last or self._body.timings_per_token:
                        chunk["timings"] = phase_timings([output])
                    yield chunk
        options = self._body.stream_options
        is_asked = self._config.stream_include_usage if options is None else options.include_usage
        if is_asked or self._config.stream_always_usage:
            yield self._chunk([], job.outputs)

    def _prompt_ids(self, output: SequenceOutput) -> dict[str, Any]:
        body = self._body
        if not (body.return_token_ids or body.return_prompt_token_ids):
            return {}
        return {"prompt_token_ids": output.request.prompt().tolist()}

    def _with_hidden_state(self, choice: dict[str, Any], output: SequenceOutput) -> dict[str, Any]:
        """The choice with the hidden state of the last step; with an empty one if there was only
        the prompt's step."""
        if output.request.options.output_hidden_states:
            choice.get("delta", choice)["hidden_states"] = last_hidden_state(output)
        return choice

    def usage(self, outputs: Iterable[SequenceOutput]) -> dict[str, Any]:
        """The token counts. The n samples of a prompt share its tokens, which count once."""
        outputs = list(outputs)
        firsts = outputs if len(outputs) == 1 else outputs[:: self._body.num_samples or 1]
        num_prompt = sum(output.num_prompt for output in firsts)
        num_outputs = sum(output.num_outputs for output in outputs)
        num_reasoning = sum(map(self._reasoning_tokens, outputs))
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_outputs,
            "total_tokens": num_prompt + num_outputs,
            "reasoning_tokens": num_reasoning,
            "completion_tokens_details": {"reasoning_tokens": num_reasoning},
        }
        if self._config.enable_cache_report:
            usage["prompt_tokens_details"] = {
                "cached_tokens": sum(output.num_cached for output in firsts)
            }
        return usage

    def _chunk(
        self, choices: list[dict[str, Any]], usage_of: Sequence[SequenceOutput] | None
    ) -> dict[str, Any]:
        return {
            **self._head,
            "choices": choices,
            "usage": None if usage_of is None else self.usage(usage_of),
        }


class Exchange(Protocol):
    """One request between its checked body and its reply. Enter ``job`` to submit it, then call
    ``reply`` or ``chunks``."""

    job: Job
    is_stream: bool
    """Whether the body asked for chunks. A caller may support only one of the two forms."""

    def reply(self, outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
        """The whole reply, from the job's outputs at its end. May be called in another thread."""
        ...

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the objects of the stream. Raises like ``Job.pieces``."""
        ...


class TextExchange:
    """Implements ``Exchange`` for APIs that generate text."""

    def __init__(self, job: Job, reply: Reply, maker: ChoiceMaker, *, is_stream: bool) -> None:
        self.job = job
        self.is_stream = is_stream
        self._reply = reply
        self._maker = maker

    def reply(self, outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
        return self._reply.complete(outputs, self._maker)

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        return self._reply.stream(self.job, self._maker)


def finish_fields(output: SequenceOutput) -> dict[str, Any]:
    """The ``finish_reason`` and ``matched_stop`` of a choice."""
    if output.finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": output.finish.type, "matched_stop": output.finish.matched}
