"""Chat templates: what Hugging Face templates use works, what they must not do fails as a 400."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from setpoint.core.errors import CheckpointError, ConfigError, RequestError
from setpoint.frontend.text.template import ChatTemplate
from setpoint.frontend.text.template_source import find_chat_template
from setpoint_testing.chat_templates import TEMPLATES

HI = [{"role": "user", "content": "hi <b>"}]


def render(source: str, **options: object) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}).render(
        HI, **options
    )  # type: ignore[arg-type]


def test_variables_and_functions_of_templates() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>hi <b></s>"
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi <b>"}'
    assert render("{{ 'é<' | tojson(ensure_ascii=true) }}{{ 'é<' | tojson }}") == '"\\u00e9<""é<"'
    assert render("{{ 'é' | tojson(true) }}") == '"\\u00e9"', (
        "the first parameter, as in transformers"
    )
    shaped = "{{ {'b': 1, 'a': [2]} | tojson(indent=1, separators=(',', ':'), sort_keys=true) }}"
    assert render(shaped) == '{\n "a":[\n  2\n ],\n "b":1\n}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert (
        render("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}.")
        == "."
    )
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}") == "user"
    assert render("{% if tools is none and documents is none %}none{% endif %}") == "none"
    assert render("a\n  {% if true %}\n  b\n  {% endif %}\n") == "a\n  b\n", (
        "block lines leave no trace"
    )
    assert render("{% if add_generation_prompt %}go{% endif %}") == "go"
    assert render("{% if add_generation_prompt %}go{% endif %}", add_generation_prompt=False) == ""
    assert (
        render(
            "{{ enable_thinking }} {{ messages | length }}",
            variables={"enable_thinking": False, "messages": []},
        )
        == "False 1"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only user and assistant') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
        "{{ messages[5].content.x }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_what_goes_wrong_is_a_400(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.status_code == 400


def test_templates_as_gemmas_and_mistrals() -> None:
    """The constructs that those families' templates are made of, in our own words."""
    turns = [
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "hm"},
    ]
    system = {"role": "system", "content": "be brief"}
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    gemma, mistral = (
        ChatTemplate(TEMPLATES[name], special_tokens=tokens) for name in ("gemma", "mistral")
    )
    opened, closed = "<start_of_turn>", "<end_of_turn>\n"
    wanted = f"<s>{opened}user\nhi{closed}{opened}model\nho{closed}{opened}user\nhm{closed}{opened}model\n"
    assert gemma.render(turns) == wanted
    assert (
        mistral.render([system, *turns])
        == "<s>[INST]  hi  [/INST] ho</s>[INST] be brief\n\nhm [/INST]"
    )
    assert mistral.render(turns[:1]) == "<s>[INST]  hi  [/INST]"
    for template, messages, reason in (
        (gemma, [system, *turns], "no system"),
        (gemma, turns[1:], "turns"),
        (mistral, [*turns, system], "only"),
    ):
        with pytest.raises(RequestError, match=reason) as caught:
            template.render(messages)
        assert caught.value.status_code == 400


def test_a_template_that_does_not_compile_ends_start_up() -> None:
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate("{% if %}")


def rendered_with_and_without_tools(folder: Path) -> tuple[str, str]:
    source = find_chat_template(folder)
    assert source is not None
    return render(source, variables={"tools": [{}]}), render(source)


@pytest.mark.parametrize("end", ["", "\n", "  ", "\n  "])
def test_a_template_for_tools_renders_as_it_does_alone(tmp_path: Path, end: str) -> None:
    """With the white space at its ends, which jinja2 strips in some places."""
    sources = ["\n  {% if tools %}tools{% endif %}" + end, "{% set a = 1 %}\n\n{{ a }}" + end]
    (tmp_path / "chat_template.jinja").write_text(sources[1])
    assert find_chat_template(tmp_path) == sources[1]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(sources[0])
    with_tools, without = rendered_with_and_without_tools(tmp_path)
    assert with_tools == render(sources[0], variables={"tools": [{}]})
    assert without == render(sources[1])


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert find_chat_template(tmp_path) == "from config"
    config.write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "tool_use", "template": "t"},
                    {"name": "default", "template": "d"},
                ]
            }
        )
    )
    assert rendered_with_and_without_tools(tmp_path) == ("t", "d")
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert find_chat_template(tmp_path) == "from file"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert find_chat_template(tmp_path, override=str(own)) == "own"
    with pytest.raises(ConfigError, match="no such file"):
        find_chat_template(tmp_path, override="chatml")
    with pytest.raises(ConfigError, match="cannot be read: it must be a plain file"):
        find_chat_template(tmp_path, override=str(tmp_path))
    own.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not a text file"):
        find_chat_template(tmp_path, override=str(own))


def test_a_template_in_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.json"
    path.write_text(json.dumps({"chat_template": "from json"}))
    assert find_chat_template(tmp_path, override=str(path)) == "from json"
    for text in ("{", "[]", "{}", '{"chat_template": 1}', '{"name": "a conversation format"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match='under "chat_template"'):
            find_chat_template(tmp_path, override=str(path))
