"""Request bodies: JSON to checked msgspec structs, with 400 (not 422) for anything else.

Keys that a route knows but cannot honour are refused by name, unless they ask for nothing;
``unknown_keys`` handles those that it does not know. Nothing here knows of HTTP frameworks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from setpoint.core.conversion import convert
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.wording import kind_of, validation_message
from setpoint.frontend.intake import MAX_SEQUENCES
from setpoint.frontend.json_shape import excess
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.unknown_keys import unknown_keys

logger = logging.getLogger(__name__)

_MAX_LOGGED_NAMES = 64
_logged_names: set[str] = set()

T = TypeVar("T", bound=msgspec.Struct)


class InvalidBodyError(RequestError):
    """A body that is not JSON, or not of the route's type."""


def decode_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises InvalidBodyError for anything else, and for an object that would
    take long to decode."""
    if not data.strip():
        raise InvalidBodyError("The body is empty; send a JSON object, such as {}.")
    too_much = excess(data)
    if too_much is not None:
        raise InvalidBodyError(f"The body {too_much}.")
    try:
        value = msgspec.json.decode(data)
    except msgspec.ValidationError:  # without a type, only numbers can be at fault
        raise InvalidBodyError(
            "The body has a number that is out of range: the largest is about 1.8e308."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidBodyError(f"The body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidBodyError(f"The body must be a JSON object, got {kind_of(value)}.")
    return value


def parse(body: dict[str, Any], kind: type[T], *, unsupported: Iterable[str] = ()) -> T:
    """The body as ``kind``. Raises InvalidBodyError for a missing key or a wrong type, then
    RequestError (400) for an unsupported key with a meaning."""
    try:
        parsed = convert(body, kind)
    except msgspec.ValidationError as error:
        raise InvalidBodyError(validation_message(error, kind=kind)) from None
    for key in unsupported:
        if asks_for_something(body.get(key)):
            raise RequestError(f"{key} is not supported by this server yet; leave it out.")
    return parsed


@dataclass(slots=True, frozen=True)
class BodyParser:
    """Reads the bodies of one model's routes."""

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


def other_model_warning(asked: str, served: str) -> str:
    """The warning for a client that asked for a model that is not served here. Each name is logged
    once, because many clients show no warnings."""
    if asked not in _logged_names and len(_logged_names) < _MAX_LOGGED_NAMES:
        _logged_names.add(asked)
        logger.warning(
            "A client asked for the model '%s', which is not served here: %s answers (logged once"
            " per name).",
            excerpt(asked, 64),
            served,
        )
    return f"The model '{excerpt(asked, 64)}' is not served here; {served} answered."


def asks_for_something(value: Any) -> bool:
    """Whether the value of an unsupported key asks for something: False for null, false, "" and
    empty containers, and for lists of only such values (one per prompt of a batch)."""
    nothing: tuple[Any, ...] = (None, False, "", {}, [])
    return (
        any(item not in nothing for item in value)
        if isinstance(value, list)
        else value not in nothing
    )


def as_id_lists(
    value: list[Any], name: str, *, max_lists: int | None = MAX_SEQUENCES
) -> tuple[list[list[int]], bool]:
    """Token ids as a client may send them: one list, or a list of lists (then the second result is
    True). Raises on anything else."""
    if not value:
        raise RequestError(f"{name} must not be empty.")
    is_batch = isinstance(value[0], list)
    if is_batch and max_lists is not None and len(value) > max_lists:
        raise RequestError(f"One request may ask for at most {max_lists} sequences.")
    try:
        return (
            (convert(value, list[list[int]]), True)
            if is_batch
            else ([convert(value, list[int])], False)
        )
    except msgspec.ValidationError as error:
        raise InvalidBodyError(validation_message(error, name=name)) from None


@contextmanager
def naming_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Make a RequestError from the block name fields as the client names them."""
    try:
        yield
    except RequestError as error:
        error.message = re.sub(
            r"\b(" + "|".join(names) + r")\b", lambda found: names[found[0]], error.message
        )
        error.args = (error.message,)
        raise
