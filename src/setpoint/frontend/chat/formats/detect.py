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
    """All of these occur in the template."""
    words: str
    """What the template does, for the reason."""


_TOOL_RULES = (
    _Rule("gpt-oss", ("<|channel|>", "<|message|>"), "writes messages in channels"),
    _Rule("deepseekv41", ("｜DSML｜", " invoke name="), "writes <｜DSML｜ invoke>"),
    _Rule("deepseekv4", ("｜DSML｜", "tool_calls>"), "writes <｜DSML｜tool_calls>"),
    _Rule("deepseekv32", ("｜DSML｜", "invoke"), "writes <｜DSML｜invoke>"),
    _Rule(
        "deepseekv3",
        ("<｜tool▁call▁begin｜>", "```json"),
        "writes <｜tool▁call▁begin｜> and fences",
    ),
    _Rule(
        "deepseekv31", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), "writes <｜tool▁call▁begin｜>"
    ),
    _Rule("kimi_k2", ("<|tool_call_argument_begin|>",), "writes <|tool_call_argument_begin|>"),
    _Rule("step3", ("<steptml:invoke",), "writes <steptml:invoke>"),
    _Rule("minimax-m2", ("<minimax:tool_call>",), "writes <minimax:tool_call>"),
    _Rule("hunyuan", ("tool_calls", "<tool_sep"), "writes <tool_sep> in <tool_calls>"),
    _Rule("glm45", ("<tool_call>", "<arg_key>"), "writes <tool_call> and <arg_key>"),
    _Rule("qwen3_coder", ("<tool_call>", "<function="), "writes <function=…> in <tool_call>"),
    _Rule("gemma4", ("<|tool_call>call:",), "writes <|tool_call>call:"),
    _Rule("functiongemma", ("<start_function_call>",), "writes <start_function_call>"),
    _Rule("mistral", ("[TOOL_CALLS]",), "writes [TOOL_CALLS]"),
    _Rule("lfm2", ("<|tool_call_start|>",), "writes <|tool_call_start|>"),
    _Rule("llama4", ("<|python_start|>",), "writes <|python_start|>"),
    _Rule("hunyuan_a13b", ("<tool_calls>", '"name"'), "writes JSON in <tool_calls>"),
    _Rule("hermes", ("<tool_call>", "name"), "writes JSON in <tool_call>"),
    _Rule("llama3", ("<|python_tag|>",), "writes <|python_tag|>"),
    _Rule(
        "llama3",
        ('{"name": function name, "parameters"',),
        "asks for JSON with a name and parameters",
    ),
    _Rule("pythonic", ("[func_name1(",), "asks for calls in Python's syntax"),
)
"""Rules in the order in which they are tried: the templates of some families contain the markers of
an older one."""
_REASONING_RULES = (
    _Rule("gpt-oss", ("<|channel|>", "analysis"), "writes an analysis channel"),
    _Rule("gemma4", ("<|channel>thought",), "writes <|channel>thought"),
    _Rule("minimax-m3", ("<mm:think>",), "writes <mm:think>"),
    _Rule("mistral", ("[THINK]",), "writes [THINK]"),
    _Rule("kimi", ("◁think▷",), "writes ◁think▷"),
    _Rule(
        "granite",
        ("Here is my thought process:",),
        "has the marker Here is my thought process:",
    ),
    _Rule(
        "glm45",
        ("</think>", "enable_thinking", "<arg_key>"),
        "has <think>, enable_thinking and <arg_key>",
    ),
    _Rule("kimi_k2", ("</think>", "<|tool_call_argument_begin|>"), "has <think> of Kimi K2"),
    _Rule("qwen3", ("</think>", "enable_thinking"), "has <think> and the variable enable_thinking"),
    _Rule(
        "deepseek-v3", ("</think>", "thinking is defined"), "has <think> and the variable thinking"
    ),
    _Rule("qwen3", ("</think>",), "has <think>"),
)
"""Rules for reasoning. No rule chooses a format that takes an answer without markers for reasoning:
many templates mention <think> although their models seldom write it."""


def detect(template: str) -> Detected:
    """The formats that a chat template shows. template: its source; empty if the model has none."""
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
