"""The formats by their names, which are SGLang's."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TypeVar

from setpoint.core.errors import ConfigError
from setpoint.frontend.chat.formats.format import ReasoningFormat, ToolFormat
from setpoint.frontend.chat.formats.hermes import HERMES
from setpoint.frontend.chat.formats.reasoning import MarkedReasoning

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen25": HERMES,
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    form.name: form
    for form in (
        MarkedReasoning(name="deepseek-r1", always=True),
        MarkedReasoning(name="qwen3", variable="enable_thinking"),
    )
}

T = TypeVar("T")


def tool_format(name: str) -> ToolFormat:
    """Raises ConfigError for a name that is none."""
    return _looked_up(TOOL_FORMATS, name, "tool-call parser")


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises ConfigError for a name that is none."""
    return _looked_up(REASONING_FORMATS, name, "reasoning parser")


def _looked_up(formats: dict[str, T], name: str, kind: str) -> T:
    if name in formats:
        return formats[name]
    near = get_close_matches(name, formats, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"There is no {kind} named {name[:64]!r}.{hint} The choices are {', '.join(formats)}."
    )
