"""Bounds of the numbers in a request. A field's type declares its bounds; they are checked wherever
a value enters or is decoded.

The engine keeps these numbers in columns of 32 and 64 bits. Floats are bounded so that float32
holds them and every number computed from them. A number that would become infinite or zero on the
way is refused here, by name, instead of being found later as a NaN.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta, inspect

from setpoint.core.conversion import convert
from setpoint.core.errors import RequestError
from setpoint.core.wording import validation_message

INT32_MAX = (1 << 31) - 1
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
FLOAT32_MIN = 2.0**-126
"""The smallest positive float32 that arithmetic may not flush to zero."""

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
"""A token id. Whether the vocabulary contains it is checked where the vocabulary is known."""
AnyTokenId = Annotated[int, Meta(ge=0, le=INT64_MAX)]
"""An id that may be outside every vocabulary."""
Int64 = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]


def convert_field(value: Any, kind: Any, name: str) -> Any:
    """``value`` converted to ``kind``, the type of a field. Raises RequestError (400) with a
    message about the field ``name``."""
    try:
        return convert(value, kind)
    except msgspec.ValidationError as error:
        bounds = bounds_of(kind)
        if (
            bounds is not None
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            and not bounds[0] <= value <= bounds[1]
        ):
            raise RequestError(
                f"{name} must be {_range(*bounds)}, got {number_text(value)}."
            ) from None
        raise RequestError(validation_message(error, name=name, kind=kind)) from None


def bounds_of(kind: Any) -> tuple[float, float] | None:
    """The range that ``kind`` declares if it is a bounded number, optional or not; None for other
    types."""
    info = inspect.type_info(kind)
    for option in info.types if isinstance(info, inspect.UnionType) else (info,):
        if (
            isinstance(option, inspect.IntType | inspect.FloatType)
            and option.ge is not None
            and option.le is not None
        ):
            return option.ge, option.le
    return None


def _range(low: float, high: float) -> str:
    least, most = (
        f"{bound:.2g}" if isinstance(bound, float) else str(bound) for bound in (low, high)
    )
    # The range of a number that must not be 0 begins with "above 0", because hardly anybody needs
    # the exact lower bound.
    return (
        f"above 0 (at least {least}) and at most {most}"
        if 0 < low < 1
        else f"between {least} and {most}"
    )


def number_text(value: float) -> str:
    """The number as an error message writes it; a number of hundreds of digits only by its size."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of about {int(value.bit_length() * math.log10(2))} digits"
    return str(value)
