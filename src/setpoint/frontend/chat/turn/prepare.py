"""Turns one turn of a conversation into the engine's requests and a parser for the answers. Every
chat API works through this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from setpoint.core import request as core
from setpoint.core.constraint import INVALID_TOOL, compile_refusal
from setpoint.core.errors import RequestError
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.answering import Answering
from setpoint.frontend.chat import passed_over
from setpoint.frontend.chat.chat_request import ChatRequest
from setpoint.frontend.chat.formats.format_registry import tool_format
from setpoint.frontend.chat.formats.hermes import HERMES
from setpoint.frontend.chat.formats.tool_format import ToolFormat
from setpoint.frontend.chat.parser import DeltaParser, MakeParser
from setpoint.frontend.chat.prompt import Prompt, asks_to_reason, chat_prompt
from setpoint.frontend.chat.turn.calling import Calling, calling_of, with_constraint
from setpoint.frontend.chat.turn.thinking import Reasoning, Thinking
from setpoint.frontend.chat.turn.token_markers import token_markers
from setpoint.frontend.intake import Cut
from setpoint.frontend.jobs import SequenceOutput


@dataclass(slots=True, frozen=True)
class PreparedChat:
    requests: list[core.Request]
    """The ``n`` requests of the turn."""
    make_parser: MakeParser
    """Makes the parser of one sequence's text, for the AnswerParser."""
    tokens: Sequence[str] = ()
    """The markers in that text that are tokens."""
    thinking: Thinking | None = None
    """How the turn reasons; None without a reasoning format."""
    warnings: Sequence[str] = ()
    """Warnings for the client."""
    constrains_calls: bool = False
    """Whether the constraint of the requests consists of the tools' schemas alone."""

    def reasoning_tokens(self, output: SequenceOutput) -> int:
        """How many tokens of a sequence of this turn are reasoning."""
        return 0 if self.thinking is None else self.thinking.num_tokens(output)


class Chat:
    """Prepares the chats of a model; stores nothing about them."""

    def __init__(self, answering: Answering) -> None:
        """Raises ConfigError for a format that does not exist."""
        config = answering.config
        self._text = answering.text
        self._intake = answering.intake
        self._book = answering.parser.book
        self._enforcement = answering.enforcement
        self._variables = config.chat_template_kwargs
        self._tools: ToolFormat | None = None
        self._reasoning = Reasoning.of(config.reasoning_parser, self._text)
        if config.tool_call_parser != "none":
            self._tools = tool_format(config.tool_call_parser)
        if not self._text.template_reads("tools"):
            self._tools = HERMES  # the format in which ``tools.told_in_messages`` asks for calls
        tokenizer = answering.text.known_tokenizer
        self._call_tokens = token_markers(tokenizer, self._tools)
        form = None if self._reasoning is None else self._reasoning.form
        self._reasoning_tokens = token_markers(tokenizer, form)
        self._special = frozenset() if tokenizer is None else tokenizer.special_texts

    async def prompt_ids(self, request: ChatRequest) -> core.Ids:
        """The token ids of the conversation, for callers that count them or generate in another
        way. Raises RequestError (400)."""
        return await self._encode(await self.prompt_text(request), request.cut)

    async def prompt_text(self, request: ChatRequest) -> str:
        """The conversation as the model reads it. Raises RequestError (400)."""
        prompt = await chat_prompt(request, self._text, self._variables)
        return prompt.rendered + prompt.started

    async def prepare(self, request: ChatRequest, *, rid: str) -> PreparedChat:
        """Check, render and tokenize a turn; nothing runs yet. Raises RequestError (400) for one
        that cannot be honoured."""
        prompt = await chat_prompt(request, self._text, self._variables)
        calling = calling_of(request, self._tools)
        sampling, told = await self._enforced(request, calling)
        options, written = request.options, prompt.rendered + prompt.started
        thinking = None
        if self._reasoning is not None:
            thinking = self._reasoning.behind(prompt, self._tools)
            if sampling.constraint is not None and await self._reasons(request, prompt, thinking):
                ends = self._reasoning.end_ids()
                options = msgspec.structs.replace(options, constrain_after=ends)
                thinking = thinking.constrained()
                if thinking.may_be_skipped:
                    # Without it the model could answer at once, and no constraint would ever begin.
                    written += thinking.opening
                    thinking = thinking.opened()
        # A constraint on calls is a constraint on text, which other tokens may make.
        tokens = (*self._reasoning_tokens, *(() if calling.structure else self._call_tokens))
        forms = (calling.form, None if thinking is None else thinking.reasoning.form)
        needs_special = any(form is not None and form.needs_special_tokens for form in forms)
        if needs_special or not self._special.isdisjoint(self._reasoning_tokens):
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        ids = await self._encode(written, request.cut)
        requests = self._intake.requests(ids, sampling, options, rid=rid)
        make_parser = _parser_maker(request, calling, thinking)
        left_out = passed_over.told([*request.passed_over, *prompt.passed_over])
        self._book.warned_bodies += bool(left_out)
        without_effect = self._intake.without_effect(sampling)
        warnings = [*calling.warnings, *told, *without_effect, *left_out]
        if request.thinking is False and thinking is not None and thinking.is_certain:
            warnings.append("This model's reasoning cannot be turned off.")
        is_own = request.sampling.constraint is not None and not calling.is_required
        constrains_calls = calling.structure is not None and not is_own
        return PreparedChat(requests, make_parser, tokens, thinking, warnings, constrains_calls)

    async def _reasons(self, request: ChatRequest, prompt: Prompt, thinking: Thinking) -> bool:
        """Whether reasoning, or at least the marker of its end, comes before the answer."""
        return thinking.is_certain or (
            thinking.may_begin
            and await asks_to_reason(prompt, request, self._text, self._variables)
        )

    async def _enforced(
        self, request: ChatRequest, calling: Calling
    ) -> tuple[SamplingParams, list[str]]:
        """The sampling parameters with the turn's constraint, and warnings about it."""
        for tool in calling.tools:
            if tool.strict and tool.parameters is not None:
                await self._enforcement.check_strict(tool.parameters, tool.name)
        if request.strict_schema:
            await self._enforcement.applied(request.sampling, strict=True)
        sampling = with_constraint(request.sampling, request, calling)
        try:
            return await self._enforcement.applied(sampling)
        except RequestError as error:
            refusal = compile_refusal("structural_tag")
            if request.sampling.constraint is not None or not error.message.startswith(refusal):
                raise
            why = error.message.removeprefix(refusal)
            raise RequestError(f"{INVALID_TOOL}'parameters' schema: {why}") from None

    async def _encode(self, prompt: str, cut: Cut | None) -> core.Ids:
        # The template writes the special tokens itself.
        return await self._intake.encode(prompt, add_special_tokens=False, cut=cut)


def _parser_maker(request: ChatRequest, calling: Calling, thinking: Thinking | None) -> MakeParser:
    def make() -> DeltaParser:
        parser = calling.parser(request.tools)
        if thinking is None:
            return parser
        return thinking.parser(parser, separate=request.separate_reasoning)

    return make
