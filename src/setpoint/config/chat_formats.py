"""The names of the formats in which models write tool calls and reasoning. They are SGLang's; the
formats themselves are in ``frontend/chat/formats``."""

from __future__ import annotations

TOOL_CALL_PARSERS = ("hermes", "qwen", "qwen25")
REASONING_PARSERS = ("deepseek-r1", "qwen3")

OPEN = "auto"
"""Goes by the chat template."""
NONE = "none"
"""The text of an answer is left as it is."""
