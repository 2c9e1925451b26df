"""Reads the parameters of a URL's query as the fields of a dataclass. Numbers and flags may be
written in all the ways that pydantic takes, and a wrong one is refused in its words: clients know
both."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from starlette.requests import Request

from setpoint.core.errors import RequestError

T = TypeVar("T")

_DIGITS = r"[0-9]+(_[0-9]+)*"
_INTEGER = re.compile(rf"[+-]?{_DIGITS}(\.0+)?")
_UNDERSCORED = re.compile(r"[^\s_]+(_[^\s_]+)+")
_FLAGS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


def read_query(request: Request, kind: type[T]) -> T:
    """The query's parameters; the last one counts of several with the same name, and unknown ones
    are ignored. Raises RequestError (400) that names each wrong one."""
    values, faults = {}, []
    for name, read in _readers(kind).items():
        text = request.query_params.get(name)
        if text is not None:
            try:
                values[name] = read(text)
            except ValueError as error:
                faults.append(f"query.{name}: {error}")
    if faults:
        raise RequestError("; ".join(faults))
    return kind(**values)


def _readers(kind: type) -> dict[str, Callable[[str], Any]]:
    """Name of a parameter -> what reads its value."""
    readers = {}
    for name, hint in get_type_hints(kind).items():
        (given,) = set(get_args(hint) or (hint,)) - {NoneType}
        readers[name] = _READERS[given]
    return readers


def _integer(text: str) -> int:
    text = text.strip()
    if not _INTEGER.fullmatch(text):
        raise ValueError("Input should be a valid integer, unable to parse string as an integer")
    try:
        return int(text.partition(".")[0])
    except ValueError:  # Python converts at most 4300 digits
        message = "Unable to parse input string as an integer, exceeded maximum size"
        raise ValueError(message) from None


def _number(text: str) -> float:
    plain = text.replace("_", "") if _UNDERSCORED.fullmatch(text) else text.strip()
    try:
        if not plain.isascii() or "_" in plain:  # Python also takes the digits of other scripts
            raise ValueError
        return float(plain)
    except ValueError:
        message = "Input should be a valid number, unable to parse string as a number"
        raise ValueError(message) from None


def _flag(text: str) -> bool:
    if (flag := _FLAGS.get(text.lower())) is None:
        raise ValueError("Input should be a valid boolean, unable to interpret input")
    return flag


_READERS: dict[type, Callable[[str], Any]] = {
    int: _integer,
    float: _number,
    bool: _flag,
    str: str,
}
