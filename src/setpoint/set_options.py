"""``setpoint set``: changes options of a running server, and prints what they were and are."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec

from setpoint.config.running_server import SetOptions
from setpoint.core.errors import ConfigError, RequestError, reason_of

_ROUTE = "set_internal_state"
_TIMEOUT_S = 30.0


def set_options(wanted: SetOptions, *, api_key: str | None) -> int:
    """``api_key``: for a command line without one. Returns the exit code; raises ConfigError or
    RequestError."""
    if wanted.url is None or not wanted.change:
        raise ConfigError("say which server, and what to change: setpoint set URL NAME=VALUE.")
    key = wanted.api_key or api_key
    answer = _send(
        f"{wanted.url.rstrip('/')}/{_ROUTE}",
        {"server_args": _values(wanted.change), "why": wanted.why},
        {} if key is None else {"Authorization": f"Bearer {key}"},
    )
    for change in answer["changes"]:
        print(f"{change['option']}: {_shown(change['old'])} -> {_shown(change['new'])}")
    if not answer["changes"]:
        print("Nothing changes: these are the present values.")
    for warning in answer.get("warnings", ()):
        print(f"warning: {warning}")
    return 0


def _values(changes: tuple[str, ...]) -> dict[str, str]:
    values: dict[str, str] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"{change!r} is not of the form NAME=VALUE.")
        if name in values:
            raise ConfigError(f"{name} is given twice.")
        values[name] = value
    return values


def _send(url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    try:
        response = httpx2.post(url, json=body, headers=headers, timeout=_TIMEOUT_S)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = reason_of(error)
        raise RequestError(f"{url} cannot be reached: {reason}.", status_code=503) from None
    if response.status_code == 401:
        raise RequestError(f"{url} refused the API key; pass the right one with --api-key.")
    try:
        content = msgspec.json.decode(response.content)
        if response.is_success:
            return dict(content[0])
        message = str(content["message"])
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        message = f"{url} answered with status {response.status_code}; is it a Setpoint server?"
    raise RequestError(message, status_code=response.status_code)


def _shown(value: Any) -> str:
    """As it is typed."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
