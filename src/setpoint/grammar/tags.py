"""Structural tags: text of which some parts are constrained, as JSON. Reads both forms that clients
of SGLang send, the legacy one (``structures`` and ``triggers``) and xgrammar's (``format``), into
one tree. Knows nothing of the library that compiles it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast

import msgspec

from setpoint.core.conversion import convert
from setpoint.core.errors import RequestError
from setpoint.core.wording import validation_message

MAX_DEPTH = 32
"""Most formats inside each other."""

MAX_TRIGGERS = 256
"""Most triggers of one format; each is compared with the others and with every tag."""


class _Format(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """A part of the output."""


class AnyText(_Format, frozen=True, tag="any_text"):
    """Any text up to what follows it."""

    excludes: list[str] = []
    """Strings that the text must not contain."""


class ConstString(_Format, frozen=True, tag="const_string"):
    value: str


class JsonSchema(_Format, frozen=True, tag="json_schema"):
    json_schema: bool | dict[str, Any]
    style: Literal["json", "qwen_xml"] = "json"
    """qwen_xml: the object's properties as ``<parameter=name>value</parameter>``."""


class ParameterXml(_Format, frozen=True, tag="qwen_xml_parameter"):
    """A JsonSchema in the style qwen_xml, by its older name."""

    json_schema: dict[str, Any]


class Regex(_Format, frozen=True, tag="regex"):
    pattern: str


class GrammarFormat(_Format, frozen=True, tag="grammar"):
    grammar: str


class SequenceFormat(_Format, frozen=True, tag="sequence"):
    elements: list[Format]


class Or(_Format, frozen=True, tag="or"):
    elements: list[Format]


class Optional(_Format, frozen=True, tag="optional"):
    content: Format


class Star(_Format, frozen=True, tag="star"):
    content: Format


class Plus(_Format, frozen=True, tag="plus"):
    content: Format


class Tag(_Format, frozen=True, tag="tag"):
    begin: str
    content: Format
    end: str | list[str]

    @property
    def ends(self) -> list[str]:
        """The strings one of which ends the tag."""
        return [self.end] if isinstance(self.end, str) else self.end


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    """Any text, in which a trigger begins a tag."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    """The output begins with a tag, without text before it."""
    stop_after_first: bool = False
    """The output ends with its first tag."""
    excludes: list[str] = []
    """Strings that the text around tags must not contain."""


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    """Tags and separators, without other text."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    AnyText
    | ConstString
    | JsonSchema
    | ParameterXml
    | Regex
    | GrammarFormat
    | SequenceFormat
    | Or
    | Optional
    | Star
    | Plus
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: bool | dict[str, Any]
    end: str


class _Legacy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["structural_tag"]
    structures: list[_Structure]
    triggers: list[str]


class _Current(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["structural_tag"]
    format: Format


def parse_tag(text: str) -> Format:
    """The format of a structural tag. Raises RequestError (400) that names the field at fault."""
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"structural_tag is not valid JSON: {error}") from None
    kind: Any = _Legacy if isinstance(raw, dict) and "structures" in raw else _Current
    try:
        found = convert(raw, kind)
    except msgspec.ValidationError as error:
        raise RequestError(validation_message(error, name="structural_tag", kind=kind)) from None
    except RecursionError:
        raise _too_deep() from None
    if isinstance(found, _Legacy):
        tags = [Tag(each.begin, JsonSchema(each.schema), each.end) for each in found.structures]
        result: Format = TriggeredTags(found.triggers, tags)
    else:
        result = cast(_Current, found).format
    _check(result, "format", MAX_DEPTH)
    return result


def _check(node: Format, path: str, depth: int) -> None:
    """Raise RequestError (400) for what the types cannot declare."""
    if depth == 0:
        raise _too_deep()
    match node:
        case SequenceFormat(elements) | Or(elements):
            _not_empty(elements, f"{path}.elements")
            for index, each in enumerate(elements):
                _check(each, f"{path}.elements[{index}]", depth - 1)
        case Optional(content) | Star(content) | Plus(content):
            _check(content, f"{path}.content", depth - 1)
        case Tag():
            _not_empty(node.ends, f"{path}.end")
            _check(node.content, f"{path}.content", depth - 1)
        case TriggeredTags(triggers, tags):
            _not_empty(triggers, f"{path}.triggers")
            _not_empty(tags, f"{path}.tags")
            _check_triggers(triggers, tags, path)
            for index, tag in enumerate(tags):
                _check(tag, f"{path}.tags[{index}]", depth - 1)
        case TagsWithSeparator(tags):
            _not_empty(tags, f"{path}.tags")
            for index, tag in enumerate(tags):
                _check(tag, f"{path}.tags[{index}]", depth - 1)
        case _:
            pass
    if isinstance(node, AnyText | TriggeredTags) and "" in node.excludes:
        raise RequestError(f"structural_tag.{path}.excludes must not contain an empty string.")


def _check_triggers(triggers: list[str], tags: list[Tag], path: str) -> None:
    if len(triggers) > MAX_TRIGGERS:
        raise RequestError(f"structural_tag.{path}.triggers has more than {MAX_TRIGGERS} entries.")
    for trigger in triggers:
        others = [other for other in triggers if other is not trigger]
        if not trigger or any(other.startswith(trigger) for other in others):
            raise RequestError(
                f"structural_tag.{path}.triggers: a trigger must not be empty, and must not be the"
                " beginning of another."
            )
    for index, tag in enumerate(tags):
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise RequestError(
                f"structural_tag.{path}.tags[{index}].begin must begin with one of the triggers."
            )


def _not_empty(values: Iterable[Any], path: str) -> None:
    if not list(values):
        raise RequestError(f"structural_tag.{path} must not be empty.")


def _too_deep() -> RequestError:
    return RequestError(f"Formats in the structural_tag are nested more than {MAX_DEPTH} deep.")
