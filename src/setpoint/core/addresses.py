"""Recognises the address of a server that was written without its scheme."""

from __future__ import annotations

import re

from setpoint.core.errors import ConfigError

_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}(/\S*)?")


def url_meant(text: str) -> str | None:
    """The URL that was probably meant by HOST:PORT, with a path or without; None for anything
    else."""
    return f"http://{text}" if _HOST_AND_PORT.fullmatch(text) else None


def check_url(text: str) -> None:
    """Raise ConfigError for a server's URL without its scheme; the message has the URL that was
    meant, if that can be told."""
    if meant := url_meant(text):
        raise ConfigError(f"{text} is not a URL: did you mean {meant}?")
    if not text.lower().startswith(("http://", "https://")):
        raise ConfigError(f"{text} is not a URL: it must begin with http:// or https://.")
