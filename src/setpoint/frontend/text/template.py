"""Chat templates: messages to prompt text, in a jinja2 sandbox with the functions that Hugging Face templates expect.

Works on plain dicts and strings. It knows nothing of tokens or HTTP; a template's complaint becomes a RequestError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from setpoint.core.errors import CheckpointError, ConfigError, RequestError
from setpoint.core.jsonfile import parse_json, read_text
from setpoint.frontend.text.tokenizer import read_tokenizer_config


class ChatTemplate:
    """A compiled template; ``render`` may be called for every request."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"The chat template cannot be compiled ({error}); correct it, or pass another with --chat-template."
            ) from error
        self._special_tokens = dict(special_tokens or {})

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt text. ``variables`` are the request's chat_template_kwargs; they cannot replace the messages.

        Raises RequestError (400) for anything the template refuses or trips over.
        """
        names = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
            "messages": list(messages),
        }
        try:
            return self._template.render(names)
        except Exception as error:  # a template runs arbitrary expressions over a client's values: any error is about those
            raise RequestError(f"The chat template cannot render these messages: {error}") from error


def find_chat_template(folder: str | Path, *, override: str | None = None) -> str | None:
    """The source of the chat template: ``override`` (a file), else chat_template.jinja, else tokenizer_config.json; or None."""
    if override is not None:
        return _read_override(Path(override))
    path = Path(folder) / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = read_tokenizer_config(folder).get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):  # several named ones
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{Path(folder) / 'tokenizer_config.json'}: 'chat_template' must be text, or a list of named templates.")
    return template


def _read_override(path: Path) -> str:
    """A .json file has it under "chat_template", as Hugging Face's chat_template.json does; any other file is the template itself."""
    try:
        text = path.read_text(encoding="utf-8")
        template = parse_json(text)["chat_template"] if path.suffix == ".json" else text
    except FileNotFoundError:
        raise ConfigError(f"--chat-template {path}: no such file; give the path of a jinja template.") from None
    except OSError as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template {path} is not a text file.") from None
    except (ValueError, KeyError, TypeError):
        template = None
    if not isinstance(template, str):
        raise ConfigError(f'--chat-template {path} must be a JSON object with the template under "chat_template".')
    return template


def _tojson(value: Any, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # jinja2's own filter escapes for HTML, which a prompt must not be.
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training masks; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - the name jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()
