"""The words with which a constraint is refused."""

from __future__ import annotations

import re

from setpoint.core.constraint import Constraint, compile_refusal
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt

_LISTING = re.compile(r"\s*\n\s*(\d+ \||<).*", re.DOTALL)
"""What llguidance writes below an error: lines of the definition, which the client did not write,
and its own state."""

MAX_WORDS = 1000
"""Longest reason that a client gets."""


def not_compiled(constraint: Constraint, why: str) -> RequestError:
    why = _LISTING.sub("", why).strip()
    return RequestError(compile_refusal(constraint.kind) + excerpt(why, MAX_WORDS))
