"""Reads clients' bodies as the structs of their routes, and tells the clients about keys that are
unknown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from setpoint.frontend.bodies import parse
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.unknown_keys import unknown_keys

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True, frozen=True)
class BodyParser:
    book: RequestBook
    _refuses_unknown_keys: bool
    _names_model: bool
    """Whether a body chooses one of several models, which ``http.model_choice`` has read."""

    def read(
        self, body: dict[str, Any], kind: type[T], *, route: str, unsupported: Iterable[str] = ()
    ) -> tuple[T, list[str]]:
        """A client's body as ``kind``, and warnings for the client about it. Raises RequestError
        for a body that cannot be honoured."""
        parsed = parse(body, kind, unsupported=unsupported)
        known = (*unsupported, "model") if self._names_model else unsupported
        refuse = self._refuses_unknown_keys
        warnings = unknown_keys(body, parsed, route=route, unsupported=known, refuse=refuse)
        self.book.warned_bodies += bool(warnings)
        return parsed, warnings
