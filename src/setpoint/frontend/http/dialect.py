"""A dialect is one API (OpenAI's, SGLang's, …) as the code that serves all of them sees it: its
routes and the shape of its errors. Everything below a path that a dialect has claimed is answered
in its shape, including wrong paths and methods; the longest claim wins. A dialect is added by a
folder in ``frontend/apis`` and its entry in ``frontend/apis/dialects.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from starlette.types import Scope

from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.workers import Worker


class Dialect(ABC):
    prefix: ClassVar[str]
    """The dialect answers for every path that begins with this; "" for all paths that no other
    dialect claims."""
    hint: ClassVar[str]
    """The advice that a 404 gives if no route is similar to the path."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Path of another API -> the route here that does the same, which a 404 suggests."""
    public: ClassVar[Sequence[str]] = ()
    """Beginnings of paths that need no API key."""
    pages: Sequence[str] = ()
    """Whole paths that need no API key: a page, which asks the user for the key, and its files."""
    key_header: ClassVar[str] = ""
    """A header in which the dialect's clients send the API key, besides ``Authorization``."""
    admin: ClassVar[Sequence[str]] = ()
    """Routes for the server's operator, most of which change it for all its clients. They need the
    admin's key, if there is one."""
    changed_by_get: ClassVar[Sequence[str]] = ()
    """Routes where a GET changes something."""
    routes: Routes
    workers: Sequence[Worker] = ()
    """What the routes need to run beside them."""

    @abstractmethod
    def error_body(self, refusal: Refusal) -> Any:
        """The body of the answer to a refused request."""

    def error_headers(self, scope: Scope) -> Mapping[str, str]:
        """Headers of the answer to a refused request, besides the usual ones."""
        return {}

    @abstractmethod
    def stream_end(self, refusal: Refusal | None) -> bytes:
        """The last events of a stream. refusal: the error that cut it short, if any."""


class Dialects:
    """Finds the dialect that answers for a path, and makes errors in its shape."""

    def __init__(
        self, dialects: Sequence[Dialect], *, on_refusal: Callable[[Refusal], None]
    ) -> None:
        """One of ``dialects`` has the prefix "". ``on_refusal`` gets every refusal that is a whole
        answer, but not those that cut a stream short."""
        self.all = dialects
        self.controls = frozenset(path for dialect in dialects for path in dialect.admin)
        """Routes for the server's operator; none of them takes a prompt."""
        self._on_refusal = on_refusal
        self._claims = {dialect.prefix: dialect for dialect in dialects}
        for dialect in dialects:
            for route in dialect.routes.all:
                self._claims[route.path.partition("{")[0].rstrip("/")] = dialect
        self._depth = max(path.count("/") for path in self._claims)

    def error_body(self, path: str, refusal: Refusal) -> Any:
        """The body of the answer to a request refused at ``path``."""
        self._on_refusal(refusal)
        return self.of(path).error_body(refusal)

    def of(self, path: str) -> Dialect:
        """The dialect with the longest claim that ``path`` begins with."""
        parts = path.split("/", self._depth + 1)
        beginnings = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
        claimed = next((each for each in beginnings if each in self._claims), "")
        return self._claims[claimed]
