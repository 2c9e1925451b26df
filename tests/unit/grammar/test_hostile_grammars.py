"""Constraints that are made to cost time or memory: each is refused, or ends its own request, within
the budget of one sequence. Work is counted in seconds of computing, not of waiting."""

from __future__ import annotations

import random
import time

import pytest
from grammar_cases import BACKENDS, ENDS, grammar

from setpoint.core.errors import RequestError
from setpoint.grammar.masks import MASK_CREDIT_S, MASK_SHARE_S
from setpoint_testing.byte_tokenizer import VOCAB_SIZE
from setpoint_testing.constrained import allowed_tokens

DOUBLING = {f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(25)}
HOSTILE = {
    "regex, long": {"regex": "x" * 16_000},
    "regex, states": {"regex": "(a|b)*a(a|b){200}c.*d.{200}e"},
    "regex, repetitions": {"regex": r"((\w{1,500}|\d{1,500}){1,500}){1,500}"},
    "regex, stars": {"regex": "((((a*)*)*)*)*b"},
    "schema, enum": {"json_schema": {"enum": [f"v{index}" for index in range(20_000)]}},
    "schema, patterns": {
        "json_schema": {
            "properties": {
                f"p{index}": {"type": "string", "pattern": f"^a{index}.*b{{1,50}}$"}
                for index in range(1000)
            },
            "type": "object",
        }
    },
    "schema, doubling": {
        "json_schema": {"$defs": DOUBLING | {"d25": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    },
    "schema, product": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"{i}{j}": {"type": "integer"}}} for j in range(4)]}
                for i in range(10)
            ]
        }
    },
    "schema, endless": {
        "json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    },
    "ebnf, ambiguous": {"ebnf": 'root ::= e\ne ::= e e | "a" | ""'},
    "ebnf, very ambiguous": {
        "ebnf": 'root ::= s\ns ::= s s | s s s | s s s s | [a-z0-9 .,]+ | [A-Z]* | "" | "q0"'
    },
    "ebnf, ambiguous words": {"ebnf": 'start: e\ne: e e e | "a" | "ab" | "b"'},
    "ebnf, left recursion": {"ebnf": 'root ::= a\na ::= b "x" | "y"\nb ::= a | c\nc ::= b | a'},
    "ebnf, nested": {"ebnf": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "ebnf, forced without end": {"ebnf": 'start: "x" | "y" A "b"\nA: "b"+'},
    "tag, forced without end": {
        "structural_tag": {
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "a",
                "content": {"type": "plus", "content": {"type": "const_string", "value": "b"}},
                "end": "b",
            },
        }
    },
    "ebnf, lines": {"ebnf": 'root ::= "x"' + "\n" * 200_000},
    "ebnf, rules": {"ebnf": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(9000))},
    "ebnf, complement": {"ebnf": "start: T\nT: /(?s:.*)/ & ~/(?s:.*)a.{12}b(?s:.*)/"},
    "tag, triggers": {
        "structural_tag": {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": [f"<{index}>" for index in range(250)],
                "tags": [
                    {
                        "type": "tag",
                        "begin": f"<{index}>",
                        "content": {"type": "any_text"},
                        "end": "!",
                    }
                    for index in range(250)
                ],
            },
        }
    },
}


@pytest.mark.cases(11)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HOSTILE)
def test_its_masks_stay_within_their_budget(name: str, backend: str) -> None:
    draw, num_tokens, began = random.Random(0), 0, 0.0
    try:
        found = grammar(backend=backend, **HOSTILE[name])
        began = time.thread_time()
        while num_tokens < 300 and not found.terminated:
            choices = [each for each in allowed_tokens(found, VOCAB_SIZE) if each not in ENDS]
            if not choices:
                break
            num_tokens += 1
            found.accept(draw.choice(choices))
    except RequestError:
        pass
    # The last mask may exceed the budget by its own time, which the library's limits bound.
    if began:
        spent_s = time.thread_time() - began
        assert spent_s < MASK_CREDIT_S + MASK_SHARE_S * num_tokens + 5


def test_too_much_work_is_no_fault_of_the_token() -> None:
    """Red before: "The grammar does not allow token 97", which it does."""
    found = grammar(regex="(((((a{30}){30}){30}){30}){30}){30}")
    assert ord("a") in allowed_tokens(found, VOCAB_SIZE)
    with pytest.raises(RequestError, match="it takes too much work"):
        found.accept(ord("a"))
