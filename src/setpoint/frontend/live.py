"""What may change while a server serves, as the frontend sees it. How options become settings is
not known here: ``launch`` brings it in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from setpoint.core.messages import OptionChange
from setpoint.core.settings import Settings


@dataclass(slots=True, frozen=True)
class FrontendSettings:
    """What of it is the frontend's own."""

    log_requests: bool = False
    log_requests_level: int = 2
    """0 metadata, 1 + sampling parameters, 2 + text and ids cut short, 3 everything."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The live options as they are, for ``/server_info``."""
    decisions: Sequence[Mapping[str, Any]] = ()
    """Those of ``/server_info`` that take the place of earlier ones about the same options."""


@dataclass(slots=True, frozen=True)
class Proposal:
    """A change that could be made now."""

    settings: Settings
    """The engine's, all of them."""
    options: list[OptionChange]
    """What differs; what follows from an option that was asked for is here, too."""
    warnings: list[str]
    accept: Callable[[], None]
    """To be called once the engine works under these settings."""


class LiveOptions(Protocol):
    """The options of a running server."""

    @property
    def frontend(self) -> FrontendSettings: ...

    def propose(self, values: Mapping[str, Any]) -> Proposal:
        """Option names and values, as JSON or as they are typed. Raises ConfigError for a change
        that a start would refuse, that the engine has no room for, or that needs a restart."""
        ...
