"""The bodies of Anthropic's routes (docs/anthropic.md), and their conversion to the neutral chat's
request. Pure data and conversions; knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from setpoint.core.bounds import Count, number_text
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.apis.anthropic.history import history_of
from setpoint.frontend.bodies import naming_as_sent
from setpoint.frontend.chat.chat_request import ChatRequest, Tool, ToolChoice
from setpoint.frontend.intake import check_key

UNSUPPORTED = ("container", "mcp_servers")
MIN_THINKING_BUDGET = 1024
"""Anthropic's lower bound for ``thinking.budget_tokens``."""


_THINKING: Mapping[str, bool | None] = {"enabled": True, "disabled": False, "adaptive": None}
"""``thinking.type`` -> whether the model thinks; None: the chat template decides."""


class ToolBody(msgspec.Struct):
    name: str
    type: str | None = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    input_examples: list[Any] | None = None
    defer_loading: bool | None = None


class ChoiceBody(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class ThinkingBody(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None
    """"omitted": the answer has a thinking block without its text."""


class FormatBody(msgspec.Struct):
    schema: dict[str, Any]
    type: Literal["json_schema"]


class OutputBody(msgspec.Struct):
    effort: str | None = None
    """Passed to the chat template as ``reasoning_effort``."""
    format: FormatBody | None = None


class MetadataBody(msgspec.Struct):
    user_id: str | None = None
    """An end user's name, for a provider's abuse detection. It has no effect in Setpoint."""


class ConversationBody(msgspec.Struct, kw_only=True):
    """The fields that determine what the model reads; ``count_tokens`` has no others."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputBody | None = None
    output_format: FormatBody | None = None
    """The older name of ``output_config.format``."""
    cache_control: Any = None
    """Has no effect, neither here nor in blocks and tools: the prefix of every prompt is cached."""

    def check(self) -> list[str]:
        """Warnings about fields that cannot be honoured in full. Raises RequestError (400)."""
        check_key(self.model, "model")
        warnings = []
        for index, tool in enumerate(self.tools or ()):
            _check_tool(tool, f"tools[{index}]")
            for name in ("input_examples", "defer_loading"):
                if getattr(tool, name):
                    warnings.append(f"tools[{index}].{name} has no effect here.")
        if self.tool_choice is not None:
            self._check_choice(self.tool_choice)
        if self.thinking is not None and self.thinking.type not in _THINKING:
            raise RequestError(
                f"thinking.type must be {', '.join(_THINKING)}; got"
                f" {quoted(self.thinking.type, 64)}."
            )
        return warnings

    def _check_choice(self, choice: ChoiceBody) -> None:
        if choice.type == "tool" and not choice.name:
            raise RequestError("tool_choice.name is missing.")
        if choice.type in ("any", "tool") and not self.tools:
            raise RequestError(f"tool_choice.type {choice.type!r} needs tools.")

    def chat_request(self, sampling: SamplingParams, options: RequestOptions) -> ChatRequest:
        """The request of the neutral chat. Raises RequestError (400)."""
        mode, named = _mode_of(self.tool_choice)
        passed_over: list[str] = []
        effort = None if self.output_config is None else self.output_config.effort
        return ChatRequest(
            messages=history_of(self.system, self.messages, passed_over),
            passed_over=passed_over,
            sampling=sampling,
            options=options,
            tools=tuple(map(_tool_of, self.tools or ())),
            tool_choice=mode,
            named_tool=named,
            parallel_tool_calls=self.tool_choice is None
            or not self.tool_choice.disable_parallel_tool_use,
            thinking=None if self.thinking is None else _THINKING[self.thinking.type],
            variables={} if effort is None else {"reasoning_effort": effort},
            continue_final_message=self.messages[-1].get("role") == "assistant",
        )

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must satisfy."""
        format_ = self.output_config.format if self.output_config else None
        format_ = format_ or self.output_format
        return None if format_ is None else format_.schema


class MessagesBody(ConversationBody, kw_only=True):
    max_tokens: Count
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MetadataBody | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Has no effect: there is only one tier."""

    def check(self) -> list[str]:
        warnings = super().check()
        if self.thinking is not None and self.thinking.type == "enabled":
            warnings += self._budget(self.thinking.budget_tokens)
        return warnings

    def _budget(self, tokens: int | None) -> list[str]:
        """The warning that a budget has no effect. Raises RequestError (400) for an invalid
        budget."""
        if tokens is None:
            raise RequestError("thinking.budget_tokens is missing.")
        if not MIN_THINKING_BUDGET <= tokens < self.max_tokens:
            raise RequestError(
                f"thinking.budget_tokens must be at least {MIN_THINKING_BUDGET} and less than"
                f" max_tokens ({number_text(self.max_tokens)}), got {number_text(tokens)}."
            )
        return ["thinking.budget_tokens has no effect here; max_tokens limits the whole answer."]

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """The sampling parameters except the limit of new tokens: the request's values, then the
        model's defaults, then the engine's. Raises RequestError (400)."""
        own = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        raw: dict[str, Any] = {
            **defaults,
            **{name: value for name, value in own.items() if value is not None},
            "stop": self.stop_sequences,
            "max_new_tokens": None,
        }
        if self.schema is not None:
            raw["json_schema"] = self.schema
        with naming_as_sent({"json_schema": "output_config.format.schema"}):
            return SamplingParams.parse(raw)


def _check_tool(tool: ToolBody, where: str) -> None:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where}.type is {quoted(tool.type, 64)}, a tool that Anthropic defines; this"
            " server accepts only custom tools."
        )
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is missing.")


def _tool_of(body: ToolBody) -> Tool:
    return Tool(
        name=body.name,
        description=body.description or "",
        parameters=body.input_schema,
        strict=bool(body.strict),
    )


_MODES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def _mode_of(choice: ChoiceBody | None) -> tuple[ToolChoice, str]:
    """The neutral ``tool_choice`` and ``named_tool``."""
    if choice is None:
        return "auto", ""
    if choice.type == "tool":
        return "required", choice.name or ""
    return _MODES[choice.type], ""
