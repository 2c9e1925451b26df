"""Makes the random part of the ids of items and calls in an answer. An answer that may be made
again from its tokens gets the same ids each time."""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class RepeatableIds:
    """A sequence of ids for each kind, derived from one secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._counts: Counter[str] = Counter()

    def next(self, kind: str) -> str:
        self._counts[kind] += 1
        name = f"{self._secret}:{kind}:{self._counts[kind]}"
        return hashlib.sha256(name.encode()).hexdigest()[:32]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within the block, ``new_hex`` takes its ids from here."""
        token = _SOURCE.set(self)
        try:
            yield
        finally:
            _SOURCE.reset(token)


_SOURCE: ContextVar[RepeatableIds | None] = ContextVar("new_ids", default=None)
"""A context variable, so that the parsers between an answer and its ids do not have to pass it
on."""


def new_hex(kind: str) -> str:
    """32 hexadecimal digits that nobody can guess. kind: what gets the id."""
    source = _SOURCE.get()
    return uuid.uuid4().hex if source is None else source.next(kind)
