"""The options of ``setpoint doctor``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.declare import Option

DIAGNOSES = "Doctor"


class DoctorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint doctor``."""

    source: Annotated[
        tuple[str, ...],
        Option(
            DIAGNOSES,
            "Log file (.gz and .zst, too), - for standard input, folder of the ranks' logs, saved"
            " /metrics page, recording, or URL of a server or of its /metrics. May be given as"
            " arguments.",
            metavar="SOURCE",
        ),
    ] = ()
    seconds: Annotated[
        float,
        Option(DIAGNOSES, "Seconds for which a URL is watched.", metavar="SECONDS", low=1),
    ] = 30.0
    api_key: Annotated[
        str | None,
        Option(
            DIAGNOSES,
            "API key of the server; the environment variable OPENAI_API_KEY if not given.",
            metavar="KEY",
            secret=True,
        ),
    ] = None
    json: Annotated[
        bool, Option(DIAGNOSES, "Print the report as JSON (docs/doctor.md describes it).")
    ] = False
    html: Annotated[
        str | None,
        Option(
            DIAGNOSES,
            "Write the report with large charts to this file, one page that needs nothing else.",
            metavar="FILE",
        ),
    ] = None
    watch: Annotated[
        bool,
        Option(
            DIAGNOSES,
            "Show the report of the last minutes of a live server or a growing log, and renew it"
            " until Ctrl-C.",
        ),
    ] = False
    all: Annotated[
        bool,
        Option(DIAGNOSES, "Show all evidence, alternatives and charts instead of one screen."),
    ] = False
    explain: Annotated[
        str | None,
        Option(
            DIAGNOSES,
            "Explain a cause, such as seq-cap, instead of reading anything; list names them all.",
            metavar="CAUSE",
        ),
    ] = None
    no_color: Annotated[
        bool,
        Option(
            DIAGNOSES,
            "No colours; so do the environment variable NO_COLOR and output that is no terminal.",
        ),
    ] = False
