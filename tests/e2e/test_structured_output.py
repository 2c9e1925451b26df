"""The default model under constraints: mixed requests satisfy theirs, and the others get the tokens
that they get alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from jsonschema import validate

from setpoint import Engine
from setpoint.core.errors import RequestError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": PERSON},
        "end": "</call>",
    },
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"json_schema": PERSON},
    {"regex": r"\d{1,3}(\.\d{1,3}){3}"},
    {"ebnf": 'root ::= ("yes" | "no") ", " [a-z]{3,8} "."'},
    {"structural_tag": TAG},
]
PROMPTS = [f"Question {index}: who was born in the year {1700 + index}?" for index in range(64)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(log_level="warning", random_seed=1, max_running_requests=64) as engine:
        yield engine


AMBIGUOUS = 'root ::= s\ns ::= s s | s s s | s s s s | [a-z0-9 .,]+ | [A-Z]* | "" | "q0"'


@pytest.mark.full
@pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is an extra")
def test_ambiguous_grammars_end_alone_under_xgrammar() -> None:
    """Red before: each mask took seconds, in which no other request got a token."""
    usual: list[dict[str, Any]] = [
        {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True},
        {"max_new_tokens": 16, "temperature": 0, "json_schema": {"enum": ["yes", "no"]}},
    ]
    hostile = [{"max_new_tokens": 64, "ebnf": AMBIGUOUS + " " * index} for index in range(4)]
    with Engine(log_level="warning", random_seed=1, grammar_backend="xgrammar") as engine:

        async def answers(many: list[dict[str, Any]]) -> list[Any]:
            return await asyncio.gather(
                *(engine.async_generate(PROMPTS[0], sampling_params=each) for each in many),
                return_exceptions=True,
            )

        alone = asyncio.run(answers(usual))
        *refused, free, constrained = asyncio.run(answers(hostile + usual))
    assert [free["output_ids"], constrained["output_ids"]] == [each["output_ids"] for each in alone]
    for each in refused:
        assert isinstance(each, RequestError)
        assert "it takes" in each.message


def sampling(index: int, *, is_constrained: bool) -> dict[str, Any]:
    own = CONSTRAINTS[index // 2 % 4] if is_constrained else {}
    return {
        "max_new_tokens": 160 if is_constrained else 24,
        "temperature": 0.8 if index % 3 else 0,
        "sampling_seed": index,
        **own,
    }


def check(constraint: dict[str, Any], text: str) -> None:
    match constraint:
        case {"json_schema": schema}:
            validate(json.loads(text), schema)
        case {"regex": pattern}:
            assert re.fullmatch(pattern, text)
        case {"ebnf": _}:
            assert re.fullmatch(r"(yes|no), [a-z]{3,8}\.", text)
        case {"structural_tag": _}:
            call = re.fullmatch(r"<call>(.*)</call>", text, re.DOTALL)
            assert call
            validate(json.loads(call[1]), PERSON)


def test_sixty_four_mixed_requests(engine: Engine) -> None:
    """Every second one is constrained, by all kinds in turn."""
    mixed = engine.generate(
        PROMPTS,
        sampling_params=[sampling(index, is_constrained=bool(index % 2)) for index in range(64)],
    )
    free = range(0, 64, 2)
    alone = engine.generate(
        [PROMPTS[index] for index in free],
        sampling_params=[sampling(index, is_constrained=False) for index in free],
    )
    for index, answer in enumerate(mixed):
        if index % 2 and answer["meta_info"]["finish_reason"]["type"] == "stop":
            check(CONSTRAINTS[index // 2 % 4], answer["text"])
    cut = [
        index
        for index in range(1, 64, 2)
        if mixed[index]["meta_info"]["finish_reason"]["type"] != "stop"
    ]
    assert not cut, "each of these outputs is short"
    assert [mixed[index]["output_ids"] for index in free] == [each["output_ids"] for each in alone]


def test_refusals_reach_the_caller(engine: Engine) -> None:
    for constraint, words in (
        ({"json_schema": {"not": {}}}, "no JSON value satisfies the schema"),
        ({"regex": "("}, "a group is not closed"),
    ):
        with pytest.raises(RequestError, match=re.escape(words)):
            engine.generate("x", sampling_params=constraint)
    assert engine.generate("x", sampling_params={"max_new_tokens": 2})["text"] is not None
