"""Extreme but well-formed values for the bodies that ``/openapi.json`` declares: of every field's
type, now and then of another, and hostile ones for the fields that are programs (schemas, regular
expressions, tools, messages). Hypothesis strategies; they know no server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from setpoint_testing.byte_tokenizer import VOCAB_SIZE

MOST_BYTES = 8 << 20
"""Twice as much as a server takes."""
HI = [{"role": "user", "content": "hi"}]
POWERS = [7, 8, 15, 16, 24, 30, 31, 32, 33, 53, 62, 63, 64, 65, 128, 1024, 4096]
INTS = sorted(
    {sign * (1 << power) + near for power in POWERS for sign in (1, -1) for near in (-1, 0, 1)}
    | set(range(-2, 70))
    | {10**400}
)
# fmt: off
FLOATS = [
    0.0, -0.0, 0.5, 1.0, 2.0, 1 + 2**-52, 5e-324, 1e-300, 1e-45, 2.0**-126, 1e-38, 1e-20, 1e-7,
    1e-6, 1e30, 3.4028235e38, 3.5e38, 1e308, -1e308, -1e-300, 1.7976931348623157e308,
]
WRITTEN_OUT = [
    f"\ue000{number}\ue000"
    for number in ("1e400", "-1e400", "1e-400", "1" + "0" * 5000, "-0", "1E+2", "0.1e1")
]
"""Numbers that Python does not write this way; ``encoded`` takes them out of their quotes."""
TEXTS = [
    "", "a", " ", "\x00", "\n", "x" * 300, "x" * 70_000, "\U0001f600" * 40, "\u202e", "{{ 7 }}",
    "1e400", "-1", "<|eos|>", "ä" * 63, "\\",
]
# fmt: on


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
SCHEMAS: list[Any] = [
    {},
    True,
    False,
    {"type": "object"},
    {"type": "integer"},
    {"enum": []},
    {"not": {}},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "nothing"},
    {"type": "string", "pattern": "("},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
    {"$ref": "https://example.org/schema.json"},
    {"$ref": "#/nowhere"},
    {"$ref": "#"},
    LOOP,
    nested(200),
    {"anyOf": [{"const": str(number)} for number in range(3000)]},
]
EXPRESSIONS = ["a", "", "(", "[", "a{1000000}", "(a|b){500}{500}", "(a*)*b", ".*" * 500, r"\1", "$a", "x" * 70_000, r"\p{L}+", "(?!a)"]  # fmt: skip
GRAMMARS = ["", 'root ::= "a"', "root ::= root", 'root ::= "a" root', "root ::=", "start: a", 'start: "a"', 'root ::= "' + "x" * 60_000 + '"', "%ignore /"]  # fmt: skip
MESSAGES: list[Any] = [
    HI,
    HI * 40,
    [],
    [{}],
    [{"role": "system", "content": "s"}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,?"}}]}],
    [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "?"}}]}],
    [{"role": "nobody", "content": "a"}],
    [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    [*HI, {"role": "tool", "tool_call_id": "c", "content": "a"}],
    [*HI, {"role": "assistant", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": 1}],
    [*HI, {"role": "assistant", "tool_calls": "c"}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "a"}]}],
    [*HI, {"role": "assistant", "content": [{"type": "thinking"}, {"type": "tool_use", "id": 1}]}],
]
TOOLS: list[Any] = [
    [TOOL],
    [TOOL, TOOL],
    [{}],
    [{"type": "function"}],
    [{"type": "web_search"}],
    [{"name": "f", "input_schema": {"type": "object"}}],
    [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    *([{"type": "function", "function": {"name": "f", "parameters": each}}] for each in SCHEMAS),
    [{"type": "function", "function": {"name": "f" * 70_000}}],
    [{"type": "function", "function": {"name": f"f{number}"}} for number in range(300)],
]
CHOICES = ["auto", "none", "required", "any", {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}, {"type": "tool", "name": "g"}, {"type": "any"}, {"type": "allowed_tools"}, {}]  # fmt: skip
FORMATS: list[Any] = [
    "json",
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {}},
    *({"type": "json_schema", "json_schema": {"name": "a", "schema": each}} for each in SCHEMAS),
    *({"format": {"type": "json_schema", "name": "a", "schema": each}} for each in SCHEMAS),
    {"type": "structural_tag", "structures": [], "triggers": []},
    {"type": "structural_tag", "format": {"type": "regex", "pattern": "("}},
    *SCHEMAS,
]
HOSTILE: Mapping[str, list[Any]] = {
    "messages": MESSAGES,
    "input": [*MESSAGES, "a", [{"type": "function_call_output", "call_id": "x", "output": "a"}]],
    "tools": TOOLS,
    "tool_choice": CHOICES,
    "response_format": FORMATS,
    "format": FORMATS,
    "text": ["a", *FORMATS],
    "json_schema": [json.dumps(each) for each in SCHEMAS],
    "structural_tag": [json.dumps(each) for each in FORMATS],
    "regex": EXPRESSIONS,
    "stop_regex": [*EXPRESSIONS, EXPRESSIONS[:4]],
    "ebnf": GRAMMARS,
    "previous_response_id": ["resp_0", "", "../../etc/passwd", "x" * 70_000],
    "input_file_id": ["file-0", "", "../../etc/passwd"],
}
"""Field -> values that have its meaning, or nearly."""

integers = st.sampled_from(INTS) | st.integers(-3, 4)
floats = st.sampled_from(FLOATS) | st.floats(allow_nan=False, allow_infinity=False)
written = st.sampled_from(WRITTEN_OUT)
texts = st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8"), max_size=12)
scalars = st.none() | st.booleans() | integers | floats | texts | written
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
) | st.sampled_from([[1] * 5000, [[1]] * 300, [[]] * 300, list(range(256)), HI, HI * 40])


class Document:
    """The strategies of the schemas of one ``/openapi.json``."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self.bodies: dict[str, dict[str, Any]] = {}
        """POST route -> the schema of its body."""
        self.posts: set[str] = set()
        for path, operations in document["paths"].items():
            if "post" in operations:
                self.posts.add(path)
                content = operations["post"].get("requestBody", {}).get("content", {})
                if "application/json" in content:
                    self.bodies[path] = self._resolved(content["application/json"]["schema"])

    def fields(self, schema: dict[str, Any], *, at_most: int = 3) -> st.SearchStrategy[Any]:
        """Some of an object's fields."""
        declared = schema["properties"]

        def value(name: str) -> st.SearchStrategy[Any]:
            usual = st.sampled_from(HOSTILE[name]) if name in HOSTILE else st.nothing()
            usual |= self.values(declared[name], name)
            return st.integers(0, 9).flatmap(lambda number: usual if number else anything)

        pair = st.sampled_from(sorted(declared)).flatmap(
            lambda name: st.tuples(st.just(name), value(name))
        )
        return st.lists(pair, min_size=1, max_size=at_most, unique_by=lambda item: item[0]).map(
            dict
        )

    def values(self, schema: dict[str, Any], name: str = "") -> st.SearchStrategy[Any]:
        """Extreme values of a type."""
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return st.one_of([self.values(option, name) for option in schema["anyOf"]])
        if "enum" in schema or "const" in schema:
            return st.sampled_from([*schema.get("enum", [schema.get("const")]), "other"])
        match schema.get("type"):
            case "integer":
                edges = [schema[key] for key in ("minimum", "maximum") if key in schema]
                near = [edge + step for edge in edges for step in (-1, 0, 1)]
                return integers | st.sampled_from(near) if near else integers
            case "number":
                return floats | integers | written
            case "string":
                return texts
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
            case "array":
                each = self.values(schema.get("items") or {})
                counts = st.sampled_from([33, 70, 1001, 5000])
                return st.lists(each, max_size=4) | st.builds(repeated, each, counts)
            case "object" if "properties" in schema:
                some = self.fields(schema)
                if name == "sampling_params":
                    return some.map(lambda drawn: {"max_new_tokens": 2} | drawn)
                return some
            case "object":
                keys = st.integers(0, VOCAB_SIZE).map(str) | st.sampled_from(INTS).map(str) | texts
                inner = schema.get("additionalProperties")
                item = self.values(inner) if isinstance(inner, dict) else anything
                return st.dictionaries(keys, item, max_size=4) | st.just(
                    {str(token): 1 for token in range(VOCAB_SIZE)}
                )
            case _:
                return anything

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


def repeated(item: Any, count: int) -> list[Any]:
    """``count`` times the item, or as many as make a body that is too large by far."""
    return [item] * min(count, 2 + MOST_BYTES // len(encoded(item)))


def encoded(body: Any) -> bytes:
    """JSON, with the numbers of WRITTEN_OUT as numbers."""
    return re.sub(
        '"\ue000([^\ue000"]*)\ue000"', r"\1", json.dumps(body, ensure_ascii=False)
    ).encode()
