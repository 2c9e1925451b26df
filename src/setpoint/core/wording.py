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
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        return f"{inside}{missing[1]} is missing."
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL):
        return f"{inside}{unknown[1]} is not known."
    if enumerated := re.fullmatch(r"Invalid enum value (.*)", message, re.DOTALL):
        allowed = _allowed(kind, place["path"] if place else "$") or "one of its allowed values"
        return f"{subject} must be {allowed}, not {enumerated[1]}."
    return f"{subject}: {message[:1].lower()}{message[1:]}."


def _allowed(kind: Any, path: str) -> str:
    """The values that ``kind`` allows at msgspec's path, as "'a', 'b' or 'c'"; "" if it does not
    say."""
    nodes = _alternatives(inspect.type_info(kind))
    for step in re.findall(r"\.\.\.|[^.\[\]$]+", path):
        inside: list[inspect.Type] = []
        for node in nodes:
            if isinstance(node, inspect.StructType):
                inside += [each.type for each in node.fields if each.encode_name == step]
            elif isinstance(node, inspect.ListType):
                inside.append(node.item_type)
            elif isinstance(node, inspect.DictType):
                inside.append(node.value_type)
        nodes = [each for node in inside for each in _alternatives(node)]
    values: list[Any] = []
    for node in nodes:
        if isinstance(node, inspect.LiteralType):
            values += node.values
        elif isinstance(node, inspect.EnumType):
            values += [each.value for each in node.cls]
    *others, last = map(repr, values or [""])
    return f"{', '.join(others)} or {last}" if others else last if values else ""


def _alternatives(node: inspect.Type) -> list[inspect.Type]:
    if isinstance(node, inspect.UnionType):
        return [each for option in node.types for each in _alternatives(option)]
    return _alternatives(node.type) if isinstance(node, inspect.Metadata) else [node]


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
