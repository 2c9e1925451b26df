"""Finds the chat template of a model: a file given by the user, or the checkpoint's own. Reads it,
but does not run it."""

from __future__ import annotations

from pathlib import Path

from setpoint.core.errors import CheckpointError, ConfigError
from setpoint.core.jsonfile import parse_json, read_text
from setpoint.frontend.text.tokenizer import read_tokenizer_config


def find_chat_template(folder: str | Path, *, override: str | None = None) -> str | None:
    """The source of the chat template: ``override`` (a file), else chat_template.jinja, else
    tokenizer_config.json; or None."""
    if override is not None:
        return _read_override(Path(override))
    path = Path(folder) / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = read_tokenizer_config(folder).get("chat_template")
    if isinstance(template, list) and all(
        isinstance(entry, dict) for entry in template
    ):  # several named templates
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{Path(folder) / 'tokenizer_config.json'}: 'chat_template' must be text, or a list of"
            " named templates."
        )
    return template


def _read_override(path: Path) -> str:
    """A .json file has it under "chat_template", as Hugging Face's chat_template.json does; any
    other file is the template itself."""
    try:
        text = path.read_text(encoding="utf-8")
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
