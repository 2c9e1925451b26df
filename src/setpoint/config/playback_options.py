"""The options of ``setpoint console``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.declare import Option

PLAYS = "Console"


class ConsoleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint console``."""

    file: Annotated[
        str | None,
        Option(
            PLAYS,
            "Recording that 'setpoint serve --record FILE' wrote. May be given as the first"
            " argument.",
            metavar="FILE",
        ),
    ] = None
    port: Annotated[
        int,
        Option(PLAYS, "Port of the page on this machine; 0 takes a free one.", low=0, high=65535),
    ] = 30100
