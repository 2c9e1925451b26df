"""The body of ``POST /v1/responses``, and its conversion to the request of the neutral chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.apis.openai.bodies.openai_bodies import UNSUPPORTED as UNSUPPORTED_ANYWHERE
from setpoint.frontend.apis.openai.bodies.openai_bodies import SamplingBody
from setpoint.frontend.apis.openai.kept.fields import check_metadata
from setpoint.frontend.apis.openai.responses.response_tools import Toolbox
from setpoint.frontend.chat.chat_request import ChatRequest

UNSUPPORTED = (
    *UNSUPPORTED_ANYWHERE,
    *("access_programs", "context_management", "conversation", "image", "moderation", "prompt"),
    *("n", "max_tokens", "max_completion_tokens", "messages", "response_format", "functions"),
    "top_logprobs",
)

_INCLUDABLE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""The accepted values of ``include``. Responses of this server have no such parts, and include
reasoning as text, not encrypted."""


class Reasoning(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect: a response contains the reasoning itself, not a summary."""


class Text(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Asks OpenAI's models for shorter or longer answers. Other models do not support it."""


class InputBody(SamplingBody, kw_only=True):
    """The keys that make the prompt."""

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesBody(InputBody, kw_only=True):
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = True
    background: bool | None = False
    include: list[str] | None = None
    # These keys ask a provider for something that does not change the answer. They have no effect
    # in Setpoint.
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        check_metadata(self.metadata)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise RequestError(
                f"max_output_tokens must be at least 1, got {self.max_output_tokens}."
            )
        for index, name in enumerate(self.include or ()):
            if name not in _INCLUDABLE:
                raise RequestError(
                    f"include[{index}] must be one of {', '.join(_INCLUDABLE)}; got"
                    f" {quoted(name, 64)}."
                )
        if self.background and self.store is False:
            raise RequestError(
                "background needs store to be true, because the response is fetched by its id."
            )

    def without_effect(self) -> list[str]:
        """Warnings about keys that are accepted but have no effect."""
        warnings = []
        if self.reasoning is not None and self.reasoning.summary in ("concise", "detailed"):
            warnings.append(
                "reasoning.summary has no effect: the response contains the reasoning itself."
            )
        if self.text is not None and self.text.verbosity in ("low", "high"):
            warnings.append("text.verbosity has no effect: the model does not support it.")
        return warnings

    @property
    def sent_as(self) -> dict[str, str]:
        return {**super().sent_as, "max_new_tokens": "max_output_tokens"}

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """The sampling parameters of the request. Raises RequestError (400)."""
        return self.sampling_with(
            defaults,
            max_new_tokens=self.max_output_tokens,
            n=1,
            asked=_constraint_of(None if self.text is None else self.text.format),
            asked_by="text.format",
        )


def chat_request(
    body: InputBody,
    toolbox: Toolbox,
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    options: RequestOptions,
) -> ChatRequest:
    """The chat request of a body. Raises RequestError (400) for a tool choice that cannot be
    honoured."""
    choice = toolbox.choice(body.tool_choice)
    variables = dict(body.chat_template_kwargs or {})
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort not in (None, "none"):
        variables["reasoning_effort"] = effort
    return ChatRequest(
        messages=messages,
        sampling=sampling,
        options=options,
        strict_schema=_is_strict(None if body.text is None else body.text.format),
        tools=tuple(each.tool for each in toolbox.tools),
        tool_choice=choice.mode,
        named_tool=choice.named,
        allowed_tools=choice.allowed,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=False if effort == "none" else None,
        variables=variables,
    )


def _is_strict(text_format: Mapping[str, Any] | None) -> bool:
    match text_format:
        case {"strict": bool(strict)}:
            return strict
    return False


def _constraint_of(text_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sampling parameters with one constraint, or with none for text. Raises RequestError (400)."""
    match text_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "schema": {**schema}}:
            return {"json_schema": schema}
        case {"type": "json_schema"}:
            raise RequestError(
                'text.format must be like {"type": "json_schema", "name": "answer", "schema":'
                ' {"type": "object"}}, with the schema as an object.'
            )
    raise RequestError("text.format.type must be text, json_object or json_schema.")
