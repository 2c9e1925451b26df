"""Constraints by the real library over the byte tokenizer: schemas, expressions, grammars, and
where the constraint begins and the output ends."""

from __future__ import annotations

import json

import numpy as np
import pytest
from grammar_cases import (
    BACKENDS,
    ENDS,
    allowed,
    factory,
    grammar,
    ids_of,
    refusal,
    request,
    verdict,
)

from setpoint.core.errors import RequestError
from setpoint.grammar.definition import check_whitespace
from setpoint.grammar.schema import JsonSpacing
from setpoint_testing.byte_tokenizer import EOS_ID, IM_END_ID, VOCAB_SIZE
from setpoint_testing.constrained import Patient


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ("$$ANY$$", '[1, {"a": null}]', "ends"),
        ("$$ANY$$", "hello", "no"),
        ("{}", "true", "ends"),
        ({"type": "object"}, '{"a": [1]}', "ends"),
        ({"type": "object"}, "[", "no"),
        ({"enum": ["ä", 3]}, '"ä"', "ends"),
        ("true", "12", "may end"),
    ],
)
def test_schemas(backend: str, schema: object, text: str, wanted: str) -> None:
    assert verdict(text, backend=backend, json_schema=schema) == wanted


@pytest.mark.parametrize(
    ("regex", "text", "wanted"),
    [
        ("(yes|no)", "yes", "ends"),
        ("^abc$", "abc", "ends"),
        (r"\d{3}-\d{4}", "555-1234", "ends"),
        ("[一-鿿]+", "中", "may end"),
        ("[^x]+/", "é/", "may end"),
        ("[^x]+", "<|im_start|>", "no"),
    ],
)
def test_expressions(backend: str, regex: str, text: str, wanted: str) -> None:
    assert verdict(text, backend=backend, regex=regex) == wanted


def tagged(pattern: str) -> str:
    regex = {"type": "regex", "pattern": pattern}
    return json.dumps({"type": "structural_tag", "format": regex})


@pytest.mark.parametrize(
    ("pattern", "text", "wanted"),
    [
        (r"\d", "7", "ends"),
        (r"\d", "٣", "no"),
        (r"[\d.]", "٣", "no"),
        (r"[^\d]", "٣", "ends"),
        (r"\D", "٣", "ends"),
        (r"\w", "_", "ends"),
        (r"\w", "é", "no"),
        (r"\W", "é", "ends"),
    ],
)
def test_classes_of_characters_mean_the_same_wherever_an_expression_stands(
    backend: str, pattern: str, text: str, wanted: str
) -> None:
    """Red before: in a regex \\d was any digit of Unicode, in the pattern of a schema one of
    ten."""
    assert verdict(text, backend=backend, regex=pattern) == wanted
    assert verdict(text, backend=backend, structural_tag=tagged(pattern)) == wanted
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    assert verdict(f'"{text}"', backend=backend, json_schema=schema) == wanted


@pytest.mark.parametrize(
    ("pattern", "text", "wanted"),
    [
        (r"(?i)\w", "ſ", "ends"),
        (r"(?i)\W", "ſ", "no"),
        (r"(?i)[^\w]", "\u212a", "no"),
        (r"(?i)\w", "é", "no"),
        ("(?i)[a-z]", "ſ", "ends"),
        ("(?i)[a-z]", "K", "ends"),
        ("(?i)[^a-z]", "ſ", "no"),
        ("(?i)[^a-z]", "ı", "ends"),
        ("(?i:s)s", "Ss", "ends"),
        ("(?i:s)s", "SS", "no"),
        ("(?i)[ſ]", "s", "ends"),
        ("(?i)É", "é", "ends"),
        (r"(?i)[\x{41}_]", "a", "ends"),
    ],
)
def test_case_is_ignored_by_the_rules_of_unicode(pattern: str, text: str, wanted: str) -> None:
    """They are those of ECMA-262 with the flag u, with which JSON Schema reads expressions."""
    assert verdict(text, regex=pattern) == wanted
    assert verdict(text, structural_tag=tagged(pattern)) == wanted
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    assert verdict(f'"{text}"', json_schema=schema) == wanted
    names = {"type": "object", "patternProperties": {f"^{pattern}$": {}}}
    names |= {"additionalProperties": False}
    assert verdict(f'{{"{text}":1}}', json_schema=names) == wanted


@pytest.mark.parametrize("part", ["[a-z]", r"\pL"])
def test_an_expression_that_ignores_case_has_few_classes(part: str) -> None:
    assert verdict("k" * 64, regex="(?i)" + part * 64) == "ends"
    assert "more than 64 classes" in refusal(regex="(?i)" + part * 65)
    assert "more than 64 classes" in refusal(json_schema={"pattern": "(?i)" + part * 65})
    assert verdict("k" * 65, regex=part * 65) == "ends"


OPEN = "ends with a backslash"


@pytest.mark.parametrize("pattern", ["\\", "a\\", "\\\\\\"])
def test_a_backslash_that_nothing_follows_is_refused(backend: str, pattern: str) -> None:
    """Red before: it vanished, and as a schema's pattern it allowed any text."""
    assert OPEN in refusal(backend=backend, regex=pattern)
    assert OPEN in refusal(backend=backend, structural_tag=tagged(pattern))
    for schema in (
        {"type": "string", "pattern": pattern},
        {"type": "object", "patternProperties": {pattern: {}}},
        {"type": "array", "items": {"pattern": pattern}},
    ):
        message = refusal(backend=backend, json_schema=schema)
        assert "that does not end with a backslash" in message
    assert verdict("\\", backend=backend, regex=r"\\") == "ends"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?=x)", "look-around"),
        ("[", "is not closed"),
        ("[ ,]*", "more than spaces, tabs and line breaks"),
        ("ab", "more than spaces"),
        (r"\s", "more than spaces"),
        (" |\u00a0", "more than spaces"),
        ("\\", OPEN),
    ],
)
def test_an_expression_that_cannot_be_whitespace(pattern: str, words: str) -> None:
    """Red before: some were accepted at start, and every client got a 400."""
    with pytest.raises(RequestError, match=words):
        check_whitespace(pattern)


@pytest.mark.parametrize("pattern", ["[\n ]*", r"[ \t]?", r"(\r\n|\n){0,2}", "^ *$", "x{0}"])
def test_an_expression_that_can_be_whitespace(pattern: str) -> None:
    check_whitespace(pattern)
    spacing = JsonSpacing(pattern=pattern)
    assert verdict('{"a":[1]}', spacing=spacing, json_schema=ONE) in ("ends", "no")


ONE = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
ONE["required"] = ["a"]


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("spacing", "texts"),
    [
        (JsonSpacing(), {'{ "a": [1,\n2]}': "ends", '{"a":[1,2]}': "ends"}),
        (JsonSpacing(max_chars=1), {'{ "a": [1]}': "ends", '{  "a": [1]}': "no"}),
        (JsonSpacing(max_chars=0), {'{"a":[1,2]}': "ends", '{"a": [1]}': "no", '{ "a"': "no"}),
        (JsonSpacing(is_compact=True), {'{"a":[1,2]}': "ends", '{"a":\n': "no"}),
    ],
)
def test_whitespace_between_the_parts_of_json(
    backend: str, spacing: JsonSpacing, texts: dict[str, str]
) -> None:
    for text, wanted in texts.items():
        found = verdict(text, backend=backend, spacing=spacing, json_schema=ONE)
        assert found == wanted, text


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_an_expression_for_whitespace(kind: str) -> None:
    spacing = JsonSpacing(pattern="[\n ]*")
    wanted: object = ONE
    if kind == "structural_tag":
        inner = {"type": "json_schema", "json_schema": ONE}
        wanted = json.dumps({"type": "structural_tag", "format": inner})
    for text, verdict_of in (('{"a":\n\n [1]}', "ends"), ('{"a":\t', "no"), ('{"a":[1]}', "ends")):
        assert verdict(text, spacing=spacing, **{kind: wanted}) == verdict_of, text


def test_expressions_of_llguidance() -> None:
    assert verdict("AB", regex=r"(?i)ab*") == "may end"


@pytest.mark.parametrize(
    ("ebnf", "text", "wanted"),
    [
        ('root ::= "a" | "b"', "b", "ends"),
        ('root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"', "1+(2+3)", "may end"),
        ('root ::= "a"{2,3}', "aa", "may end"),
    ],
)
def test_grammars(backend: str, ebnf: str, text: str, wanted: str) -> None:
    assert verdict(text, backend=backend, ebnf=ebnf) == wanted


def test_grammars_in_larks_syntax() -> None:
    assert verdict("a7", ebnf='start: "a" B\nB: /[0-9]/') == "ends"


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "{", "json grammar: the schema is not valid JSON"),
        ("json_schema", "3", "json grammar: a schema must be an object"),
        (
            "json_schema",
            '{"not": {}}',
            'json grammar: #/not: these keywords cannot be enforced here; leave them out: "not"',
        ),
        ("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}', "cannot be enforced here"),
        ("json_schema", "false", "json grammar: no JSON value satisfies the schema"),
        ("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}', "minimum (2)"),
        ("json_schema", '{"$ref": "#"}', "json grammar: it allows no token"),
        ("json_schema", '{"$ref": "http://x/y"}', "'http://x/y' is outside of the schema"),
        ("json_schema", '{"$ref": "#/$defs/x"}', "leads to '#/$defs/x', which the schema has not"),
        (
            "json_schema",
            '{"properties": {"a": {"type": "obj"}}}',
            "#/properties/a/type: the value must be one of null, boolean, object, array, number,"
            ' integer, string, or a list of these; it is "obj"',
        ),
        ("json_schema", '{"type": "number", "multipleOf": -1}', "a number above 0; it is -1"),
        (
            "json_schema",
            '{"allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}]}',
            "exclusiveMinimum 1 together with maximum 1.5 is not supported",
        ),
        (
            "json_schema",
            '{"$ref": "#/$defs/x", "maximum": 1.5, "$defs": {"x": {"exclusiveMinimum": 1}}}',
            "exclusiveMinimum 1 together with maximum 1.5 is not supported",
        ),
        ("json_schema", '{"items": 3}', "#/items: a schema must be an object, true or false"),
        ("json_schema", r'{"pattern": "a$b"}', "'^' may only be at the beginning of the text"),
        (
            "json_schema",
            '{"patternProperties": {"a": {}, "b": {}}}',
            "a name may match only one expression of patternProperties",
        ),
        ("json_schema", '{"type": "integer", "minimum": 1e30}', "numbers of 64 bits"),
        (
            "json_schema",
            '{"a":' * 200 + "1" + "}" * 200,
            "lists and objects in the schema are nested",
        ),
        ("json_schema", "[" * 100_000, "not valid JSON"),
        ("regex", "(", "regex grammar: "),
        ("regex", r"(a)\1", r"a reference to a group (\1) cannot be enforced; leave it out"),
        (
            "regex",
            r"\d{3",
            r'grammar: the expression "\\d{3" cannot be used: a repetition ({…}) is not',
        ),
        ("regex", r"\bfoo", r"the edge of a word (\b, \B) cannot be enforced; leave it out"),
        ("regex", r"a$b", "'^' may only be at the beginning of the text"),
        ("regex", "(?=x)", "look-around ((?=…), (?!…), (?<=…), (?<!…)) cannot be enforced"),
        ("regex", "(?>a)", "'(?' may be followed by the flags"),
        ("ebnf", "start: X", 'at 1(8): unknown name: "X"'),
        ("ebnf", "start: <nope>", 'the tokenizer has no special token "<nope>"'),
        ("ebnf", 'start: %json {"type": "obj"}', "type must be null, boolean, object, array"),
        ("ebnf", "not a grammar", "ebnf grammar: the grammar cannot be read"),
        ("ebnf", "root ::= x", "Rule 'x' not found"),
        ("ebnf", 'start: start "a"', "ebnf grammar: it allows no token"),
    ],
)
def test_what_is_refused(kind: str, text: str, words: str) -> None:
    message = refusal(**{kind: text})
    assert words in message
    assert len(message) < 1200


BROKEN = {"type": "string", "pattern": "("}
TURNED = {"type": "integer", "minimum": 5, "maximum": 3}
UNCLOSED = 'the expression "(" cannot be used: a group is not closed'
NOTHING = "no JSON value satisfies the schema: "


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"pattern": "("}, f"#/pattern: {UNCLOSED}"),
        ({"properties": {"a": {}, "b": BROKEN}}, f"#/properties/b/pattern: {UNCLOSED}"),
        ({"items": {"anyOf": [{"type": "null"}, BROKEN]}}, f"#/items/anyOf/1/pattern: {UNCLOSED}"),
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": BROKEN}},
            f"#/$defs/x/pattern: {UNCLOSED}",
        ),
        ({"patternProperties": {"^a/": {}, "(": {}}}, f"#/patternProperties/(: {UNCLOSED}"),
        ({"patternProperties": {"[/": {}}}, "#/patternProperties/[~1: the expression"),
        ({"items": {"pattern": r"\bx"}}, "#/items/pattern: the expression"),
        ({"enum": []}, f"#/enum: {NOTHING}the list is empty"),
        (TURNED, f"#: {NOTHING}minimum (5) is greater than maximum (3)"),
        (
            {"properties": {"o": {"enum": []}, "a": TURNED}, "required": ["a"], "type": "object"},
            f"#/properties/a: {NOTHING}minimum (5)",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": TURNED}}, f"#/$defs/a: {NOTHING}minimum (5) is gre"),
        ({"items": {"$ref": "#/$defs/x"}}, "#/items/$ref: $ref leads to '#/$defs/x'"),
        ({"items": {"patternProperties": {"a": {}, "b": {}}}}, "#/items: a name may match only"),
        ({"items": {"pattern": "(?ix)a"}}, '#/items/pattern: the expression "(?ix)a" cannot'),
        (
            {"items": {"minimum": 1e30, "type": "integer"}},
            "#/items/minimum: the bounds of an integer",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_a_refusal_names_the_place_in_a_schema(
    kind: str, schema: dict[str, object], words: str
) -> None:
    """Red before: the words of the library alone, without a place."""
    tag = {"begin": "<", "end": ">", "content": {"type": "json_schema", "json_schema": schema}}
    other = {**tag, "begin": "<<", "content": {"type": "json_schema", "json_schema": {}}}
    tagged = {"type": "triggered_tags", "triggers": ["<"], "tags": [other, tag]}
    wanted = schema if kind == "json_schema" else {"type": "structural_tag", "format": tagged}
    message = refusal(**{kind: wanted})
    assert f"grammar: {words}" in message
    assert "\n" not in message


def test_a_constraint_is_compiled_once(backend: str) -> None:
    wanted = request(regex="compiled once")
    assert not factory(backend).is_cached(wanted)
    first, second = (Patient(factory(backend)(wanted)) for _ in range(2))
    assert factory(backend).is_cached(wanted)
    first.accept(ord("c"))
    assert allowed(first) == {ord("o")}
    assert allowed(second) == {ord("c")}


def test_a_token_that_is_not_allowed_raises(backend: str) -> None:
    found = grammar(backend=backend, regex="ab")
    with pytest.raises(RequestError, match="does not allow token 98"):
        found.accept(ord("b"))


def test_every_end_token_may_end_an_output(backend: str) -> None:
    found = grammar(backend=backend, regex="a+")
    found.accept(ord("a"))
    assert allowed(found) == {ord("a"), EOS_ID, IM_END_ID}
    found.accept(IM_END_ID)
    assert found.terminated


def test_with_ignore_eos_an_output_ends_where_nothing_else_may_follow(backend: str) -> None:
    found = grammar(backend=backend, regex="a{1,2}", ignore_eos=True)
    found.accept(ord("a"))
    assert allowed(found) == {ord("a")}
    found.accept(ord("a"))
    assert found.terminated


def test_behind_the_reasoning(backend: str) -> None:
    """Before, everything is allowed but the end; the ids must come in a row. The last of several
    is the only one allowed where no other is missing."""
    found = grammar(backend=backend, regex="ab", constrain_after=tuple(ids_of("</t>")))
    for token in ids_of("x</</t"):
        assert allowed(found) == set(range(VOCAB_SIZE)) - set(ENDS)
        found.accept(token)
        assert not found.terminated
    assert allowed(found) == {ord(">")}
    found.accept(ord(">"))
    assert allowed(found) == {ord("a")}
    for token in ids_of("ab"):
        found.accept(token)
    assert found.terminated


def test_behind_a_single_token(backend: str) -> None:
    found = grammar(backend=backend, regex="a", constrain_after=tuple(ids_of("<|im_start|>")))
    assert allowed(found) == set(range(VOCAB_SIZE)) - set(ENDS)
    found.accept(*ids_of("<|im_start|>"))
    assert allowed(found) == {ord("a")}


def test_masks_have_no_bits_beyond_the_vocabulary(backend: str) -> None:
    words = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    grammar(backend=backend, regex="(.|\n)*").fill_mask(words, 0)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
