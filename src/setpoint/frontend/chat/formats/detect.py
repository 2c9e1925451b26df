"""Finds the formats of a model by the text of its chat template, which writes earlier calls and
reasoning as the model was trained to write them."""

from __future__ import annotations

import msgspec


class Detected(msgspec.Struct, frozen=True):
    """The names of the formats that were found, None where none was, and the reasons in words."""

    tool: str | None
    tool_why: str
    reasoning: str | None
    reasoning_why: str


class _Rule(msgspec.Struct, frozen=True):
    name: str
    has: tuple[str, ...]
    """All of these stand in the template."""
    words: str
    """What the template does, for the reason."""


_TOOL_RULES = (_Rule("hermes", ("<tool_call>", '"name"'), "writes JSON in <tool_call>"),)
_REASONING_RULES = (
    _Rule("qwen3", ("</think>", "enable_thinking"), "has <think> and the variable enable_thinking"),
    _Rule("deepseek-r1", ("</think>",), "has <think>"),
)


def detect(template: str) -> Detected:
    """template: the source of a chat template; empty if the model has none."""
    tool, tool_why = _first(_TOOL_RULES, template, "calls")
    reasoning, reasoning_why = _first(_REASONING_RULES, template, "reasoning")
    return Detected(tool, tool_why, reasoning, reasoning_why)


def _first(rules: tuple[_Rule, ...], template: str, what: str) -> tuple[str | None, str]:
    if not template:
        return None, "the model has no chat template"
    for rule in rules:
        if all(part in template for part in rule.has):
            return rule.name, f"the chat template {rule.words}"
    return None, f"the chat template has no known markers of {what}"
