"""Gets pages of a server. Whatever goes wrong is one sentence for the user."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import httpx2
import msgspec

from setpoint.core.errors import SourceError, reason_of

TIMEOUT_S = 10.0
MAX_BYTES = 64 << 20


class NotThereError(SourceError):
    """The server answers, and has no such page."""


class Pages:
    """A connection to one server; a context manager."""

    def __init__(self, name: str, *, api_key: str | None) -> None:
        """name: the source as the user wrote it, for messages."""
        self._name = name
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx2.Client(headers=headers, timeout=TIMEOUT_S)

    def __enter__(self) -> Pages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def text(self, url: str) -> str:
        """Raises NotThereError for a page that does not exist, SourceError for one that cannot be
        had."""
        deadline = time.monotonic() + TIMEOUT_S
        content = bytearray()
        try:
            with self._client.stream("GET", url) as response:
                self._check(response.status_code, url)
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > MAX_BYTES or time.monotonic() > deadline:
                        raise SourceError(
                            f"{url} sends more than {MAX_BYTES >> 20} MiB, or needs more than"
                            f" {TIMEOUT_S:g} s."
                        )
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
        """As ``text``; raises SourceError for a page that is not JSON."""
        try:
            return msgspec.json.decode(self.text(url).encode())
        except msgspec.DecodeError:
            raise SourceError(
                f"{url} does not answer with JSON; it is no server of SGLang or Setpoint."
            ) from None
