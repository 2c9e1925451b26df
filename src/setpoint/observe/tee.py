"""Combines several observers into one."""

from __future__ import annotations

from setpoint.core.records import Observer, Record


class Tee:
    """Passes every record on to each of its readers, in their order."""

    def __init__(self, *readers: Observer) -> None:
        self._readers = readers

    def on(self, record: Record) -> None:
        for reader in self._readers:
            reader.on(record)
