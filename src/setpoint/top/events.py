"""The events of a server's console stream (docs/console.md), as ``setpoint top`` receives them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import httpx2
import msgspec

from setpoint.core.errors import RequestError, reason_of

STREAM = "/console/stream"
TIMEOUT_S = 15.0
"""Seconds without a byte after which the stream counts as lost: the server sends at least a
comment every few seconds."""
MAX_EVENT = 16 << 20
"""Most bytes of an event; the server's events have some hundred KiB at most."""


class Lost(RequestError):
    """The stream has ended or cannot be opened now; a later attempt may succeed."""


def events(url: str, api_key: str | None) -> Iterator[tuple[str, Any]]:
    """Yields (name, content) of each event, and ("", None) for a comment, with which the server
    says only that it is alive. It always ends with an exception: Lost, or RequestError if trying
    again would not help."""
    address = f"{url.rstrip('/')}{STREAM}"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx2.stream("GET", address, headers=headers, timeout=TIMEOUT_S) as response:
            _check(response, url)
            yield from parse_events(split_lines(response.iter_bytes(), url))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = reason_of(error)
        raise Lost(f"{url} cannot be reached: {reason}.", status_code=503) from None
    raise Lost(f"{url} has ended the stream.", status_code=503)


def _check(response: httpx2.Response, url: str) -> None:
    status = response.status_code
    if status == 200 and response.headers.get("content-type", "").startswith("text/event-stream"):
        return
    if status in (401, 403):
        raise RequestError(f"{url} refused the API key; pass the right one with --api-key.")
    if status >= 500:
        raise Lost(f"{url} answered with status {status}.", status_code=status)
    raise RequestError(
        f"{url} has no console (status {status}); is it a Setpoint server? 'setpoint doctor {url}"
        " --watch' reads SGLang's servers, too."
    )


def split_lines(chunks: Iterable[bytes], url: str) -> Iterator[str]:
    """Yields the lines of a stream. Raises Lost for a line that is too long or takes too long."""
    parts: list[bytes] = []
    size, since = 0, time.monotonic()
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        if ended:
            ended[0] = b"".join([*parts, ended[0]])
            for line in ended:
                yield line.removesuffix(b"\r").decode("utf-8", "replace")
            parts, size, since = [], 0, time.monotonic()
        parts.append(rest)
        size += len(rest)
        if size > MAX_EVENT or time.monotonic() - since > TIMEOUT_S:
            raise Lost(
                f"{url} sends a line that is longer than {MAX_EVENT >> 20} MiB or takes longer than"
                f" {TIMEOUT_S:g} s.",
                status_code=503,
            )


def parse_events(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yields (name, content) of the events in a stream's lines. An event that is not JSON is left
    out."""
    name, data = "", ""
    for line in lines:
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            data += line.removeprefix("data:")
            if len(data) > MAX_EVENT:
                raise Lost(
                    f"The server sends an event of more than {MAX_EVENT >> 20} MiB.",
                    status_code=503,
                )
        elif line.startswith(":"):
            yield "", None
        elif not line and data:
            with suppress(msgspec.DecodeError, RecursionError):
                yield name, msgspec.json.decode(data)
            name, data = "", ""
