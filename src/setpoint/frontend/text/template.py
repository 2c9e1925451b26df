"""Chat templates: messages to prompt text, in a jinja2 sandbox with the functions that Hugging Face
templates expect.

Works on plain dicts and strings. It knows nothing of tokens or HTTP; an error raised by a template
becomes a RequestError. The sandbox keeps a template away from the machine's files and Python's
internals, but does not keep it from computing for ever: see ``template_process``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from setpoint.core.errors import CheckpointError, RequestError

_MAX_REASON_CHARS = 1000


class ChatTemplate:
    """A compiled template; ``render`` may be called for every request."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except (
            jinja2.TemplateError,
            ArithmeticError,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:  # constants are computed here
            raise CheckpointError(cannot_compile(str(error))) from error
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. variables: the request's chat_template_kwargs; they cannot replace the
        messages. Raises RequestError (400) for anything that the template refuses or fails on.
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
        except MemoryError:
            raise
        # a template evaluates arbitrary expressions over a client's values, so any error is about
        # those
        except Exception as error:
            raise RequestError(cannot_render(str(error))) from error


def cannot_compile(why: str) -> str:
    return (
        f"The chat template cannot be compiled ({why[:_MAX_REASON_CHARS]}); correct it, or pass"
        " another with --chat-template."
    )


def cannot_render(why: str) -> str:
    return f"The chat template cannot render these messages: {why[:_MAX_REASON_CHARS]}"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The filter of transformers, with its parameters in their order. jinja2's own escapes for HTML,
    # and a prompt must not be escaped.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training masks; here its
    body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - the name jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()
