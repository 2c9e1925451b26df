"""Finds the chat template of a model: a file given by the user, or the checkpoint's own. Reads it,
but does not run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setpoint.core.errors import CheckpointError, ConfigError
from setpoint.core.jsonfile import parse_json, read_text
from setpoint.core.plain_file import SETTINGS_MIB, read_plain
from setpoint.frontend.text.tokenizer import read_tokenizer_config


def find_chat_template(folder: str | Path, *, override: str | None = None) -> str | None:
    """The source of the chat template: ``override`` (a file), else chat_template.jinja, else
    tokenizer_config.json; or None. Where a checkpoint has another template for conversations with
    tools ("tool_use"), both are in one source."""
    if override is not None:
        return _read_override(Path(override))
    path = Path(folder) / "chat_template.jinja"
    with_tools = Path(folder) / "additional_chat_templates" / "tool_use.jinja"
    if path.exists():
        return _chosen_by_tools(
            read_text(path), read_text(with_tools) if with_tools.exists() else None
        )
    template = read_tokenizer_config(folder).get("chat_template")
    named = _named(template) if isinstance(template, list) else {"default": template}
    texts = [named.get("default"), named.get("tool_use")]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise CheckpointError(
            f"{Path(folder) / 'tokenizer_config.json'}: 'chat_template' must be text, or a list of"
            " named templates."
        )
    return _chosen_by_tools(*texts)


def _named(templates: list[Any]) -> dict[Any, Any]:
    if not all(isinstance(entry, dict) for entry in templates):
        return {"default": templates}
    return {entry.get("name"): entry.get("template") for entry in templates}


def _chosen_by_tools(template: str | None, with_tools: str | None) -> str | None:
    if template is None or with_tools is None:
        return template
    # jinja2 drops the last line break of a source. The signs keep the white space at its ends,
    # which would otherwise belong to the tags around it.
    ends = (source.removesuffix("\n") for source in (with_tools, template))
    return "{{% if tools +%}}{}{{%+ else +%}}{}{{%+ endif %}}".format(*ends)


def _read_override(path: Path) -> str:
    """The template in a file. A .json file has it under "chat_template", as Hugging Face's
    chat_template.json does; any other file is the template itself."""
    try:
        text = read_plain(path, SETTINGS_MIB).decode()
        template = parse_json(text)["chat_template"] if path.suffix == ".json" else text
    except FileNotFoundError:
        raise ConfigError(
            f"--chat-template {path}: no such file; give the path of a jinja template."
        ) from None
    except OSError as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template {path} is not a text file.") from None
    except (ValueError, KeyError, TypeError):
        template = None
    if not isinstance(template, str):
        raise ConfigError(
            f'--chat-template {path} must be a JSON object with the template under "chat_template".'
        )
    return template
