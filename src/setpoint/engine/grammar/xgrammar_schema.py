"""Refuses JSON schemas that xgrammar (0.2.8) would not enforce: it ignores the keywords that it
does not know, and those next to a keyword that it evaluates alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt, quoted
from setpoint.grammar.schema import FORMATS, lists_all
from setpoint.schemas.document import schemas_in
from setpoint.schemas.expressions import for_grammars
from setpoint.schemas.reading import checked_schema

_ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description"),
        *("default", "examples", "deprecated", "readOnly", "writeOnly"),
    )
)
_ENFORCED = frozenset(
    (
        *("type", "enum", "const", "anyOf", "allOf", "$ref"),
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        *("items", "prefixItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_FORMATS = FORMATS - {"ipv4", "unknown"}
"""The formats that are passed on. xgrammar allows leading zeros in ipv4, so that format is
refused."""

_ALONE = ("$ref", "const", "enum", "anyOf", "allOf")
"""Keywords next to which xgrammar ignores all others."""

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
}


_NO_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*(\\[ABGZz])")
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_INNER_ANCHOR = re.compile(r"(?<![|(^)])(?<!\A)\^|\$(?!\)*(?:\||\Z))")
"""Where an anchor can hold nowhere. A parenthesis before ^ may be that of flags."""
_UNESCAPED = re.compile(r'["]|\\\\|\\x|\\u00|\\c')


_REPEATED = re.compile(r"\{(\d+),?(\d+)?\}")
MAX_REPEATED = 100
"""Largest product of a pattern's repetition counts. With more (somewhere between 100 and 300),
xgrammar allows quotes that end the string too early."""


def enforced_expression(regex: str) -> str:
    """The expression as xgrammar compiles it. Raises RequestError (400) for syntax that xgrammar
    ignores or takes literally."""
    if found := _NO_ANCHOR.search(regex) or _LOOK_AROUND.search(regex):
        raise RequestError(
            f"xgrammar does not support '{found[found.lastindex or 0]}' in regular expressions"
        )
    if found := _INNER_ANCHOR.search(_ESCAPED_OR_CLASS.sub("x", regex)):
        raise RequestError(
            f"xgrammar ignores '{found[0][-1]}' in the middle of an expression: '^' may only begin"
            " it, and '$' end it"
        )
    return for_grammars(regex)


def enforced_schema(schema: Any) -> dict[str, Any]:
    """The schema as an object, changed in place: formats that have no effect are removed, and
    objects get only the listed properties, as for llguidance. Raises RequestError (400) that names
    what xgrammar would ignore."""
    checked = checked_schema(schema)
    for each, _ in schemas_in(checked):
        _prepare(each)
    return checked


def _prepare(schema: dict[str, Any]) -> None:
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("format") == "ipv4":
        raise RequestError("xgrammar does not enforce the format ipv4")
    if "format" in schema and schema["format"] not in _FORMATS:
        del schema["format"]
    keys = schema.keys() - _ANNOTATIONS
    if unknown := sorted(keys - _ENFORCED):
        raise RequestError(f"xgrammar does not enforce {_quoted(unknown)}")
    if "type" in keys and ("const" in keys or "enum" in keys) and _values_have_the_type(schema):
        keys -= {"type"}
    for alone in _ALONE:
        if alone in keys and (ignored := sorted(keys - {alone})):
            raise RequestError(f"xgrammar ignores {_quoted(ignored)} next to '{alone}'")
    if len(schema.get("allOf") or ()) > 1:
        raise RequestError("xgrammar does not enforce 'allOf' with more than one schema")
    if "multipleOf" in keys and schema.get("type") != "integer":
        raise RequestError("xgrammar enforces 'multipleOf' only with the type integer")
    _check_string(schema)
    _check_names(schema)
    if lists_all(schema):
        schema["additionalProperties"] = False


def _check_string(schema: dict[str, Any]) -> None:
    for first in ("pattern", "format"):
        ignored = [each for each in ("minLength", "maxLength") if each in schema]
        if first in schema and ignored:
            raise RequestError(f"xgrammar ignores {_quoted(ignored)} next to '{first}'")
    if "pattern" in schema and "format" in schema:
        raise RequestError("xgrammar does not enforce 'pattern' and 'format' together")
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        schema["pattern"] = enforced_expression(pattern)
        if _UNESCAPED.search(pattern):
            raise RequestError(
                "a pattern must not contain quotes, backslashes or control characters, because"
                " xgrammar does not escape them in the JSON text"
            )
        if prod(_repetitions(pattern)) > MAX_REPEATED:
            raise RequestError(f"xgrammar enforces at most {MAX_REPEATED} repetitions in a pattern")


def _repetitions(pattern: str) -> Iterator[int]:
    """The largest number of each ``{m}`` or ``{m,n}`` in an expression, at least 1."""
    for found in _REPEATED.finditer(pattern):
        yield max(1, *(int(each) for each in found.groups("0")))


def _check_names(schema: dict[str, Any]) -> None:
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        raise RequestError(f"xgrammar does not follow the reference {excerpt(str(reference))}")
    required, properties = schema.get("required"), schema.get("properties")
    if isinstance(required, list):
        declared = properties if isinstance(properties, dict) else {}
        missing = [name for name in required if isinstance(name, str) and name not in declared]
        if missing:
            raise RequestError(
                "xgrammar enforces 'required' only for names that 'properties' lists, which"
                f" {quoted(missing[0])} is not"
            )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _values_have_the_type(schema: dict[str, Any]) -> bool:
    """Whether ``type`` allows all values of ``enum`` or ``const``, so that it changes nothing."""
    given = schema["type"]
    names = given if isinstance(given, list) else [given]
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or not all(isinstance(name, str) for name in names):
        return False
    types = {each for name in names for each in _TYPES.get(name, ())}
    return all(type(value) in types for value in values)
