"""Gets pages of a server. Every error is one sentence for the user."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx2
import msgspec

from setpoint.core.errors import SourceError, reason_of

TIMEOUT_S = 10.0
MAX_BYTES = 16 << 20
"""Most bytes of a page. Pages of metrics have some hundred KiB, and the time to read one grows with
its length."""


class NotThereError(SourceError):
    """The server answers, but has no such page."""


class Pages:
    """A connection to one server; a context manager."""

    def __init__(self, name: str, *, api_key: str | None) -> None:
        """name: the source as the user wrote it, for messages."""
        self._name = name
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = self._new_client()

    def __enter__(self) -> Pages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def _new_client(self) -> httpx2.Client:
        return httpx2.Client(headers=self._headers, timeout=TIMEOUT_S)

    @contextmanager
    def _in_time(self) -> Iterator[httpx2.Client]:
        """The client, which is closed if the block takes longer than TIMEOUT_S: its own time limit
        begins anew with each byte."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self._client.close()

        timer = threading.Timer(TIMEOUT_S, end)
        timer.daemon = True
        timer.start()
        try:
            yield self._client
        except httpx2.HTTPError as error:
            if late.is_set():
                raise httpx2.TimeoutException("") from error
            raise
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():
                self._client = self._new_client()

    def text(self, url: str) -> str:
        """The text of a page. Raises NotThereError if it does not exist, SourceError if it cannot
        be read."""
        content = bytearray()
        try:
            with self._in_time() as client, client.stream("GET", url) as response:
                self._check(response.status_code, url)
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > MAX_BYTES:
                        raise SourceError(f"{url} sends more than {MAX_BYTES >> 20} MiB.")
        except httpx2.TimeoutException:
            raise SourceError(f"{self._name} did not answer within {TIMEOUT_S:g} s.") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = reason_of(error)
            raise SourceError(f"{self._name} cannot be reached: {reason}.") from None
        return content.decode("utf-8", "replace")

    def _check(self, status: int, url: str) -> None:
        if status in (401, 403):
            raise SourceError(
                f"{self._name} needs an API key, or refused the one it got; give the server's with"
                " --api-key or in the environment variable OPENAI_API_KEY."
            )
        if status in (404, 405, 501):
            raise NotThereError(f"{url} does not exist there (status {status}).")
        if not 200 <= status < 300:
            raise SourceError(f"{url} answered with status {status}.")

    def json(self, url: str) -> Any:
        """The content of a page of JSON. Raises as ``text``, and SourceError for a page that is not
        JSON."""
        try:
            return msgspec.json.decode(self.text(url).encode())
        except (msgspec.DecodeError, RecursionError):
            raise SourceError(
                f"{url} does not answer with JSON; it is not a server of SGLang or Setpoint."
            ) from None
