"""Reads and makes fields that files, batches and responses have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from setpoint.core.conversion import as_whole
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted

T = TypeVar("T")

_HOUR_S, _DAY_S = 3600, 86400
_MOST_DAYS = 30


def expiry_seconds(value: Mapping[str, Any] | None, name: str) -> int | None:
    """The seconds in an ``expires_after``; None if there is none. Raises RequestError (400)."""
    if not value:
        return None
    if value.get("anchor") != "created_at":
        raise RequestError(f"{name}.anchor must be 'created_at'.")
    seconds = as_whole(value.get("seconds"))
    most = _MOST_DAYS * _DAY_S
    if type(seconds) is not int or not _HOUR_S <= seconds <= most:
        raise RequestError(f"{name}.seconds must be a whole number from {_HOUR_S} to {most}.")
    return seconds


def window_seconds(text: str) -> int:
    """The length in seconds of a ``completion_window`` such as "24h" or "7d". Raises RequestError
    (400)."""
    found = re.fullmatch(r"([1-9][0-9]{0,2})([hd])", text)
    seconds = 0 if found is None else int(found[1]) * (_HOUR_S if found[2] == "h" else _DAY_S)
    if not 0 < seconds <= _MOST_DAYS * _DAY_S:
        raise RequestError(
            f"completion_window must be hours or days, such as 24h or 7d, up to {_MOST_DAYS} days;"
            f" got {quoted(text, 32)}."
        )
    return seconds


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise RequestError (400) for metadata that exceeds OpenAI's limits."""
    if metadata is None:
        return
    if len(metadata) > 16:
        raise RequestError(f"metadata may have at most 16 keys, got {len(metadata)}.")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise RequestError(
                "metadata may have keys of at most 64 characters and values of at most 512; the"
                f" entry {quoted(key, 64)} is too long."
            )


def page(
    items: Sequence[T],
    shape: Callable[[T], dict[str, Any]],
    *,
    after: str | None,
    limit: int,
    most: int,
    order: str = "desc",
) -> dict[str, Any]:
    """A page of a list in OpenAI's format. items: the oldest first; each has an ``id``. Raises
    RequestError (400)."""
    if not 1 <= limit <= most:
        raise RequestError(f"limit must be from 1 to {most}, got {limit}.")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {quoted(order, 32)}.")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [_id(item) for item in ordered]
        if after not in ids:
            raise RequestError(f"after: this list has no entry {quoted(after, 64)}.")
        ordered = ordered[ids.index(after) + 1 :]
    shown_items = ordered[:limit]
    return {
        "object": "list",
        "data": [shape(item) for item in shown_items],
        "first_id": _id(shown_items[0]) if shown_items else None,
        "last_id": _id(shown_items[-1]) if shown_items else None,
        "has_more": len(ordered) > limit,
    }


def _id(item: Any) -> str:
    return str(item["id"] if isinstance(item, Mapping) else item.id)
