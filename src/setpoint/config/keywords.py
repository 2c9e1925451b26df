"""Rewrites error messages for callers of an Engine, where an option is a keyword and not a flag."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from setpoint.config.options import OPTION_FIELDS
from setpoint.config.sglang import field_name
from setpoint.core.errors import RequestError, SetpointError

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_SWITCHES = {field.flag for field in OPTION_FIELDS if field.kind is bool}


def as_keywords(text: str) -> str:
    """``text`` with a keyword in place of every flag: ``max_total_tokens`` for
    ``--max-total-tokens``, ``is_embedding=True`` for a switch."""
    return _FLAG.sub(
        lambda flag: field_name(flag[0]) + ("=True" if flag[0] in _SWITCHES else ""), text
    )


@contextmanager
def naming_keywords() -> Iterator[None]:
    """A context in which a SetpointError names keywords instead of flags."""
    try:
        yield
    except SetpointError as error:
        error.args = (as_keywords(str(error)),)
        if isinstance(error, RequestError):
            error.message = error.args[0]
        raise
