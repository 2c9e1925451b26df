"""Turns msgspec's messages about a client's values of the wrong type into sentences for people who
do not know msgspec.

``Expected `float | null`, got `str` - at `$.temperature` `` becomes "temperature must be a number,
got a string". The sentence does not say that null is allowed too: leaving the key out has the same
effect.
"""

from __future__ import annotations

import re

import msgspec

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
    error: msgspec.ValidationError, *, name: str = "", whole: str = "The body"
) -> str:
    """The error as one sentence. name: the name of the value that was checked, if it is part of
    something larger. whole: what to call the value otherwise."""
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
        return f"{subject} must be one of its allowed values, not {enumerated[1]}."
    return f"{subject}: {message[:1].lower()}{message[1:]}."


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
