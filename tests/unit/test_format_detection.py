"""Which formats a chat template is taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.frontend.chat.formats.detect import detect
from setpoint.launch.configuration import configured
from setpoint.testing.chat_templates import TEMPLATES
from setpoint.testing.tiny_models import write_tiny_llama


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


def test_a_model_without_a_template() -> None:
    seen = detect("")
    assert (seen.tool, seen.reasoning) == (None, None)
    assert seen.tool_why == "the model has no chat template"


def test_a_start_goes_by_the_template(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["qwen2"])
    options = Options(model_path=str(model), chat_template=str(template))
    _, _, config = configured(options, EnvSettings(), frozenset({"model_path", "chat_template"}))
    assert config.options.tool_call_parser == "hermes"
    assert config.options.reasoning_parser == "none"
    told = {each.field: each.why for each in config.decisions}
    assert told["tool_call_parser"] == "the chat template writes JSON in <tool_call>"
