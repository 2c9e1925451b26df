"""One HTTP request and its answer, on an event loop: a peer that is slow holds up nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping


async def exchange(
    host: str,
    port: int,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str],
    body: bytes = b"",
    most: int,
) -> tuple[int, bytes]:
    """(status, the first ``most`` bytes of the body) of an answer. Has no time limit of its own.
    Raises OSError or ValueError."""
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {f'[{host}]' if ':' in host else host}:{port}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        data = bytearray()
        while len(data) < most and (part := await reader.read(1 << 16)):
            data += part
        return status, bytes(data[:most])
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError):
        raise ConnectionError("its answer is cut, or not HTTP") from None
    finally:
        writer.close()
