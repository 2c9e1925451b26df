"""Runs ``setpoint route``, which puts several servers behind one address. The router is the package
smg; this module starts it with the arguments that suit Setpoint's servers."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module

from setpoint.config.command_options import RouteOptions
from setpoint.core.addresses import check_url
from setpoint.core.errors import ConfigError

ALWAYS = (
    # /ready answers 503 as soon as a server drains or has no engine, but by default smg asks only
    # once a minute.
    *("--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    # The servers tokenize.
    "--disable-tokenizer-autoload",
    *("--log-level", "warn"),
)


def route(wanted: RouteOptions, *, api_key: str | None) -> int:
    """Run the router until a signal ends it; returns the exit code. api_key: the servers' key if
    the command line gives none. Raises ConfigError."""
    if not wanted.url:
        raise ConfigError("name the servers: setpoint route URL [URL ...].")
    for url in wanted.url:
        check_url(url)
    arguments = ["launch", "--worker-urls", *wanted.url]
    arguments += ["--host", wanted.host, "--port", str(wanted.port), "--policy", wanted.policy]
    arguments += ["--prometheus-host", wanted.host, *ALWAYS]
    print(f"Starting: smg {shlex.join(arguments)}", file=sys.stderr, flush=True)
    key = wanted.api_key or api_key
    # smg runs in this process, so that the key does not appear in the list of processes.
    import_module("smg.cli").main(arguments + (["--api-key", key] if key else []))
    return 0
