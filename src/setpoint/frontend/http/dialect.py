"""What a dialect (the API of OpenAI, of SGLang, …) tells the code that serves all of them: its
routes, and how it says what went wrong.

Everything below a path that a dialect has claimed is answered in its shape, wrong paths and methods
included; the longest claim wins. A dialect is added by a folder in ``frontend/apis`` and its entry
in ``frontend/apis/dialects.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter

from setpoint.frontend.http.routes import each_route
from setpoint.frontend.refusal import Refusal


class Dialect(ABC):
    prefix: ClassVar[str]
    """It answers for every path from here on; "" for all that no other dialect claims."""
    hint: ClassVar[str]
    """What a 404 says where no route is near the path."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Paths of other APIs, and the route here that does the same work: what a 404 proposes."""
    public: ClassVar[Sequence[str]] = ()
    """Beginnings of paths that need no API key."""
    changed_by_get: ClassVar[Sequence[str]] = ()
    """Routes where a GET changes something."""
    router: APIRouter
    """Its routes."""

    @abstractmethod
    def error_body(self, refusal: Refusal) -> Any:
        """What a client that is refused finds in the body."""

    @abstractmethod
    def stream_end(self, refusal: Refusal | None) -> bytes:
        """The last events of a stream; ``refusal``: what cut it short."""


class Dialects:
    """Which dialect answers for a path, and refuses in its shape."""

    def __init__(
        self, dialects: Sequence[Dialect], *, on_refusal: Callable[[Refusal], None]
    ) -> None:
        """One of them has the prefix "". ``on_refusal`` gets every refusal that is an answer of its
        own; one that cuts a stream short is not."""
        self.all = dialects
        self._on_refusal = on_refusal
        self._claims = {dialect.prefix: dialect for dialect in dialects}
        for dialect in dialects:
            for route in each_route(dialect.router.routes):
                self._claims[route.path.partition("{")[0].rstrip("/")] = dialect
        self._depth = max(path.count("/") for path in self._claims)

    def error_body(self, path: str, refusal: Refusal) -> Any:
        """What a client that is refused at ``path`` finds in the body."""
        self._on_refusal(refusal)
        return self.of(path).error_body(refusal)

    def of(self, path: str) -> Dialect:
        """The dialect with the longest claim that ``path`` begins with."""
        parts = path.split("/", self._depth + 1)
        beginnings = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
        claimed = next((each for each in beginnings if each in self._claims), "")
        return self._claims[claimed]
