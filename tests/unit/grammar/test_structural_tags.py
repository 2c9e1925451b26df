"""Structural tags: what each format lets through, and which ones are refused with the field at
fault. Over the byte tokenizer, with the real library."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_cases import refusal, verdict

from setpoint.grammar.schema import USUAL
from setpoint.grammar.tag_definition import lark_of
from setpoint.grammar.tags import parse_tag

JSON = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    },
}
A = {"type": "tag", "begin": "<tool=a>", "content": JSON, "end": "</tool>"}
B = {
    "type": "tag",
    "begin": "<tool=b>",
    "content": {"type": "regex", "pattern": "[a-z]+"},
    "end": "end</tool>",
}
CALL_A, CALL_B = '<tool=a>{"x":1}</tool>', "<tool=b>quend</tool>"
WORD = {"type": "regex", "pattern": "[a-z]*"}
TEXT = {"type": "any_text"}


def in_xml(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": schema}}}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(**more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<tool="], "tags": [A, B], **more}


def separated(**more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [A, B], "separator": ",", **more}


def of(name: str, *elements: Any) -> dict[str, Any]:
    return {"type": name, "elements": list(elements)}


XML = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "near": {"$ref": "#/$defs/point"},
    },
    "required": ["city"],
    "$defs": {"point": {"type": "array", "items": {"type": "integer"}}},
}

CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    (const('aé\n"b'), {'aé\n"b': "ends", "a": "open", "b": "no"}),
    (const("a<|im_end|>b"), {"a<|im_end|>b": "ends", "ab": "no"}),
    (TEXT, {"": "may end", "any\ntext": "may end"}),
    ({**TEXT, "excludes": ["bad", "x"]}, {"a b": "may end", "a bad": "no", "x": "no"}),
    (JSON, {'{"x": 1}': "ends", '{"x":"': "no"}),
    ({"type": "regex", "pattern": r"\d+/é"}, {"12/é": "ends", "a": "no"}),
    ({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= "b" | "c" b'}, {"accb": "ends"}),
    (of("sequence", WORD, const("end")), {"xyend": "may end", "end": "may end", "xy": "open"}),
    (of("sequence", TEXT, const("END"), JSON), {'ENEND{"x":1}': "ends", "ENDx": "no"}),
    (of("sequence", TEXT, A), {f"text {CALL_A}": "ends", CALL_A + "a": "no"}),
    (of("sequence", JSON, TEXT), {'{"x":1} and more': "may end"}),
    (of("or", A, B), {CALL_A: "ends", CALL_B: "ends", "<tool=c": "no"}),
    (of("or", const("yes"), const("no")), {"yes": "ends", "no": "ends", "nn": "no"}),
    ({"type": "optional", "content": A}, {"": "may end", CALL_A: "ends"}),
    ({"type": "star", "content": const("ab")}, {"": "may end", "abab": "may end", "aba": "open"}),
    ({"type": "plus", "content": A}, {"": "open", CALL_A + CALL_A: "may end"}),
    (
        {"type": "tag", "begin": "<t>", "content": TEXT, "end": ["</t>", "<|im_start|>"]},
        {"<t>a</t>": "ends", "<t>a<|im_start|>": "ends", "<t>a": "open", "a": "no"},
    ),
    (
        {"type": "tag", "begin": "<|im_start|>", "content": JSON, "end": "<|im_end|>"},
        {'<|im_start|>{"x":3}<|im_end|>': "ends", "<": "no"},
    ),
    ({"type": "tag", "begin": "<t>", "content": TEXT, "end": ""}, {"<t>": "may end"}),
    (
        triggered(),
        {
            "": "may end",
            "a <tool": "may end",
            f"a{CALL_A}b{CALL_B}c": "may end",
            "<tool=c": "no",
            "<tool=a>{}": "no",
            "<tool=a>": "open",
        },
    ),
    (triggered(excludes=["no!"]), {"n": "may end", "no!": "no", f"n{CALL_A}no!": "no"}),
    (
        triggered(at_least_one=True),
        {"": "open", "a": "no", CALL_A: "may end", f"{CALL_A}a{CALL_B}": "may end"},
    ),
    (triggered(stop_after_first=True), {"a": "may end", f"a{CALL_A}": "ends"}),
    (
        triggered(at_least_one=True, stop_after_first=True),
        {"": "open", "a": "no", CALL_A: "ends", CALL_B: "ends"},
    ),
    (separated(), {"": "may end", f"{CALL_A},{CALL_B}": "may end", f"{CALL_A} ": "no"}),
    (separated(at_least_one=True), {"": "open", CALL_A: "may end", f"{CALL_A},": "open"}),
    (separated(stop_after_first=True), {"": "may end", CALL_A: "ends"}),
    (separated(at_least_one=True, stop_after_first=True), {"": "open", CALL_B: "ends"}),
    (
        {"type": "qwen_xml_parameter", "json_schema": XML},
        {
            "<parameter=city>x</parameter>": "may end",
            "\n<parameter=city>\nNew <York>\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "<parameter=unit>\nf\n</parameter>\n<parameter=near>[1,2]</parameter>": "may end",
            "<parameter=days>": "no",
            "<parameter=city>x</parameter><parameter=days>x": "no",
            "<parameter=city>x</parameter><parameter=unit>k": "no",
            "<parameter=city>x</parameter><parameter=near>x": "no",
        },
    ),
    ({**JSON, "style": "qwen_xml"}, {"<parameter=x>4</parameter>": "may end", "{": "no"}),
    (
        in_xml({"type": "string", "const": "m"}),
        {"<parameter=a>m</parameter>": "may end", "<parameter=a>k": "no"},
    ),
]
FLAT = [(each, text, wanted) for each, texts in CASES for text, wanted in texts.items()]


@pytest.mark.cases(28)
@pytest.mark.parametrize(("tag", "text", "wanted"), FLAT)
def test_what_a_format_lets_through(tag: dict[str, Any], text: str, wanted: str) -> None:
    assert verdict(text, structural_tag={"type": "structural_tag", "format": tag}) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", "may end"), ("a<f>12</f>b", "may end"), ("a<fx", "no"), ("<f>x", "no")],
)
def test_the_legacy_form(text: str, wanted: str) -> None:
    structure = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
    legacy = {"type": "structural_tag", "structures": [structure], "triggers": ["<f"]}
    assert verdict(text, structural_tag=legacy) == wanted


MANY = {
    "properties": {f"p{number}": {"type": "object"} for number in range(3000)},
    "$defs": {f"d{number}": {"type": "object"} for number in range(3000)},
}
"""Definitions that each parameter could refer to, so that they are written for each."""


def nested(depth: int) -> dict[str, Any]:
    return TEXT if depth == 0 else {"type": "optional", "content": nested(depth - 1)}


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({"type": "token", "token": 3}, "'triggered_tags' or 'tags_with_separator', not 'token'"),
        ({"type": "any_text", "max_tokens": 3}, "structural_tag.format"),
        ({"type": "const_string"}, "structural_tag.format"),
        (const(3), "structural_tag.format.value must be a string"),  # type: ignore[arg-type]
        (of("sequence"), "structural_tag.format.elements must not be empty"),
        (of("or", of("sequence")), "structural_tag.format.elements[0].elements must not be empty"),
        (of("sequence", TEXT, JSON), "any_text in a sequence must be its last element"),
        (triggered(triggers=[]), "structural_tag.format.triggers must not be empty"),
        (triggered(tags=[]), "structural_tag.format.tags must not be empty"),
        (triggered(triggers=["<", "<tool"]), "must not be the beginning of another"),
        (triggered(triggers=["<x"]), "tags[0].begin must begin with one of the triggers"),
        (triggered(excludes=[""]), "excludes must not contain an empty string"),
        ({**A, "end": []}, "structural_tag.format.end must not be empty"),
        ({**A, "begin": {"type": "token", "token": 1}}, "format.begin must be a string"),
        (
            {"type": "json_schema", "json_schema": {"not": {}}},
            'cannot be enforced here; leave them out: "not"',
        ),
        (
            {"type": "json_schema", "json_schema": {"type": "x"}},
            "#/type: the value must be one of null",
        ),
        ({"type": "regex", "pattern": "("}, "a group is not closed"),
        ({"type": "grammar", "grammar": "x"}, "the grammar cannot be read"),
        ({"type": "qwen_xml_parameter", "json_schema": {"properties": 1}}, "needs the schema"),
        (in_xml({"type": "string", "pattern": "("}), "a group is not closed"),
        (in_xml({"type": "string", "minLength": 3, "maxLength": 2}), "no JSON value satisfies"),
        (nested(100), "are nested more than 32 deep"),
        (triggered(triggers=[f"<{n}>" for n in range(300)]), "triggers has more than 256 entries"),
        ({"type": "qwen_xml_parameter", "json_schema": {"required": 3}}, "required must be a list"),
        ({"type": "qwen_xml_parameter", "json_schema": MANY}, "more than 8388608 characters"),
    ],
)
def test_what_is_refused(tag: dict[str, Any], words: str) -> None:
    message = refusal(structural_tag={"type": "structural_tag", "format": tag})
    assert message.startswith("Failed to compile structural_tag grammar: ")
    assert words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "structural_tag is not valid JSON"),
        ("[]", "structural_tag must be an object"),
        ("{}", "structural_tag"),
        (
            '{"type": "tag", "format": {"type": "any_text"}}',
            "structural_tag.type must be 'structural_tag', not 'tag'",
        ),
        (
            '{"type": "structural_tag", "format": {"type": "nope"}}',
            "structural_tag.format.type must be 'any_text', 'const_string', 'json_schema'",
        ),
        (
            '{"type": "structural_tag", "format": {}}',
            "structural_tag.format.type is missing: 'any_text', 'const_string'",
        ),
        (
            '{"type": "structural_tag", "format": {"type": "any_text"}, "x": 1}',
            "structural_tag.x is not known. Known here: type, format.",
        ),
        (
            '{"type": "structural_tag", "structures": [], "triggers": ["a"]}',
            "tags must not be empty",
        ),
    ],
)
def test_other_texts_are_refused(text: str, words: str) -> None:
    assert words in refusal(structural_tag=text)


@pytest.mark.parametrize("at_least_one", [False, True])
def test_tags_inside_each_other_do_not_double_the_grammar(at_least_one: bool) -> None:
    """Red before: each level wrote the one inside it twice, megabytes for 2 KB."""
    inner: dict[str, Any] = JSON
    for _ in range(14):
        tag = {"type": "tag", "begin": "<a>", "content": inner, "end": "</a>"}
        inner = {
            "type": "triggered_tags",
            "triggers": ["<a"],
            "tags": [tag],
            "at_least_one": at_least_one,
        }
    text = json.dumps({"type": "structural_tag", "format": inner})
    assert len(lark_of(parse_tag(text), {}, USUAL, str)) < 10 * len(text)
