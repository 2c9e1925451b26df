"""SamplingParams check themselves, however they are made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from setpoint import SamplingParams
from setpoint.core.errors import RequestError


def test_loose_forms_become_the_strict_ones() -> None:
    params = SamplingParams(
        stop="\n\n", stop_token_ids=7, logit_bias={"5": 1, 6: -2.5}, temperature=1
    )
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (
        ("\n\n",),
        (7,),
        ((5, 1.0), (6, -2.5)),
    )
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, top_p=None, max_new_tokens=None) == SamplingParams(
        max_new_tokens=None
    )
    assert (
        SamplingParams.parse(
            {"stop": "\n\n", "stop_token_ids": [7], "logit_bias": {"5": 1, "6": -2.5}}
        )
        == params
    )


def test_they_cross_a_socket_unchanged() -> None:
    params = SamplingParams(stop=["a"], logit_bias={5: 1}, sampling_seed=3, max_new_tokens=None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got a string"),
        ({"temperature": -1}, "temperature must be between 0 and"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"stop": [""]}, "must not be empty"),
        ({"stop": [1]}, r"stop\[0\] must be a string, got a whole number"),
        ({"n": True}, "n must be a whole number, got a truth value"),
        ({"logit_bias": [1]}, "logit_bias must be an object"),
        ({"logit_bias": {"x": 1}}, "logit_bias maps token ids"),
    ],
)
def test_wrong_values_are_refused_by_every_way_in(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)
    with pytest.raises(RequestError, match=message):
        SamplingParams.parse(values)
    with pytest.raises(RequestError, match=message):
        msgspec.structs.replace(SamplingParams(), **values)


def test_parse_refuses_what_there_is_not() -> None:
    with pytest.raises(RequestError, match="Unknown sampling parameter 'temprature'"):
        SamplingParams.parse({"temprature": 1})
    with pytest.raises(RequestError, match="beam_width is not supported"):
        SamplingParams.parse({"beam_width": 4})


def test_a_keyword_from_elsewhere_is_answered_with_the_one_meant() -> None:
    with pytest.raises(
        TypeError, match=r"Unknown sampling parameter 'max_tokens'\. Did you mean max_new_tokens\?"
    ):
        SamplingParams(max_tokens=4)
    with pytest.raises(
        RequestError, match=r"Unknown sampling parameter 'seed'\. Did you mean sampling_seed\?"
    ):
        SamplingParams.parse({"seed": 1})
