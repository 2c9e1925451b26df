"""The dialects of a server. Each has a subfolder and an entry in this list."""

from __future__ import annotations

from collections.abc import Sequence

from setpoint.frontend.apis.anthropic.anthropic_dialect import AnthropicDialect
from setpoint.frontend.apis.ollama.ollama_dialect import OllamaDialect
from setpoint.frontend.apis.openai.openai_dialect import OpenAIDialect
from setpoint.frontend.apis.sglang.sglang_dialect import SGLangDialect
from setpoint.frontend.console.console_dialect import ConsoleDialect
from setpoint.frontend.http.app import MakeDialect

DIALECTS: Sequence[MakeDialect] = (
    OpenAIDialect,
    AnthropicDialect,
    OllamaDialect,
    ConsoleDialect,
    SGLangDialect,
)
"""Routes are tried in this order, so the dialects with the most requests come first."""
