"""Keywords that grammar libraries do not have: after rewriting, the grammar accepts the values that
satisfy the schema, and no other; what it cannot enforce is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from setpoint.core.constraint import MAX_CHARS
from setpoint.core.errors import RequestError
from setpoint.schemas.reading import checked_schema
from setpoint.schemas.rewriting import rewritten
from setpoint_testing.schema_grammar import SchemaGrammar

COLOUR = {"enum": ["red", "green", "blue"]}
ORDER = {
    "type": "object",
    "properties": {
        "pay": {"enum": ["card", "cash"]},
        "card": {"type": "string", "pattern": "^[0-9]{4}$"},
        "change": {"type": "integer"},
    },
    "required": ["pay"],
}
OPEN = {"additionalProperties": True}

CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "if, then, else by a const": (
        ORDER | {"if": {"properties": {"pay": {"const": "card"}}, "required": ["pay"]},
                 "then": {"required": ["card"]}, "else": {"required": ["change"]}},
        [{"pay": "card", "card": "1234"}, {"pay": "cash", "change": 3}],
        [{"pay": "card"}, {"pay": "cash"}, {"pay": "cash", "card": "1234"}],
    ),
    "several conditions": (
        ORDER | {"allOf": [
            {"if": {"properties": {"pay": {"const": kind}}}, "then": {"required": [needed]}}
            for kind, needed in (("card", "card"), ("cash", "change"))]},
        [{"pay": "card", "card": "1234"}, {"pay": "cash", "change": 3}],
        [{"pay": "card"}, {"pay": "cash", "card": "1234"}],
    ),
    "not a type": ({"not": {"type": ["string", "object"]}}, [1, None, [], True], ["", {}]),
    "not a const": ({"type": "string", "not": {"const": "foo"}}, ["", "fo", "food"], ["foo"]),
    "not an enum": (
        {"type": "string", "not": {"enum": ["foo", "fob", ""]}}, ["f", "fo", "x"],
        ["foo", "fob", ""],
    ),
    "not a number": ({"type": "integer", "not": {"const": 3}}, [2, 4, -3], [3]),
    "not an interval": (
        {"type": "number", "not": {"minimum": 1, "maximum": 5}}, [0, 6, 0.5], [1, 3.5, 5],
    ),
    "not an object with a property": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 2}],
    ),
    "names that match": (
        {"type": "object", "propertyNames": {"pattern": "^x-"},
         "additionalProperties": {"type": "integer"}},
        [{}, {"x-a": 1}],
        [{"a": 1}, {"x-a": "b"}],
    ),
    "names of an enum": (
        {"type": "object", "propertyNames": COLOUR, "additionalProperties": {"type": "integer"}},
        [{}, {"red": 1}, {"red": 1, "blue": 2}],
        [{"black": 1}, {"red": "a"}],
    ),
    "dependent properties": (
        {"type": "object", "properties": {"card": {"type": "integer"}, "zip": {"type": "integer"}},
         "dependentRequired": {"card": ["zip"]}},
        [{}, {"zip": 1}, {"card": 1, "zip": 2}],
        [{"card": 1}],
    ),
    "dependent schemas": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}},
         "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}, "required": ["b"]}}},
        [{}, {"b": 3}, {"a": 1, "b": None}],
        [{"a": 1}, {"a": 1, "b": 3}],
    ),
    "dependencies of draft 7": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "one of overlapping ranges": (
        {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]},
        [-1, 6],
        [0, 3, 5],
    ),
    "one of two properties": (
        {"type": "object", "properties": {"a": {}, "b": {}},
         "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "a listed property that matches a pattern": (
        {"type": "object", "properties": {"ab": {"type": "string"}},
         "patternProperties": {"^a": {"maxLength": 2}}},
        [{"ab": "xy"}],
        [{"ab": "xyz"}, {"ab": 1}],
    ),
    "recursion": (
        {"$defs": {"node": {
            "type": "object",
            "properties": {"value": {"not": {"type": "null"}}, "next": {"$ref": "#/$defs/node"}},
            "required": ["value"]}},
         "$ref": "#/$defs/node"},
        [{"value": 1}, {"value": 1, "next": {"value": 2, "next": {"value": 3}}}],
        [{"value": None}, {"value": 1, "next": {"value": None}}],
    ),
    "integral floats": (
        {"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["a", "ab"], ["", "abc"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_enforced(name: str) -> None:
    schema, valid, invalid = CASES[name]
    grammar = SchemaGrammar(schema)
    assert grammar.report.warnings == []
    judge = Draft202012Validator(schema)
    if "dependencies" not in schema:
        assert [each for each in valid if not judge.is_valid(each)] == []
        assert [each for each in invalid if judge.is_valid(each)] == []
    assert [each for each in valid if not grammar.accepts(each)] == []
    assert [each for each in invalid if grammar.accepts(each)] == []


NOT_OF_XGRAMMAR = (
    *("if, then, else by a const", "several conditions", "not a number", "not an interval"),
    *("not an object with a property", "names that match", "dependent properties"),
    *("dependent schemas", "dependencies of draft 7", "one of two properties"),
    "a listed property that matches a pattern",
)
"""They need ``patternProperties``, or keywords next to ``anyOf`` or ``allOf``, which xgrammar does
not enforce, so they are refused by name."""


@pytest.mark.parametrize("name", CASES)
def test_it_is_enforced_by_xgrammar(name: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from setpoint.engine.grammar.xgrammar_schema import enforced_schema

    schema, valid, invalid = CASES[name]
    found = json.loads(json.dumps(rewritten(schema).schema))
    if name in NOT_OF_XGRAMMAR:
        with pytest.raises(RequestError, match=r"xgrammar (does not enforce|ignores)"):
            enforced_schema(found)
        return
    texts = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    grammar = compiler.compile_json_schema(json.dumps(enforced_schema(found)), strict_mode=False)

    def accepts(value: Any) -> bool:
        # xgrammar has the lists of an enum in their compact form alone.
        texts = {json.dumps(value).encode(), json.dumps(value, separators=(",", ":")).encode()}
        return any(is_whole(xgrammar.GrammarMatcher(grammar), text) for text in texts)

    def is_whole(matcher: Any, text: bytes) -> bool:
        return all(map(matcher.accept_token, text)) and bool(matcher.is_completed())

    assert [each for each in valid if not accepts(each)] == []
    assert [each for each in invalid if accepts(each)] == []


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "#/uniqueItems"),
        ({"type": "string", "not": {"pattern": "a"}}, "not", "#/not"),
        ({"type": "string", "pattern": "^(?!a)"}, "pattern", "#/pattern"),
        ({"type": "number", "not": {"multipleOf": 3}}, "not", "#/not"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf", "#/oneOf"),
        ({"if": {"pattern": "^a"}, "then": {"maxLength": 3}}, "if", "#/if"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties", "#/unevaluatedProperties"),
        ({"propertyNames": {"maxLength": 2}}, "propertyNames", "#/propertyNames"),
        ({"$defs": {"a": {"$dynamicRef": "#b"}}}, "$dynamicRef", "#/$defs/a/$dynamicRef"),
        (
            {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 2},
            "minProperties",
            "#/minProperties",
        ),
        ({"properties": {"a": {"$ref": "https://x/y"}}}, "$ref", "#/properties/a/$ref"),
        (
            {"type": "array", "items": {"enum": list(range(30))}, "uniqueItems": True},
            "uniqueItems",
            "#/uniqueItems",
        ),
        (
            {"type": "array", "contains": {"const": 1}, "minContains": 1000},
            "contains",
            "#/contains",
        ),
    ],
)
def test_what_is_not_enforced_is_named(schema: dict[str, Any], keyword: str, path: str) -> None:
    lost = SchemaGrammar(schema).report.lost
    assert [(each.keyword, each.path) for each in lost] == [(keyword, path)]


TOO_SHORT = {"type": "array", "minItems": 3, "maxItems": 1, "not": {"type": "null"}}
NOTHING = {"type": "null", "not": {"type": "null"}}


def _with_required(impossible: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": impossible, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("impossible", [TOO_SHORT, NOTHING])
def test_an_object_whose_required_property_is_impossible_is_impossible(impossible: Any) -> None:
    whole = _with_required(impossible)
    for schema in (
        whole,
        _with_required(whole),
        {"anyOf": [whole, _with_required(TOO_SHORT)]},
        {"type": "array", "items": whole, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "integer"}, whole], "minItems": 2},
        {"$ref": "#/$defs/x", "$defs": {"x": whole}},
    ):
        with pytest.raises(RequestError, match=r"no JSON value satisfies|Unsatisfiable"):
            SchemaGrammar(schema)


def test_an_impossible_object_is_left_out_where_others_are_possible() -> None:
    grammar = SchemaGrammar({"anyOf": [_with_required(TOO_SHORT), {"type": "integer"}]})
    assert grammar.accepts(1)
    assert not grammar.accepts({"b": True})
    assert SchemaGrammar({"type": "array", "items": _with_required(TOO_SHORT)}).accepts([])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, "no JSON value satisfies"),
        ({"not": 3}, "#/not: a schema must be"),
        ({"not": {"minLength": -1}}, "#/not/minLength: the value must be"),
        ({"not": {"type": "strung"}}, "#/not/type: the value must be one of null"),
        ({"not": {"required": "a"}}, "#/not/required: the value must be a list of strings"),
        ({"not": {}, "$ref": "#/$defs/x"}, "'#/$defs/x' leads to nothing"),
    ],
)
def test_schemas_that_are_wrong_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        rewritten(checked_schema(schema))
    assert words in refused.value.message


def _fans_out(depth: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"d{n}": {
            "allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2,
            "properties": {"a": {"not": {"$ref": f"#/$defs/d{n + 1}"}}},
        }
        for n in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "object"}
    return {"$defs": definitions, "$ref": "#/$defs/d0", "not": {"const": 1}}


HOSTILE: dict[str, dict[str, Any]] = {
    "a product of choices": {
        "allOf": [{"anyOf": [{"required": [f"{n}_{k}"]} for k in range(10)]} for n in range(10)],
        "not": {"const": 1},
    },
    "references that fan out": _fans_out(60),
    "a chain of references": {
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)} | {"d3000": {}},
        "$ref": "#/$defs/d0",
        "not": {"const": 1},
    },
    "many dependencies": {
        "dependentRequired": {f"p{n}": [f"p{(n + 7) % 40}", f"q{n}"] for n in range(40)}
    },
    "many alternatives": {"oneOf": [{"required": [f"k{n}"]} for n in range(200)]},
    "a thousand million items": {
        "contains": {"const": 1}, "minContains": 2, "maxContains": 10**9, "maxItems": 10**9,
    },
    "many equal choices": {
        "prefixItems": [{"enum": list(range(60))}] * 60, "uniqueItems": True, "minItems": 60,
    },
    "a pattern that takes for ever": {
        "properties": {"a" * 200: {}}, "patternProperties": {"(a+)+b": {}}, "not": {"const": 1},
    },
    "an endless range": {"type": "integer", "not": {"multipleOf": 3}, "maximum": 10**30},
    "a long text": {"type": "string", "not": {"const": "x" * 100_000}},
    "many properties": {
        "properties": {f"p{n}": {"type": "string"} for n in range(5000)},
        "not": {"required": ["p1", "p2"]},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_come_to_an_end(name: str) -> None:
    """Each of them would be rewritten into thousands of millions of alternatives."""
    try:
        found = rewritten(checked_schema(HOSTILE[name]))
    except RequestError:
        return
    assert len(json.dumps(found.schema)) <= MAX_CHARS["json_schema"]


def test_a_schema_without_such_keywords_stays_as_it_is() -> None:
    schema = ORDER | {"$defs": {"x": {"anyOf": [{"type": "null"}]}}}
    assert rewritten(schema).schema is schema
