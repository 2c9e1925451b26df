"""The grammar of a string's ``pattern`` accepts the JSON texts of what the expression matches, and
no other, however the characters are escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.grammar.definition import definition
from setpoint.grammar.schema import JsonSpacing
from setpoint_testing.schema_grammar import SchemaGrammar

CHARACTERS = '"\\/\n\r\x01\x1fat9_ é'
ESCAPES = [
    *(r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t"),
    *(rf"\u{code:04x}" for code in range(128)),
    *(rf"\u00{code:02X}" for code in (*range(10, 16), *range(26, 32), 0x5C, 0x7F)),
]


def texts() -> Iterator[str]:
    """JSON texts of strings of one or two characters, in every form."""
    parts = ['"', "\\", *ESCAPES, *(each for each in CHARACTERS if each not in '"\\\n\r\x01\x1f')]
    for each in parts:
        yield f'"{each}"'
        yield f'"a{each}"'
        yield f'"{each}a"'


def as_value(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def check(grammar: SchemaGrammar, pattern: str) -> None:
    # To Python, $ is also in front of a line break at the end.
    ended = re.sub(r"((?<!\\)(?:\\\\)*)\$(?=\||$)", r"\1\\Z", pattern)
    wanted = re.compile(ended, re.ASCII)
    wrong = [
        text
        for text in texts()
        if grammar.accepts_text(text)
        and ((value := as_value(text)) is None or wanted.search(value) is None)
    ]
    assert wrong == []
    strings = ["".join(each) for n in (0, 1, 2) for each in product(CHARACTERS, repeat=n)]
    missing = [each for each in strings if wanted.search(each) and not grammar.accepts(each)]
    assert missing == []


PATTERNS = [
    r'^[^"]$', r'^[^"]*$', r'^[^"\n]$', r'^[^\w"]$', r'^[^,"]*$', r"^[^\\]$", r"^[^\\]*$",
    r"[^\\]", r"^[^\x5c]$", r"^[^t\\]$", r"^[\x01-\x1f]$", r'^[^"\r\n]$', r'^[^"\x00]$',
    r"^[ -!#-~]$", r"[^\\\s]", r"^[^\x22\u005c]{1,2}$", r'^[\s\S]$', r'^[^a"-]$', r'^[^]"]$',
    r'^["\\]$', r'^"$', r"^\\$", r"^.$", r"^\S\W$", r'^(?:[^"]|")$', r'^(?:[^"]a|[^\\]9)$',
    r'^[^"a]+$|^9$', r"^[\n-\x7f]$", r'^[\x01-!#-\x7f]$', r'^(?P<q>[^"])$', r'^\[?[^"]$',
    r'^[\S\n]$', r'^[\d\D]$', r'^[^\d"\]]?$',
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_kept_however_characters_are_escaped(pattern: str) -> None:
    check(SchemaGrammar({"type": "string", "pattern": pattern}), pattern)


def test_the_set_notation_of_the_library_is_kept() -> None:
    """Python's expressions have not this notation."""
    for pattern in (r"\p{Cc}", r"\P{P}", "[[:cntrl:]]", '[[^"]&&[^a]]', "[^[:alpha:][:punct:]]"):
        grammar = SchemaGrammar({"type": "string", "pattern": f"^{pattern}$"})
        assert grammar.accepts("\x01")
        assert not grammar.accepts('"')
    assert (
        SchemaGrammar({"type": "string", "pattern": r"^(?P<a[>[^\\])$"}).accepts_text(r'"\\"')
        is False
    )


items = st.sampled_from(
    (*'"/ aé_', r"\\", r"\n", r"\r", r"\x01-\x1f", r"\s", r"\S", r"\w", r"\W", "!-~", r"\t-z")
)
classes = st.builds(
    lambda no, inside, end: f"[{no}{''.join(inside)}{end}]",
    st.sampled_from(["", "^"]),
    st.lists(items, min_size=1, max_size=3),
    st.sampled_from(["", "-"]),
)
atoms = st.one_of(classes, st.sampled_from((".", '"', r"\\", "a", r"\s", r"\S", r"\x01", r"\n")))
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{})?".format, inner),
    ),
    max_leaves=4,
)


@given(expressions)
def test_any_pattern_is_kept_however_characters_are_escaped(expression: str) -> None:
    """The expressions mean the same to Python among these characters."""
    try:
        grammar = SchemaGrammar({"type": "string", "pattern": f"^(?:{expression})$"})
    except RequestError as refused:
        if "Regex is empty" not in refused.message:
            raise
        return
    wanted = re.compile(rf"(?:{expression})", re.ASCII)
    for text in texts():
        if grammar.accepts_text(text):
            value = as_value(text)
            assert value is not None, (expression, text)
            assert wanted.fullmatch(value), (expression, text)
    for value in map("".join, product('"\\\n\x01aé', repeat=2)):
        assert grammar.accepts(value) == bool(wanted.fullmatch(value)), (expression, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": r'^[^"\\]*$', "maxLength": 3},
        {"allOf": [{"type": "string", "pattern": r'^[^"]*$'}, {"pattern": r"^[^\\]+$"}]},
        {"type": "string", "pattern": r'^[^"\\]*$', "not": {"const": "b"}},
        {"type": "string", "not": {"enum": ['"', "\\"]}, "maxLength": 1},
    ],
)
def test_a_pattern_is_kept_beside_other_keywords(schema: dict[str, Any]) -> None:
    grammar = SchemaGrammar(schema)
    assert grammar.accepts("a")
    for text in (r'"\""', r'"\\"', r'"\u0022"', r'"\u005c"'):
        assert not grammar.accepts_text(text)


def test_names_are_held_to_their_pattern() -> None:
    grammar = SchemaGrammar(
        {"type": "object", "patternProperties": {'^[^"]$': {"type": "null"}},
         "additionalProperties": False}
    )  # fmt: skip
    assert grammar.accepts({"a": None})
    assert grammar.accepts({"\\": None})
    assert not grammar.accepts({'"': None})


def test_a_structural_tag_holds_strings_to_their_pattern() -> None:
    content = {"type": "json_schema", "json_schema": {"type": "string", "pattern": r"^[^\\]*$"}}
    tag = {"type": "structural_tag",
           "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}  # fmt: skip
    text = definition(Constraint("structural_tag", json.dumps(tag)), {}, JsonSpacing())

    def accepts(output: bytes) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0)
        return matcher.try_consume_tokens(list(output)) == len(output)

    assert accepts(rb'<"a\"b">')
    assert not accepts(rb'<"a\\b">')


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"^a\x00$", "U+0000"),
        ("\0", "U+0000"),
        (r"^\u{0}$", "U+0000"),
        ('(?x) [^"] # [', "the flag x"),
        ("(?s-m:(?mx) a)", "the flag x"),
        ('[^"', "is not closed"),
    ],
)
def test_what_would_evade_a_class_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        SchemaGrammar({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    "named",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"patternProperties": {"^a$": {"type": "integer"}}},
        {"properties": {"a": {"type": "integer"}}, "not": {"required": ["b"]}},
    ],
)
@pytest.mark.parametrize("others", [{"type": "string"}, True])
def test_an_escaped_name_is_no_other_name(named: dict[str, Any], others: Any) -> None:
    """Red before: the schema of ``a`` did not hold for it."""
    schema = {"type": "object", **named, "additionalProperties": others}
    for grammar in (
        SchemaGrammar(schema),
        SchemaGrammar({"type": "object", "properties": {"a": schema}}),
    ):
        text = '{"a":%s}' if grammar.accepts_text('{"a":{"a":1}}') else "%s"
        assert grammar.accepts_text(text % '{"a":1,"c":"\\n"}')
        assert not grammar.accepts_text(text % r'{"\u0061":"x"}')
        assert not grammar.accepts_text(text % '{"a":"x"}')
