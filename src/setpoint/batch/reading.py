"""Two ways to read the entries of a batch while its requests run: on the event loop, where nobody
else waits for it, and ahead in a thread, on a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from setpoint.batch.entry import Entry

BREATH = 1000
"""Most entries that are handled before the event loop gets its turn."""
AHEAD = 16
"""Most entries that are read ahead."""
AHEAD_BYTES = 1 << 18
"""Reading ahead stops at the entry with which this many bytes have been read."""


async def read_at_once(entries: Iterator[Entry]) -> AsyncIterator[Entry]:
    for count, entry in enumerate(entries):
        if count % BREATH == 0:
            await asyncio.sleep(0)
        yield entry


async def read_ahead(entries: Iterator[Entry]) -> AsyncIterator[Entry]:
    while some := await asyncio.to_thread(_some, entries):
        for entry in some:
            yield entry


def _some(entries: Iterator[Entry]) -> list[Entry]:
    """The next few entries; an empty list at the end."""
    some: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        some.append(entry)
        num_bytes += entry.num_bytes
        if len(some) == AHEAD or num_bytes >= AHEAD_BYTES:
            break
    return some
