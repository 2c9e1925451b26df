"""What is xgrammar's own: what it would ignore is refused by name, and its structural tags."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from grammar_cases import allowed, grammar, refusal, request, verdict

from setpoint.config import extras
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError, RequestError
from setpoint.grammar import masks
from setpoint.launch.child.grammars import grammar_factory
from setpoint.launch.parent import preflight
from setpoint_testing.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.constrained import Patient

needs_xgrammar = pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is an extra")
TEXT = {"type": "string"}


@needs_xgrammar
@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "{", "json grammar: the schema is not valid JSON"),
        ("json_schema", "3", "json grammar: a schema must be an object"),
        ("json_schema", "false", "enum array must not be empty"),
        ("json_schema", {"not": {}}, "does not enforce 'not'"),
        ("json_schema", {"items": {"contains": {}}}, "does not enforce 'contains'"),
        ("json_schema", {"oneOf": [{}]}, "does not enforce 'oneOf'"),
        ("json_schema", {"allOf": [TEXT, TEXT]}, "'allOf' with more than one schema"),
        ("json_schema", {"type": "number", "multipleOf": 2}, "only with the type integer"),
        ("json_schema", {"enum": [1, "a"], "type": "integer"}, "ignores 'type' next to 'enum'"),
        ("json_schema", {"anyOf": [TEXT], "minLength": 1}, "ignores 'minLength' next to 'anyOf'"),
        (
            "json_schema",
            {**TEXT, "pattern": "a", "maxLength": 3},
            "ignores 'maxLength' next to 'pattern'",
        ),
        (
            "json_schema",
            {**TEXT, "pattern": "(?=a)a"},
            "does not support '(?=' in regular expressions",
        ),
        ("json_schema", {**TEXT, "pattern": 'a"'}, "must not contain quotes"),
        ("json_schema", {**TEXT, "pattern": "(.{0,20}){3,20}"}, "at most 100 repetitions"),
        ("json_schema", {**TEXT, "format": "ipv4"}, "format ipv4"),
        (
            "json_schema",
            {"type": "object", "required": ["a"]},
            "only for names that 'properties' lists, which 'a' is not",
        ),
        ("json_schema", {"$ref": "http://x/y"}, "does not follow the reference http://x/y"),
        ("json_schema", {"$ref": "#"}, "json grammar: it allows no token"),
        ("regex", "(", "cannot be used: Regex parsing error at position 2"),
        ("regex", r"(a)\1", "Backreference is not supported"),
        ("regex", "(?i)a", "Group modifier flag is not supported"),
        ("json_schema", {**TEXT, "pattern": "^(?i:a)$"}, "Group modifier flag is not supported"),
        ("regex", r"\Aab\z", r"does not support '\A' in regular expressions"),
        ("regex", r"a\\\z", r"does not support '\z' in regular expressions"),
        ("ebnf", "not a grammar", "ebnf grammar: EBNF"),
        ("ebnf", "root ::= " + "(" * 5000, "ebnf grammar: EBNF parser error"),
        ("structural_tag", {"type": "structural_tag", "format": {"type": "token"}}, "'token'"),
        (
            "structural_tag",
            {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": {"not": {}}},
            },
            "structural_tag grammar: xgrammar does not enforce 'not'",
        ),
    ],
)
def test_what_is_refused(kind: str, text: Any, words: str) -> None:
    text = text if isinstance(text, str) else json.dumps(text)
    message = refusal(backend="xgrammar", **{kind: text})
    assert words in message
    assert message.startswith("Failed to compile ")
    assert "/project" not in message


@needs_xgrammar
@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"type": "string", "enum": ["a", "b"]}, '"b"', "ends"),
        ({**TEXT, "format": "color"}, '"x"', "ends"),
        ({**TEXT, "maxLength": 3}, '"\x03', "no"),
        ({**TEXT, "maxLength": 3}, '"abcd', "no"),
        ({"type": "array", "uniqueItems": False, "items": TEXT}, "[]", "ends"),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"b":1}', "no"),
        ({"type": "object"}, '{"b":1}', "ends"),
    ],
)
def test_schemas(schema: dict[str, Any], text: str, wanted: str) -> None:
    assert verdict(text, backend="xgrammar", json_schema=schema) == wanted


CALL = {"begin": "<|im_start|>f=", "end": "</f>"}
ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LEGACY = {
    "type": "structural_tag",
    "structures": [{**CALL, "schema": ARGUMENTS}],
    "triggers": ["<|im_start|>f"],
}
CURRENT = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<|im_start|>f"],
        "tags": [
            {"type": "tag", **CALL, "content": {"type": "json_schema", "json_schema": ARGUMENTS}}
        ],
    },
}


@needs_xgrammar
@pytest.mark.parametrize("tag", [LEGACY, CURRENT], ids=["legacy", "current"])
def test_both_forms_of_a_structural_tag(tag: dict[str, Any]) -> None:
    def made(text: str) -> str:
        return verdict(text, backend="xgrammar", structural_tag=tag)

    assert made("any\ttext") == "may end"
    assert made('x<|im_start|>f={"a":1}</f> y') == "may end"
    assert made('x<|im_start|>f={"a":1') == "open"
    assert made("<|im_start|>f=x") == "no"
    assert made("<|bos|>") == "no"


@needs_xgrammar
def test_a_model_without_an_end_token_ends_where_nothing_may_follow(tmp_path: Path) -> None:
    write_byte_tokenizer(str(tmp_path))
    make = grammar_factory("xgrammar", str(tmp_path), vocab_size=VOCAB_SIZE + 60, eos_token_ids=())
    found = Patient(make(request(regex="a{1,2}")))
    found.accept(ord("a"))
    assert allowed(found, VOCAB_SIZE + 60) == {ord("a")}
    assert not found.terminated
    found.accept(ord("a"))
    assert found.terminated


@needs_xgrammar
def test_masks_spend_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MASK_CREDIT_S", -1.0)
    with pytest.raises(RequestError, match="it takes too much work"):
        grammar(backend="xgrammar", regex="budget")


def test_a_missing_package_is_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"xgrammar needs .*pip install -e '\.\[xgrammar\]'"):
        preflight.preflight(Options.of(grammar_backend="xgrammar"))
