"""``setpoint route``: one address for several servers. The router is smg, a package of its own;
here it only gets the arguments that suit Setpoint's servers."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module

from setpoint.config.commands import RouteOptions
from setpoint.core.addresses import check_url
from setpoint.core.errors import ConfigError
from setpoint.launch.preflight import check_extra

ALWAYS = (
    # /ready is 503 as soon as a server drains or has no engine; smg asks every minute by default.
    *("--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    # Servers tokenize by themselves.
    "--disable-tokenizer-autoload",
    *("--log-level", "warn"),
)


def route(wanted: RouteOptions, *, api_key: str | None) -> int:
    """Run the router until a signal ends it; returns the exit code. ``api_key``: the servers' key
    if the command line gives none. Raises ConfigError."""
    if not wanted.url:
        raise ConfigError("say which servers to route to: setpoint route URL [URL ...].")
    for url in wanted.url:
        check_url(url)
    check_extra("setpoint route", "route", "smg")
    arguments = ["launch", "--worker-urls", *wanted.url]
    arguments += ["--host", wanted.host, "--port", str(wanted.port), "--policy", wanted.policy]
    arguments += ["--prometheus-host", wanted.host, *ALWAYS]
    print(f"Starting: smg {shlex.join(arguments)}", file=sys.stderr, flush=True)
    key = wanted.api_key or api_key
    # In this process, so that the key is in no list of processes.
    import_module("smg.cli").main(arguments + (["--api-key", key] if key else []))
    return 0
