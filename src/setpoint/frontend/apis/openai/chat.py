"""Implements ``/v1/chat/completions`` (docs/sglang/api.md#openai-routes) from body to reply,
without HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from setpoint.core.errors import ContextLengthError, RequestError
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.bodies.openai_bodies import UNSUPPORTED, CommonBody, cut_of
from setpoint.frontend.apis.openai.bodies.response_format import is_strict
from setpoint.frontend.apis.openai.bodies.tool_fields import FunctionTool, choice_of, tools_of
from setpoint.frontend.apis.openai.openai_logprobs import Names, chat_logprobs
from setpoint.frontend.apis.openai.replies import Reply, TextExchange, finish_fields
from setpoint.frontend.bodies import asks_for_something, naming_as_sent
from setpoint.frontend.chat.chat_request import ChatRequest
from setpoint.frontend.chat.deltas import Answer, ToolCallDelta, join_deltas, num_whole_calls
from setpoint.frontend.chat.parser import MakeParser, joining_reasoning, without_reasoning
from setpoint.frontend.chat.turn.prepare import Chat
from setpoint.frontend.chat.turn.token_markers import AnswerParser
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.intake import new_rid
from setpoint.frontend.jobs import Piece, SequenceOutput
from setpoint.frontend.text.processor import TextProcessor

MAX_TOP_LOGPROBS = 20
"""OpenAI's limit for ``top_logprobs`` of chat completions."""

_NO_SUCH_MODEL = ("audio", "prediction", "web_search_options")
"""Keys for features that only some of OpenAI's models have."""


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(CommonBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    reasoning_effort: ReasoningEffort | None = None
    """"none" turns the reasoning off; the other values become a variable of the chat template."""
    separate_reasoning: bool | None = True
    stream_reasoning: bool | None = True
    """False: a stream has the reasoning in one piece. This key and ``separate_reasoning`` have an
    effect only with a reasoning parser."""
    include_reasoning: bool | None = True
    """False: the answer does not include the reasoning, as in vLLM. The model reasons
    nevertheless."""
    tools: list[FunctionTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Asks OpenAI's models for shorter or longer answers. Other models do not support it."""
    # These keys ask a provider for something that does not change the answer. They have no effect
    # in Setpoint.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise RequestError("messages must not be empty.")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {self.top_logprobs}."
            )
        if self.modalities not in (None, ["text"]):
            raise RequestError("modalities other than text are not supported by this server.")
        for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
            if asks_for_something(getattr(self, name)):
                raise RequestError(f"{name} is OpenAI's older form; use {instead} instead.")

    def without_effect(self, text: TextProcessor) -> list[str]:
        """Warnings about keys that are accepted but have no effect."""
        warnings = []
        if self.store:
            warnings.append("store has no effect: this server does not store chat completions.")
        if self.verbosity in ("low", "high"):
            warnings.append("verbosity has no effect: the model does not support it.")
        effort = self.reasoning_effort
        if effort not in (None, "none") and not text.template_reads("reasoning_effort"):
            warnings.append("reasoning_effort has no effect: the chat template does not use it.")
        return warnings

    @property
    def sent_as(self) -> dict[str, str]:
        names = super().sent_as
        return (
            names
            if self.max_completion_tokens is None
            else {**names, "max_new_tokens": "max_completion_tokens"}
        )

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def max_new_tokens(self) -> int | None:
        """The limit of output tokens; None: up to the end of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def chat_request(body: ChatBody, defaults: Mapping[str, float]) -> ChatRequest:
    """The chat request of a body. defaults: values of sampling parameters that the body does not
    set. Raises RequestError (400)."""
    top = (body.top_logprobs or 0) if body.logprobs else None
    choice = choice_of(body.tool_choice)
    variables, effort = dict(body.chat_template_kwargs or {}), body.reasoning_effort
    if effort is not None and effort != "none":
        variables["reasoning_effort"] = effort
    return ChatRequest(
        messages=body.messages,
        sampling=body.sampling(defaults, max_new_tokens=body.max_new_tokens),
        options=body.options(top_logprobs_num=top),
        strict_schema=is_strict(body.response_format),
        tools=tools_of(body.tools),
        tool_choice=choice.mode,
        named_tool=choice.named,
        allowed_tools=choice.allowed,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=False if effort == "none" else None,
        separate_reasoning=body.separate_reasoning is not False or body.include_reasoning is False,
        variables=variables,
        cut=cut_of(body, keeps_end=True),
        continue_final_message=bool(body.continue_final_message),
    )


class ChatApi:
    route = "/v1/chat/completions"
    body: type[msgspec.Struct] = ChatBody

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._chat = Chat(answering)

    async def open(self, raw: dict[str, Any]) -> TextExchange:
        """Check and tokenize a body. Raises RequestError for one that cannot be honoured."""
        body, warnings = self._answering.parser.read(
            raw, ChatBody, route=self.route, unsupported=(*UNSUPPORTED, *_NO_SUCH_MODEL)
        )
        body.check()
        rid = body.rid or new_rid()
        request = chat_request(body, self._answering.config.sampling_defaults)
        _check_length(body, self._answering.config)
        with naming_as_sent({"token_ids_logprob": "logprob_token_ids"}):
            prepared = await self._chat.prepare(request, rid=rid)
        job = self._answering.jobs.make(
            prepared.requests,
            received=raw,
            api="OpenAI",
            tool_schema="parameters" if prepared.constrains_calls else "",
        )
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        reply = Reply(
            rid,
            body,
            kind=kind,
            config=self._answering.config,
            weight_version=self._answering.weights.version,
            warnings=[*warnings, *body.without_effect(self._answering.text), *prepared.warnings],
            reasoning_tokens=prepared.reasoning_tokens,
        )
        make = prepared.make_parser
        if body.include_reasoning is False:
            make = without_reasoning(make)
        elif body.stream and body.stream_reasoning is False:
            make = joining_reasoning(make)
        names = Names(self._answering.text.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        maker = ChatChoices(names, make, prepared.tokens, every_token=bool(body.return_token_ids))
        return TextExchange(job, reply, maker, is_stream=bool(body.stream))


def _check_length(body: ChatBody, config: FrontendConfig) -> None:
    """Raise ContextLengthError for an output limit that is larger than the whole context, before
    the prompt is made."""
    asked = body.max_new_tokens
    if asked is None or asked <= config.context_len or config.allow_auto_truncate:
        return
    sent_as = body.sent_as["max_new_tokens"]
    sent_name = "" if sent_as == "max_completion_tokens" else f" (sent as {sent_as})"
    raise ContextLengthError(
        f"max_completion_tokens is too large: {asked}{sent_name}. The model's context has"
        f" {config.context_len} tokens."
    )


class ChatChoices:
    """Makes the choices of a chat, whole or as a stream: first the role, then deltas, of which the
    last has the finish reason."""

    def __init__(
        self,
        names: Names,
        make_parser: MakeParser,
        tokens: Sequence[str] = (),
        *,
        every_token: bool = False,
    ) -> None:
        """tokens: see PreparedChat. every_token: whether each piece of a stream has a choice, even
        one without text."""
        self._names = names
        self._every_token = every_token
        self._make_parser = make_parser
        self._tokens = tokens
        self._parsers: dict[int, AnswerParser] = {}
        """Index of each sequence of a stream -> its parser; made when the sequence's stream
        opens."""
        self._num_calls: Counter[int] = Counter()
        """Index of each sequence of a stream -> the number of its calls, less one that is cut."""

    def _parser(self) -> AnswerParser:
        return AnswerParser(self._make_parser(), self._tokens)

    def whole(self, output: SequenceOutput) -> dict[str, Any]:
        answer = join_deltas(self._parser().whole(output.text, output.marks))
        asked = output.request.options.logprobs
        return {
            "index": output.index,
            "message": _fields(
                answer, role="assistant", content=answer.text, refusal=None, reasoning=None
            ),
            "logprobs": (
                chat_logprobs(self._names, output.logprobs.block(), asked.ids)
                if asked is not None
                else None
            ),
            **_finish_fields(output, has_calls=num_whole_calls(answer.calls) > 0),
        }

    def opening(self, output: SequenceOutput) -> dict[str, Any]:
        self._parsers[output.index] = self._parser()
        return _chunk_choice(output, _fields(_NOTHING, role="assistant", content=""))

    def choice(self, piece: Piece) -> dict[str, Any] | None:
        output = piece.output
        parser = self._parsers[output.index]
        deltas = parser.feed(piece.text, output.marks)
        if output.finish is not None:
            deltas = [*deltas, *parser.end(output.marks)]
        logprobs = (
            None
            if (block := piece.logprobs) is None
            else chat_logprobs(self._names, block, output.request.options.picked_ids)
        )
        is_wanted = self._every_token or logprobs is not None or output.finish is not None
        if not deltas and not is_wanted:
            return None
        answer = join_deltas(deltas)
        if answer.calls:
            self._num_calls[output.index] += num_whole_calls(answer.calls)
        # Clients expect each delta to have content or to be the last.
        is_silent = not (answer.reasoning or answer.calls) and output.finish is None
        content = answer.text or ("" if is_silent else None)
        choice = _chunk_choice(output, _fields(answer, content=content), logprobs=logprobs)
        if output.finish is not None:
            choice |= _finish_fields(output, has_calls=self._num_calls[output.index] > 0)
        return choice


_NOTHING = join_deltas(())


def _fields(answer: Answer, **first: str | None) -> dict[str, Any]:
    """A ``message``, or the ``delta`` of a chunk; ``first`` are its first fields. The reasoning is
    given under SGLang's name and under vLLM's."""
    fields: dict[str, Any] = {**first, "reasoning_content": answer.reasoning or None}
    if answer.reasoning:
        fields["reasoning"] = answer.reasoning
    calls = [_tool_call(call) for call in answer.calls if call.id or call.arguments]
    if calls:
        fields["tool_calls"] = calls
    return fields


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    """One piece of a tool call. Only the first piece of a call has its id, type and name."""
    begins = {"id": call.id, "type": "function"} if call.id else {}
    name = {"name": call.name} if call.name else {}
    return {"index": call.index, **begins, "function": {**name, "arguments": call.arguments}}


def _finish_fields(output: SequenceOutput, *, has_calls: bool) -> dict[str, Any]:
    """has_calls: whether a call is there whose arguments are complete."""
    fields = finish_fields(output)
    if has_calls and fields["finish_reason"] == "stop":
        fields["finish_reason"] = "tool_calls"
    return fields


def _chunk_choice(
    output: SequenceOutput, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "index": output.index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": None,
        "matched_stop": None,
    }
