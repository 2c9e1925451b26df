"""Bodies are counted before they are decoded: what would take long is refused, prompts of any kind
are not."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from setpoint.frontend.json_shape import MAX_DEPTH, MAX_EXPONENTS, MAX_PARTS, excess

MANY = MAX_PARTS + 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"input_ids": [' + b"[]," * MANY + b"[]]}",
        b'{"messages": [' + b"{}," * MANY + b"{}]}",
        b'{"prompt": [' + b'"",' * MANY + b'""]}',
        b'{"prompt": [' + rb'"\\",' * MANY + b'""]}',
        b'{"prompt": [' + rb'"\"\\\"",' * MANY + b'""]}',
        b'{"logit_bias": {' + b",".join(b'"%d":1' % key for key in range(MANY)) + b"}}",
        b'{"a": [' + b'{"b": []},' * (MANY // 3) + b"1]}",
    ],
    ids=["lists", "objects", "strings", "backslashes", "escaped quotes", "keys", "a mixture"],
)
def test_too_many_parts(body: bytes) -> None:
    assert excess(body) == f"has more than {MAX_PARTS} strings, lists and objects"


def test_too_many_exponents() -> None:
    """Each takes the decoder up to 20 us."""
    number = b"1.7976931348623157e308,"
    assert (
        excess(b'{"a": [' + number * (MAX_EXPONENTS + 1) + b"1]}")
        == f"has more than {MAX_EXPONENTS} numbers with an exponent"
    )
    assert excess(b'{"a": [' + number.upper() * (MAX_EXPONENTS + 1) + b"1]}") is not None
    assert excess(b'{"a": [' + number * MAX_EXPONENTS + b"true, false, " * 5000 + b"1]}") is None


def test_too_deep() -> None:
    nested = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert excess(nested) is None
    assert (
        excess(b"[" + nested + b"]")
        == f"has more than {MAX_DEPTH} lists and objects inside each other"
    )
    assert excess(b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1)) is not None
    assert excess(b"[" * 1_000_000) is not None
    assert excess(b"[" + b"[[],[]]," * 1000 + b"1]") is None, "broad is not deep"


@pytest.mark.parametrize(
    "text",
    [
        "{'a': [1, 2], \"b\": 'C:\\\\'} else {}\n" * 100_000,
        "\\" * 1_000_001,
        '"' * 1_000_000,
        '\\"' * 500_000,
        "[[[" * 1_000_000,
        "eE.e" * 500_000,
    ],
    ids=["code", "backslashes", "quotes", "both", "brackets", "letters"],
)
def test_what_a_prompt_holds_does_not_count(text: str) -> None:
    for body in ({"text": text}, {"messages": [{"role": "user", "content": text}]}, {text: 1}):
        assert excess(json.dumps(body).encode()) is None
        assert excess(msgspec.json.encode(body)) is None


def test_lists_of_prompts() -> None:
    assert excess(msgspec.json.encode({"input_ids": [[1, 2, 3]] * 4096})) is None
    assert (
        excess(msgspec.json.encode({"prompt": ["x" * 100] * 4096, "return_logprob": [True] * 4096}))
        is None
    )
    assert (
        excess(
            msgspec.json.encode(
                {
                    "messages": (
                        [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 10_000
                    )
                }
            )
        )
        is None
    )


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{}e.,:', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(alphabet='a"\\[{e', max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def parts(value: Any) -> int:
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + sum(map(parts, value))
    return 1 + sum(1 + parts(item) for item in value.values()) if isinstance(value, dict) else 0


def depth(value: Any) -> int:
    inner = (
        value
        if isinstance(value, list)
        else list(value.values())
        if isinstance(value, dict)
        else None
    )
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(values, st.integers(1, 12), st.booleans())
def test_counts_are_those_of_the_value(value: Any, limit: int, ascii_only: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setpoint.frontend.json_shape.MAX_PARTS", limit)
        patch.setattr("setpoint.frontend.json_shape.MAX_DEPTH", 3)
        found = excess(json.dumps(value, ensure_ascii=ascii_only).encode())
        assert (found is None) == (parts(value) <= limit and depth(value) <= 3)
