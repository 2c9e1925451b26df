"""A gate in front of an engine that is not always loaded: it says whether a new request may be sent
to the engine, and hears of the ends of requests."""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    def arrived(self) -> bool:
        """A request has come. Returns whether it is admitted; otherwise the client holds it until
        ``EngineClient.admit_held``."""

    def ended(self) -> None:
        """An admitted request has ended."""

    def gave_up(self, position: int) -> None:
        """A held request has ended. position: how many older ones are held."""


class OpenGate:
    """Admits every request."""

    def arrived(self) -> bool:
        return True

    def ended(self) -> None:
        pass

    def gave_up(self, position: int) -> None:
        pass
