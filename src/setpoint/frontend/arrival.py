"""When and with which headers the client's request arrived that the present task answers, and what
becomes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Arrival:
    at: float = field(default_factory=time.perf_counter)
    """``time.perf_counter`` when the head of the request was read."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers by lower-case names; written when the body is read, like ``path``."""
    path: str = ""
    """The path of the URL; "" for a request that came without HTTP."""
    outputs: list[Any] = field(default_factory=list)
    """The SequenceOutputs of the sequences that it has become; written by the Job, which knows of
    arrivals and not the other way round."""
    is_in_background: bool = False
    """Whether they go on without the client."""
    refusal: str = ""
    """Why it was refused or its answer cut short; written where errors get their shape
    (``note_refusal``)."""


ARRIVED_AT = "setpoint.arrived_at"
"""Key of ``Arrival.at`` in the ASGI scope of a request that came over a connection."""
IN_SCOPE = "setpoint.arrival"
"""Key of the Arrival in the ASGI scope, for those who have no other way to it."""

ARRIVAL: ContextVar[Arrival | None] = ContextVar("arrival", default=None)
"""Set while a body is read and made into a Job. A context variable, so that the dialects between
HTTP and the Job need not pass it on."""


def note_refusal(scope: MutableMapping[str, Any], why: str) -> None:
    """Note for the access log why the request of an ASGI scope is refused."""
    if IN_SCOPE in scope:
        scope[IN_SCOPE].refusal = why


def arrival() -> Arrival:
    """The arrival of the present request; of one that came without HTTP, now."""
    return ARRIVAL.get() or Arrival()
