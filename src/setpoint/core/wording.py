"""Turns msgspec's messages about a client's values of the wrong type into sentences for people who
do not know msgspec.

``Expected `float | null`, got `str` - at `$.temperature` `` becomes "temperature must be a number,
got a string". The sentence does not say that null is allowed too: leaving the key out has the same
effect.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect

from setpoint.core.conversion import alternatives, inner_types

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
    "bytes": "bytes",
}
_GOT = _WORDS | {"bool": "a truth value"}
_TYPES = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list: "array",
    tuple: "array",
    dict: "object",
}

_PLACE = re.compile(r" - at (?P<key>`key` in )?`(?P<path>\$.*)`$", re.DOTALL)
_EXPECTED = re.compile(
    r"Expected `(?P<types>[^`]*)`(?P<limits>[^,]*)(?:, got (?P<got>.*))?$", re.DOTALL
)


def kind_of(value: object) -> str:
    """The JSON type of a value in words, e.g. "a list"."""
    kind = _TYPES.get(type(value))
    return f"a {type(value).__name__}" if kind is None else _GOT[kind]


def validation_message(
    error: msgspec.ValidationError, *, name: str = "", whole: str = "The body", kind: Any = None
) -> str:
    """The error as one sentence. name: the name of the value that was checked, if it is part of
    something larger. whole: what to call the value otherwise. kind: the type that it should have,
    with which the sentence can say what is allowed."""
    message = str(error)
    place = _PLACE.search(message)
    subject = _subject(place["path"] if place else "$", name) or whole
    if place is not None:
        message = message[: place.start()]
        if place["key"]:
            subject = f"every key of {whole.lower() if subject == whole else subject}"
    expected = _EXPECTED.match(message)
    if expected is not None:
        types = [kind for kind in expected["types"].split(" | ") if kind != "null"] or ["null"]
        wanted = " or ".join(_WORDS.get(kind, kind) for kind in types) + expected["limits"]
        got = "" if expected["got"] is None else f", got {_got(expected['got'], types)}"
        return f"{subject} must be {wanted}{got}."
    inside = "" if subject == whole else f"{subject}."
    path = place["path"] if place else "$"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        choices = _one_of(_allowed(_declared(kind, f"{path}.{missing[1]}")))
        return f"{inside}{missing[1]} is missing{f': {choices}' if choices else ''}."
    nodes = _declared(kind, path)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL):
        return f"{inside}{unknown[1]} is not known.{_known_keys(nodes)}"
    if enumerated := re.fullmatch(r"Invalid (?:enum )?value (.*)", message, re.DOTALL):
        allowed = _one_of(_allowed(nodes)) or "one of its allowed values"
        return f"{subject} must be {allowed}, not {enumerated[1]}."
    return f"{subject}: {message[:1].lower()}{message[1:]}."


def _declared(kind: Any, path: str) -> list[inspect.Type]:
    """The types that ``kind`` declares at msgspec's path. At the tag of a union of objects, which
    no field declares, that is the type of its values."""
    nodes = alternatives(inspect.type_info(kind))
    for step in re.findall(r"\.\.\.|\[\d+\]|[^.\[\]$]+", path):
        tags = [
            each.tag
            for each in nodes
            if isinstance(each, inspect.StructType) and each.tag_field == step
        ]
        nodes = inner_types(nodes, None if step[0] == "[" else step)
        if tags and not nodes:
            nodes = [inspect.LiteralType(tuple(tags))]
    return nodes


def _allowed(nodes: list[inspect.Type]) -> list[Any]:
    """The values that types list."""
    values: list[Any] = []
    for node in nodes:
        if isinstance(node, inspect.LiteralType):
            values += node.values
        elif isinstance(node, inspect.EnumType):
            values += [each.value for each in node.cls]
    return values


def _known_keys(nodes: list[inspect.Type]) -> str:
    """A sentence with the keys of an object; "" if there are none, or several kinds of object."""
    objects = [each for each in nodes if isinstance(each, inspect.StructType)]
    names = [field.encode_name for field in objects[0].fields] if len(objects) == 1 else []
    return f" Known here: {', '.join(names)}." if names else ""


def _one_of(values: list[Any]) -> str:
    """Values as "'a', 'b' or 'c'"; "" if there are none."""
    *others, last = map(repr, values or [""])
    return f"{', '.join(others)} or {last}" if others else last if values else ""


def _subject(path: str, name: str) -> str:
    """msgspec's path ``$.messages[0].content`` as a person would write it; "" for the whole value.
    msgspec writes ``[...]`` where it does not know the key."""
    inside = path.removeprefix("$")
    if not name:
        inside = inside.removeprefix(".")
    path = f"{name}{inside}"
    return f"every value of {path.removesuffix('[...]')}" if path.endswith("[...]") else path


def _got(found: str, wanted: list[str]) -> str:
    kind = found.strip("`")
    if kind == "float" and "int" in wanted:
        return "a number that is not whole"
    return _GOT.get(kind, found if kind.isdecimal() else f"a {kind}")
