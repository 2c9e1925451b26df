"""The words with which a constraint is refused."""

from __future__ import annotations

import re

from setpoint.core.constraint import Constraint, compile_refusal
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt

_LISTING = re.compile(r"\s*\n\s*(\d+ \||<).*", re.DOTALL)
"""What llguidance writes below an error: lines of the definition, which the client did not write,
and its own state."""

_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""The place of an expression in llguidance's own grammar, which the client did not write."""

_PARSE_ERROR = re.compile(r" \(in regex\): (?:regex parse error:.*\berror: )?", re.DOTALL)
"""The picture of an expression, between the expression and the reason. It has several lines, which
neither a line of the log nor a JSON string can show."""

MAX_WORDS = 1000
"""Longest reason that a client gets."""


def not_compiled(constraint: Constraint, why: str) -> RequestError:
    why = _LISTING.sub("", why).strip()
    if constraint.kind != "ebnf":
        why = _PLACE.sub("", why)
    why = _PARSE_ERROR.sub(": ", why)
    return RequestError(compile_refusal(constraint.kind) + excerpt(why, MAX_WORDS))
