"""The dialects that a server speaks. Each is a folder in this one, and an entry here."""

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
"""Routes are tried in this order, so those with the most requests come first."""
