"""Type errors reach clients in plain words, for every type, at every depth, and never in the
validator's own."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from setpoint.core.errors import RequestError
from setpoint.core.sampling import SamplingParams
from setpoint.core.wording import kind_of, validation_message


class Inner(msgspec.Struct):
    depth: int | None = None
    name: str = ""


class Outer(msgspec.Struct):
    whole: int | None = None
    number: float | None = None
    text: str | None = None
    yes: bool = False
    texts: str | list[str] | None = None
    numbers: dict[str, float] | None = None
    keyed: dict[int, float] | None = None
    lists: list[list[int]] | None = None
    pairs: tuple[tuple[int, float], ...] = ()
    choice: Literal["x", "y"] | None = None
    inner: Inner | None = None
    objects: list[dict[str, Any]] | None = None


class Needs(msgspec.Struct):
    messages: list[str]
    inner: Inner | None = None


class Side(StrEnum):
    X = "x"
    Y = "y"
    W = "w"


class Deep(msgspec.Struct):
    sides: list[dict[str, Side]] | None = None
    only: Literal["x"] = "x"


class Nested(msgspec.Struct):
    needs: Needs


def said(value: Any, kind: Any, name: str = "") -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, kind)
    return validation_message(caught.value, name=name, kind=kind)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ({"number": "hot"}, Outer, "number must be a number, got a string."),
        (
            {"number": None, "whole": 1.5},
            Outer,
            "whole must be a whole number, got a number that is not whole.",
        ),
        ({"whole": True}, Outer, "whole must be a whole number, got a truth value."),
        ({"whole": []}, Outer, "whole must be a whole number, got a list."),
        ({"whole": {}}, Outer, "whole must be a whole number, got an object."),
        ({"text": 1}, Outer, "text must be a string, got a whole number."),
        ({"text": 1.5}, Outer, "text must be a string, got a number."),
        ({"yes": None}, Outer, "yes must be true or false, got null."),
        ({"yes": "yes"}, Outer, "yes must be true or false, got a string."),
        ({"texts": 1}, Outer, "texts must be a string or a list, got a whole number."),
        ({"texts": ["a", 2]}, Outer, "texts[1] must be a string, got a whole number."),
        ({"numbers": []}, Outer, "numbers must be an object, got a list."),
        ({"numbers": {"a": "x"}}, Outer, "every value of numbers must be a number, got a string."),
        ({"keyed": {"a": 1}}, Outer, "every key of keyed must be a whole number, got a string."),
        ({"lists": [1]}, Outer, "lists[0] must be a list, got a whole number."),
        ({"lists": [[1], ["x"]]}, Outer, "lists[1][0] must be a whole number, got a string."),
        ({"pairs": [[1]]}, Outer, "pairs[0] must be a list of length 2, got 1."),
        ({"choice": "z"}, Outer, "choice must be 'x' or 'y', not 'z'."),
        ({"choice": 1}, Outer, "choice must be a string, got a whole number."),
        ({"inner": 3}, Outer, "inner must be an object, got a whole number."),
        ({"inner": {"depth": "x"}}, Outer, "inner.depth must be a whole number, got a string."),
        ({"objects": [{}, 1]}, Outer, "objects[1] must be an object, got a whole number."),
        (
            {"sides": [{"a": "z"}]},
            Deep,
            "every value of sides[0] must be 'x', 'y' or 'w', not 'z'.",
        ),
        ({"only": "z"}, Deep, "only must be 'x', not 'z'."),
        ({"number": 10**400}, Outer, "number: number out of range."),
        ({}, Needs, "messages is missing."),
        ({"needs": {}}, Nested, "needs.messages is missing."),
        ([], Needs, "The body must be an object, got a list."),
        ({1: 2}, Needs, "every key of the body must be a string."),
    ],
)
def test_what_is_said(value: Any, kind: Any, words: str) -> None:
    assert said(value, kind) == words


def test_a_value_with_a_name_of_its_own() -> None:
    assert said("x", list[int], "input_ids") == "input_ids must be a list, got a string."
    assert (
        said(["x"], list[int], "input_ids") == "input_ids[0] must be a whole number, got a string."
    )
    assert (
        said([{"name": 1}], list[Inner], "items")
        == "items[0].name must be a string, got a whole number."
    )


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
)


def refusal(make: Callable[[], object]) -> str:
    """What is said of a value that is refused; nothing of one that is not."""
    try:
        make()
    except msgspec.ValidationError as error:
        return validation_message(error)
    except RequestError as error:
        return error.message
    return ""


@settings(max_examples=300, derandomize=True)
@given(
    st.sampled_from(Outer.__struct_fields__),
    st.sampled_from(SamplingParams.__struct_fields__),
    anything,
)
def test_no_message_has_the_validators_words(field: str, parameter: str, value: Any) -> None:
    for words in (
        refusal(lambda: msgspec.convert({field: value}, Outer)),
        refusal(lambda: SamplingParams.parse({parameter: value})),
    ):
        assert not any(
            jargon in words
            for jargon in ("Expected", "`", "$", " | ", "null,", "array", "int ", "Invalid")
        )


def test_kinds() -> None:
    assert [kind_of(value) for value in (None, True, 1, 1.5, "", [], (), {})] == [
        "null",
        "a truth value",
        "a whole number",
        "a number",
        "a string",
        "a list",
        "a list",
        "an object",
    ]
