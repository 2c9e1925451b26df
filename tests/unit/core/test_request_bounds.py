"""Every number that reaches the engine declares its range, and whatever is in it fits the engine's
columns.

Goes by the declared fields: a new one without a range fails here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import inspect

from setpoint.core.bounds import bounds_of, convert_field
from setpoint.core.errors import RequestError
from setpoint.core.messages import Submit, decode_to_engine, encode
from setpoint.core.plan import Admit
from setpoint.core.request import LogprobOptions, Request, RequestOptions, pack_ids
from setpoint.core.sampling import TOP_K_ALL, SamplingParams
from setpoint.engine.sampling.columns import SLOT_DTYPE, slot_values, token_lists


def numbers(
    info: inspect.Type, path: str
) -> Iterator[tuple[str, inspect.IntType | inspect.FloatType]]:
    """Every number inside a type, with its path."""
    match info:
        case inspect.IntType() | inspect.FloatType():
            yield path, info
        case inspect.StructType():
            for field in info.fields:
                yield from numbers(field.type, f"{path}.{field.name}")
        case inspect.UnionType():
            for option in info.types:
                yield from numbers(option, path)
        case inspect.VarTupleType() | inspect.ListType():
            yield from numbers(info.item_type, f"{path}[]")
        case inspect.TupleType():
            for index, item in enumerate(info.item_types):
                yield from numbers(item, f"{path}[{index}]")
        case (
            inspect.StrType()
            | inspect.BytesType()
            | inspect.BoolType()
            | inspect.NoneType()
            | inspect.LiteralType()
        ):
            pass
        case _:
            raise AssertionError(f"{path}: {info} may hold numbers that nobody has bounded")


NUMBERS = dict(numbers(inspect.type_info(Request), "request"))
OF_SAMPLING = [
    field for field in msgspec.structs.fields(SamplingParams) if bounds_of(field.type) is not None
]
OF_OPTIONS = [
    field
    for kind in (Request, RequestOptions, LogprobOptions)
    for field in msgspec.structs.fields(kind)
    if bounds_of(field.type) is not None
]


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_of_a_request_has_a_range(path: str) -> None:
    number = NUMBERS[path]
    assert number.ge is not None, path
    assert number.le is not None, path
    if isinstance(number, inspect.FloatType):
        assert np.isfinite(np.float32([number.ge, number.le])).all(), path
    else:
        assert -(1 << 63) <= number.ge <= number.le < 1 << 63, path


def _taken(options: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {key: options.pop(key) for key in kind.__struct_fields__ if key in options}


def admitted(sampling: SamplingParams, **options: Any) -> np.void:
    """The columns of a request that has crossed to the engine; a value that does not fit them, or
    loses its meaning there, raises."""
    logprobs = LogprobOptions(**_taken(options, LogprobOptions))
    asked = RequestOptions(logprobs=logprobs, **_taken(options, RequestOptions))
    request = Request(
        rid="r",
        prompt_ids=pack_ids([1]),
        sampling=sampling,
        options=asked,
        **{"seed": 5, **options},
    )
    message = decode_to_engine(encode(Submit(0, request)))
    assert isinstance(message, Submit)
    assert message.request == request
    got = message.request
    admit = Admit(0, 0, got.prompt(), 1, got.sampling, got.seed, (2,), got.options, logprobs.start)
    columns = np.zeros(1, SLOT_DTYPE)
    with np.errstate(over="raise", invalid="raise"):
        columns[0] = slot_values(admit)
        token_lists(admit)
    return columns[0]


def edges(kind: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The outermost values inside the range, and some outside."""
    low, high = bounds_of(kind) or (0, 0)
    ((_, number),) = numbers(inspect.type_info(kind), "")
    if isinstance(number, inspect.IntType):
        return (low, high), (low - 1, high + 1, -(10**400), 10**400, -(10**5000))
    beyond = (
        math.nextafter(low, -math.inf),
        math.nextafter(high, math.inf),
        math.nan,
        math.inf,
        -math.inf,
        1e308,
        10**400,
    )
    return (low, high), beyond


@pytest.mark.parametrize("field", OF_SAMPLING, ids=lambda field: field.name)
def test_a_sampling_parameter_is_bounded_where_it_enters(field: msgspec.structs.FieldInfo) -> None:
    inside, outside = edges(field.type)
    for value in inside:
        columns = admitted(SamplingParams(**{"max_new_tokens": None, field.name: value}))
        assert all(np.isfinite(columns[name]) for name in SLOT_DTYPE.names or ())
        assert 0 < columns["top_k"] <= TOP_K_ALL
        assert columns["top_p"] > 0
        assert columns["repetition"] > 0
    for value in outside:
        for make in (lambda values: SamplingParams(**values), SamplingParams.parse):
            with pytest.raises(RequestError, match=field.name) as caught:
                make({"max_new_tokens": None, field.name: value})
            assert len(caught.value.message) < 200


@pytest.mark.parametrize("field", OF_OPTIONS, ids=lambda field: field.name)
def test_an_option_is_bounded_where_it_enters(field: msgspec.structs.FieldInfo) -> None:
    inside, outside = edges(field.type)
    for value in inside:
        admitted(SamplingParams(), **{field.name: convert_field(value, field.type, field.name)})
    for value in outside:
        with pytest.raises(RequestError, match=f"{field.name} must be"):
            convert_field(value, field.type, field.name)


@pytest.mark.parametrize("value", [1e30, -1e30, 0.0, 1e-300])
def test_a_bias_that_float32_can_hold(value: float) -> None:
    lists = token_lists(
        Admit(0, 0, np.zeros(1, np.int32), 1, SamplingParams(logit_bias={5: value}), 0)
    )
    assert lists is not None
    assert np.isfinite(lists.bias).all()


@pytest.mark.parametrize(
    "value", [1e308, -1e308, 1.1e30, 10**400, math.inf, math.nan, "1", None, True]
)
def test_a_bias_that_float32_cannot_hold(value: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias of token 5"):
        SamplingParams(logit_bias={"5": value})


@pytest.mark.parametrize(
    "key", ["-1", "2147483648", "1" + "0" * 400, "x", "", "1" + "0" * 5000, "5.0", None]
)
def test_a_bias_of_what_is_no_token(key: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias") as caught:
        SamplingParams(logit_bias={key: 1.0})
    assert len(caught.value.message) < 200


def test_a_token_that_is_named_twice_has_one_bias() -> None:
    assert SamplingParams(logit_bias={"5": 1.0, "05": 2.0}).logit_bias == ((5, 2.0),)


@pytest.mark.parametrize("ids", [[10**400], [1 << 63], [1.5], [-5], -1, [7, -5]])
def test_stop_token_ids_are_bounded(ids: list[Any]) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=ids)
