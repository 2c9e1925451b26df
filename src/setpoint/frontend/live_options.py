"""The frontend's view of options that may change while the server runs. How options become settings
is not known here: ``launch`` supplies that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from setpoint.core.control import OptionChange
from setpoint.core.settings import Settings


@dataclass(slots=True, frozen=True)
class LiveOption:
    """What people who change a live option want to know of it."""

    meaning: str
    choices: Sequence[str] = ()
    """Its values as they are typed, if there are only a few."""


@dataclass(slots=True, frozen=True)
class FrontendSettings:
    """The live settings that the frontend itself uses."""

    log_requests: bool = False
    log_requests_level: int = 2
    """0 metadata, 1 + sampling parameters, 2 + text and ids cut short, 3 everything."""
    log_requests_format: str = "text"
    """"text", or "json": one JSON object per line."""
    drain_timeout_s: float = 30.0
    """How long running requests may continue after a signal to end."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The present values of the live options, for ``/server_info``."""
    decisions: Sequence[Mapping[str, Any]] = ()
    """Decisions for ``/server_info`` that replace earlier ones about the same options."""
    described: Mapping[str, LiveOption] = field(default_factory=dict)
    """The live options by name."""


@dataclass(slots=True, frozen=True)
class Proposal:
    """A change that has been checked and can be made now."""

    settings: Settings
    """All settings of the engine after the change."""
    options: list[OptionChange]
    """The options that differ, including those that follow from an option that was asked for."""
    warnings: list[str]
    accept: Callable[[], None]
    """Makes the change in this process; to be called once the engine works under these settings."""


class LiveOptions(Protocol):
    """The options of a running server."""

    @property
    def frontend(self) -> FrontendSettings: ...

    def propose(self, values: Mapping[str, Any]) -> Proposal:
        """Check a change of options. values: by option name, as JSON values or as typed on a
        command line. Raises ConfigError for a change that a start would refuse, that the engine has
        no room for, or that needs a restart."""
        ...
