"""The names of the formats in which models write tool calls and reasoning. They are SGLang's; the
formats themselves are in ``frontend/chat/formats``."""

from __future__ import annotations

TOOL_CALL_PARSERS = (
    "deepseekv3",
    "deepseekv31",
    "deepseekv32",
    "deepseekv4",
    "deepseekv41",
    "functiongemma",
    "gemma4",
    "glm",
    "glm45",
    "glm47",
    "gpt-oss",
    "granite4",
    "hermes",
    "hunyuan",
    "hunyuan_a13b",
    "kimi_k2",
    "lfm2",
    "llama3",
    "llama4",
    "mimo",
    "minimax-m2",
    "mistral",
    "pythonic",
    "qwen",
    "qwen25",
    "qwen3_coder",
    "step3",
    "step3p5",
)
REASONING_PARSERS = (
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v4",
    "deepseek-v41",
    "gemma4",
    "glm45",
    "gpt-oss",
    "granite",
    "granite_thinking_parser",
    "interns1",
    "kimi",
    "kimi_k2",
    "mimo",
    "minimax",
    "minimax-m3",
    "mistral",
    "nemotron_3",
    "qwen3",
    "qwen3-thinking",
    "step3",
    "step3p5",
)

OPEN = "auto"
"""Chooses the format by the chat template."""
NONE = "none"
"""Leaves the text of an answer as it is."""
