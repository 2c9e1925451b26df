"""The options of the commands that talk to a running server: ``setpoint set`` and ``setpoint
top``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.declare import Option

CHANGES = "Change"
SHOWS = "Top"


class SetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint set``."""

    url: Annotated[
        str | None,
        Option(
            CHANGES,
            "The server, such as http://127.0.0.1:30000. May be given as the first argument.",
        ),
    ] = None
    change: Annotated[
        tuple[str, ...],
        Option(
            CHANGES,
            "Options and their new values, all changed at once; none takes an option back. May be"
            " given as further arguments. Without any, the options that can be set are listed.",
            metavar="NAME=VALUE",
        ),
    ] = ()
    why: Annotated[str, Option(CHANGES, "The reason, for the server's log.", metavar="TEXT")] = ""
    api_key: Annotated[
        str | None,
        Option(
            CHANGES,
            "API key of the server; the environment variable OPENAI_API_KEY if not given.",
            metavar="KEY",
            secret=True,
        ),
    ] = None


class TopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint top``."""

    url: Annotated[
        str | None,
        Option(
            SHOWS,
            "The server, such as http://127.0.0.1:30000. May be given as the first argument.",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Option(
            SHOWS,
            "API key of the server; the environment variable OPENAI_API_KEY if not given.",
            metavar="KEY",
            secret=True,
        ),
    ] = None
