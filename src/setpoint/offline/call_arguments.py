"""Converts the arguments of a program's call to the fields of a body. Error messages name the
arguments of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.sampling import NOT_YET, SamplingParams, unknown_parameter
from setpoint.frontend.apis.sglang.sglang_bodies import UNSUPPORTED
from setpoint.frontend.bodies import asks_for_something, parse

T = TypeVar("T", bound=msgspec.Struct)

_NO_KEYWORDS = {"text", "stream", "sampling_params", "no_logs", "session_params"}
"""Fields of a body that a call expresses differently, or not at all."""


def prompt_fields(prompt: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """The field of a body that holds the prompt. Raises RequestError, whose message names the
    arguments of the call."""
    has_ids = request.get("input_ids") is not None
    if prompt is None and not has_ids:
        raise RequestError(
            "prompt is missing: give a string or a list of strings, or token ids as input_ids."
        )
    if prompt is not None and has_ids:
        raise RequestError("Give prompt or input_ids, not both.")
    return {"text": _text(prompt)}


def _text(prompt: Any) -> Any:
    """``prompt``, if it is one text, a list of texts, or an empty list. Raises RequestError."""
    if prompt is None or isinstance(prompt, str):
        return prompt
    texts = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) else None
    if texts is not None and all(isinstance(text, str) for text in texts):
        return texts
    if texts is not None and all(isinstance(token, int) for token in texts):
        raise RequestError("prompt must be text; pass token ids as input_ids.")
    if texts is None:
        raise RequestError(
            f"prompt must be a string or a list of strings, not {type(prompt).__name__}."
        )
    index, wrong = next(
        (index, text) for index, text in enumerate(texts) if not isinstance(text, str)
    )
    raise RequestError(
        f"prompt {index + 1} of {len(texts)} must be a string, not {type(wrong).__name__}."
    )


def body_of(kind: type[T], fixed: dict[str, Any], request: Mapping[str, Any]) -> T:
    """The body of a call. Raises TypeError for a keyword that the call does not have, and
    RequestError for values of a wrong type."""
    supported = {*kind.__struct_fields__} - fixed.keys() - _NO_KEYWORDS
    for key, value in request.items():
        if key in UNSUPPORTED and asks_for_something(value):
            raise RequestError(f"{key} is not supported yet.")
        if key not in supported and key not in UNSUPPORTED:
            raise TypeError(f"unexpected keyword argument {key!r}.{_advice(key, supported)}")
    return parse({**fixed, **request}, kind, unsupported=UNSUPPORTED)


def _advice(key: str, supported: Set[str]) -> str:
    """A sentence with the keyword that the caller of an unknown one probably meant; "" if there is
    none."""
    if key == "stream":
        return " Call stream() instead."
    if key in SamplingParams.__struct_fields__:
        return f' Put it into sampling_params: {{"{key}": …}}.'
    close = get_close_matches(
        key, sorted({*supported, "prompt", "messages", "sampling_params"}), n=1
    )
    return f" Did you mean {close[0]}?" if close else ""


def checked_sampling(value: Any) -> Any:
    """Sampling parameters in the form of a body. Raises RequestError for a name that is not a
    sampling parameter."""
    if value is None or isinstance(value, SamplingParams):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if key not in SamplingParams.__struct_fields__ and key not in NOT_YET:
                raise RequestError(unknown_parameter(key))
            if key in NOT_YET and asks_for_something(value[key]):
                raise RequestError(f"{key} is not supported yet.")
        return dict(value)
    raise RequestError(
        f"sampling_params must be SamplingParams or a dict, not {type(value).__name__}."
    )
