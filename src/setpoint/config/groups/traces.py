"""The group of options "Traces"."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit, urlunsplit

import msgspec

from setpoint.config.groups.declare import Option
from setpoint.core.errors import ConfigError

GROUP = "Traces"


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about traces of requests for OpenTelemetry."""

    enable_trace: Annotated[
        bool,
        Option(
            GROUP,
            "Send spans of every request to an OpenTelemetry collector (docs/traces.md). Needs the"
            " extra 'trace'.",
            server_only=True,
        ),
    ] = False
    trace_modules: Annotated[
        str, Option(GROUP, "What is traced.", choices=("request",), server_only=True)
    ] = "request"
    otlp_traces_endpoint: Annotated[
        str,
        Option(
            GROUP,
            "Address of the collector's OTLP receiver for HTTP: HOST:PORT or a URL. gRPC,"
            " usually on port 4317, is not supported.",
            metavar="ADDRESS",
            server_only=True,
        ),
    ] = "localhost:4318"
    otlp_service_name: Annotated[
        str | None,
        Option(
            GROUP,
            "Name of the service in the spans. If not given, setpoint.",
            metavar="NAME",
            server_only=True,
        ),
    ] = None


def otlp_url(address: str) -> str:
    """``--otlp-traces-endpoint`` as a URL. Raises ConfigError."""
    flag = "--otlp-traces-endpoint"
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError(f"{flag} must be HOST:PORT or a URL with http or https, got {address!r}.")
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/v1/traces"))
