"""One turn of a conversation as every chat API asks for it: the neutral form between an API's body
and the engine's requests. An API maps its own names to these fields and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.intake import Cut

ToolChoice = Literal["auto", "none", "required"]


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None: any object."""
    strict: bool = False
    """Whether the arguments must satisfy the schema; a grammar then enforces it."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    messages: Sequence[Mapping[str, Any]]
    """The history in the form that chat templates are written for (OpenAI's): ``role``,
    ``content``, ``tool_calls``, ``tool_call_id``, ``reasoning_content``."""
    sampling: SamplingParams
    """Includes the grammar that the client asked for, if any."""
    options: RequestOptions
    strict_schema: bool = False
    """Whether a JSON schema in ``sampling`` is refused if a part of it cannot be enforced."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    named_tool: str = ""
    """The one tool to call if calls are required; empty: any tool."""
    allowed_tools: tuple[str, ...] = ()
    """Names of the only tools that may be called, of all that the model sees; empty: any."""
    parallel_tool_calls: bool = True
    """False: at most one call in an answer."""
    thinking: bool | None = None
    """Whether the model reasons before it answers; None: what the chat template does by itself."""
    separate_reasoning: bool = True
    """False: reasoning is part of the text."""
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """More variables for the chat template (``chat_template_kwargs``)."""
    passed_over: Sequence[str] = ()
    """Types of the parts of the history that no model can read and ``messages`` lacks."""
    cut: Cut | None = None
    """How to shorten the prompt; None: not at all."""
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    """Whether the prompt opens the model's answer. False: it ends with the last message."""
