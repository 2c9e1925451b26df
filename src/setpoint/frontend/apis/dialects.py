"""The dialects that a server speaks. Each is a folder in this one, and an entry here."""

from __future__ import annotations

from collections.abc import Sequence

from setpoint.frontend.apis.anthropic.dialect import AnthropicDialect
from setpoint.frontend.apis.ollama.dialect import OllamaDialect
from setpoint.frontend.apis.openai.dialect import OpenAIDialect
from setpoint.frontend.apis.sglang.dialect import SGLangDialect
from setpoint.frontend.console.dialect import ConsoleDialect
from setpoint.frontend.http.app import MakeDialect

DIALECTS: Sequence[MakeDialect] = (
    OpenAIDialect,
    AnthropicDialect,
    OllamaDialect,
    ConsoleDialect,
    SGLangDialect,
)
"""Routes are tried in this order, so those with the most requests come first."""
