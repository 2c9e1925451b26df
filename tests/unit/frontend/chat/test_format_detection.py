"""Which formats a chat template is taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.config.environment import EnvSettings
from setpoint.config.groups.chat_formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from setpoint.config.options import Options
from setpoint.frontend.chat.formats.detect import detect
from setpoint.frontend.chat.formats.format_registry import reasoning_format, tool_format
from setpoint.launch.parent.configuration import settle
from setpoint_testing.chat_templates import TEMPLATES
from setpoint_testing.tiny_models import write_tiny_llama

GUIDE = Path(__file__).parents[4] / "docs" / "tools-and-reasoning.md"


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("chatml", None, None),
        ("qwen2", "hermes", None),
        ("qwen3", None, "qwen3"),
        ("phi3", None, None),
        ("gemma", None, None),
        ("mistral", None, None),
    ],
)
def test_templates(template: str, tool: str | None, reasoning: str | None) -> None:
    seen = detect(TEMPLATES[template])
    assert (seen.tool, seen.reasoning) == (tool, reasoning)


FAMILIES = [
    ("'<|start|>assistant<|channel|>analysis<|message|>'", "gpt-oss", "gpt-oss"),
    (
        "'<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'",
        "deepseekv3",
        None,
    ),
    (
        "{%- if not thinking is defined %}<｜tool▁call▁begin｜>+name+<｜tool▁sep｜></think>",
        "deepseekv31",
        "deepseek-v3",
    ),
    ('set dsml_token = "｜DSML｜" <{{ dsml_token }}invoke name="', "deepseekv32", None),
    ('set dsml_token = "｜DSML｜" <{{ dsml_token }}tool_calls> invoke', "deepseekv4", None),
    ('<｜DSML｜ calls>\n<｜DSML｜ invoke name="', "deepseekv41", None),
    ("'<mm:think>'", None, "minimax-m3"),
    ("<think></think><|tool_call_begin|><|tool_call_argument_begin|>", "kimi_k2", "kimi_k2"),
    ("<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=", "step3", None),
    ("'<minimax:tool_call>' <invoke name= <think> </think>", "minimax-m2", "qwen3"),
    ("<tool_call>{name}<arg_key>k</arg_key> enable_thinking </think>", "glm45", "glm45"),
    (
        "<tool_call>\n<function=name>\n<parameter=x> enable_thinking </think>",
        "qwen3_coder",
        "qwen3",
    ),
    ("'<|tool_call>call:' + name <|channel>thought\\n<channel|>", "gemma4", "gemma4"),
    ("<start_function_call>call:name{", "functiongemma", None),
    ("[TOOL_CALLS] [ [THINK] [/THINK]", "mistral", "mistral"),
    ("<|tool_call_start|>[ message.thinking '</think>'", "lfm2", "qwen3"),
    ("[func_name1(params_name1=params_value1) <|python_start|>", "llama4", None),
    ('<tool_calls>[{"name": "', "hunyuan_a13b", None),
    ("<tool_calls>\n<tool_call>' ~ name ~ '<tool_sep>\n<arg_key>", "hunyuan", None),
    ('<tool_call>\\n{"name": "', "hermes", None),
    ('{"name": function name, "parameters": dictionary}', "llama3", None),
    ("<|python_tag|>", "llama3", None),
    ("[func_name1(params_name1=params_value1)]", "pythonic", None),
    ("◁think▷", None, "kimi"),
    ("Here is my thought process: ", None, "granite"),
]
"""What the templates of the families have in them."""


@pytest.mark.parametrize(("text", "tool", "reasoning"), FAMILIES)
def test_families(text: str, tool: str | None, reasoning: str | None) -> None:
    seen = detect(text)
    assert (seen.tool, seen.reasoning) == (tool, reasoning)
    for name, why in ((tool, seen.tool_why), (reasoning, seen.reasoning_why)):
        assert why.startswith("the chat template " if name else "the chat template has no known")


def test_what_auto_chooses_exists_and_needs_a_marker() -> None:
    for _, tool, reasoning in FAMILIES:
        if tool is not None:
            tool_format(tool)
        assert reasoning is None or not reasoning_format(reasoning).starts_inside("Hello")


def test_the_guide_names_every_format() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    calls, reasoning = text.split("## Formats of reasoning")
    assert [name for name in TOOL_CALL_PARSERS if f"`{name}`" not in calls] == []
    assert [name for name in REASONING_PARSERS if f"`{name}`" not in reasoning] == []


def test_a_model_without_a_template() -> None:
    seen = detect("")
    assert (seen.tool, seen.reasoning) == (None, None)
    assert seen.tool_why == "the model has no chat template"


def test_a_start_goes_by_the_template(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["qwen2"])
    options = Options.of(model_path=str(model), chat_template=str(template))
    config = settle(options, EnvSettings(), frozenset({"model_path", "chat_template"})).config
    assert config.options.model.tool_call_parser == "hermes"
    assert config.options.model.reasoning_parser == "none"
    told = {each.field: each.why for each in config.decisions}
    assert told["tool_call_parser"] == "the chat template writes JSON in <tool_call>"
