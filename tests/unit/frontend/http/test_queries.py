"""Parameters of a query are read as pydantic reads them, with its words for wrong ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from setpoint.core.errors import RequestError
from setpoint.frontend.http.queries import read_query

TEXTS = (
    *(
        "",
        "0",
        "-0",
        "+1",
        "007",
        " 1\n",
        "1.0",
        "1.50",
        "1.",
        ".5",
        "-.5",
        "1e3",
        "1e400",
        "1e",
        "x",
    ),
    *(
        "1_000",
        "_1",
        "1_",
        "1__0",
        "-_1",
        "1_.0",
        "1.0_0",
        " 1_0",
        "\u0661",
        "\uff11",
        "\xa01",
        "1 0",
    ),
    *(
        "nan",
        "-inf",
        "Infinity",
        "0x10",
        "true",
        "TRUE",
        "on",
        "Off",
        "y",
        "N",
        " true",
        "2",
        "null",
    ),
    *("1" * 4300, "1" * 4301, "-" + "1" * 4301, "1." + "0" * 5000),
)
PIECES = (*"0179_+-.eE \t", "\xa0", "\u0661", "00", "inf", "nan", "true", "off", "f")


@dataclass
class Query:
    whole: int | None = None
    number: float = 2.5
    flag: bool = False
    text: str = "all"


def request(query: str) -> Request:
    return Request({"type": "http", "query_string": query.encode(), "headers": []})


def found(name: str, text: str) -> Any:
    try:
        return getattr(read_query(request(f"{name}={quote(text)}"), Query), name)
    except RequestError as error:
        return error.message.removeprefix(f"query.{name}: ")


def as_pydantic(kind: type, text: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        return error.errors()[0]["msg"]


def check(text: str) -> None:
    for name, kind in (("whole", int), ("number", float), ("flag", bool), ("text", str)):
        # repr: so that nan and -0.0 are what they are.
        assert repr(found(name, text)) == repr(as_pydantic(kind, text)), (name, text)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:9]))
def test_every_spelling(text: str) -> None:
    check(text)


@given(st.lists(st.sampled_from(PIECES), max_size=5).map("".join))
def test_any_spelling(text: str) -> None:
    # Pydantic drops leading zeros before it looks at what follows, and so reads "0-7" as -7.
    assume(not re.search(r"0_*-|0__", text))
    check(text)


def test_a_query_has_defaults_and_may_repeat_and_add_names() -> None:
    assert read_query(request(""), Query) == Query()
    assert read_query(request("whole=x&other=y&whole=3"), Query) == Query(whole=3)


def test_every_wrong_parameter_is_named() -> None:
    with pytest.raises(RequestError) as refusal:
        read_query(request("flag=2&whole=x"), Query)
    assert refusal.value.status_code == 400
    assert refusal.value.message == (
        "query.whole: Input should be a valid integer, unable to parse string as an integer;"
        " query.flag: Input should be a valid boolean, unable to interpret input"
    )
