"""The group of options "Logs"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

GROUP = "Logs"
LEVELS = ("debug", "info", "warning", "error", "critical")


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about the log."""

    log_level: Annotated[
        str, Option(GROUP, "Minimum severity of log lines.", choices=LEVELS, live=True)
    ] = "info"
    log_level_http: Annotated[
        str | None,
        Option(
            GROUP,
            "Minimum severity of the HTTP server's log lines. If not given, --log-level applies.",
            choices=LEVELS,
            live=True,
            server_only=True,
        ),
    ] = None
    uvicorn_access_log_exclude_prefixes: Annotated[
        tuple[str, ...],
        Option(
            GROUP,
            "Do not log HTTP requests whose path begins with one of these prefixes, such as"
            " /metrics /health.",
            metavar="PATH",
            server_only=True,
        ),
    ] = ()
    log_requests: Annotated[
        bool, Option(GROUP, "Log every request when it arrives and when it ends.", live=True)
    ] = False
    log_requests_level: Annotated[
        int,
        Option(
            GROUP,
            "What --log-requests shows: 0 metadata; 1 also sampling parameters; 2 also"
            " shortened input and output; 3 everything.",
            choices=(0, 1, 2, 3),
            live=True,
        ),
    ] = 2
    log_requests_format: Annotated[
        str,
        Option(
            GROUP,
            "Format of the log lines of --log-requests: text, or one JSON object per line.",
            choices=("text", "json"),
            live=True,
        ),
    ] = "text"
    enable_request_time_stats_logging: Annotated[
        bool,
        Option(
            GROUP,
            "Log, for each request that ends, how long it waited and ran in the engine.",
            live=True,
        ),
    ] = False
    decode_log_interval: Annotated[
        int, Option(GROUP, "Decode steps between two 'Decode batch' lines.", low=1, live=True)
    ] = 40
