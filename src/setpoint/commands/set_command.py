"""Runs ``setpoint set``: changes options of a running server and prints their old and new values;
without a change, lists the options that can be set."""

from __future__ import annotations

import textwrap
from typing import Any
from urllib.parse import urlencode

import httpx2
import msgspec

from setpoint.config.command_options import SetOptions
from setpoint.config.groups.declare import allowed
from setpoint.config.live_changes import LIVE
from setpoint.core.addresses import check_url
from setpoint.core.errors import ConfigError, RequestError, reason_of

_ROUTE = "set_internal_state"
_INFO_ROUTE = "server_info"
_WIDTH = 96
_TIMEOUT_S = 30.0


def set_options(wanted: SetOptions, *, api_key: str | None) -> int:
    """Run the command; returns the exit code. api_key: the key if the command line gives none.
    Raises ConfigError or RequestError."""
    if wanted.url is None:
        raise ConfigError(
            "name a server and what to change: setpoint set URL NAME=VALUE. Without NAME=VALUE,"
            " setpoint set URL lists the options that can change."
        )
    check_url(wanted.url)
    key, base = wanted.api_key or api_key, wanted.url.rstrip("/")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    query = "" if wanted.model is None else f"?{urlencode({'model': wanted.model})}"
    if not wanted.change:
        print(_listed(_ask("GET", f"{base}/{_INFO_ROUTE}{query}", headers), base), end="")
        return 0
    body = {"server_args": _values(wanted.change), "why": wanted.why}
    answer = _ask("POST", f"{base}/{_ROUTE}{query}", headers, body)[0]
    for change in answer["changes"]:
        print(f"{change['option']}: {_value_text(change['old'])} -> {_value_text(change['new'])}")
    if not answer["changes"]:
        print("Nothing changes, because these are already the values.")
    for warning in answer.get("warnings", ()):
        print(f"warning: {warning}")
    return 0


def _values(changes: tuple[str, ...]) -> dict[str, str]:
    values: dict[str, str] = {}
    for change, following in zip(changes, (*changes[1:], "="), strict=True):
        name, equals, value = change.partition("=")
        if not equals and "=" not in following:
            raise ConfigError(f"changes are written NAME=VALUE: {change}={following}.")
        if not equals:
            raise ConfigError(f"changes are written NAME=VALUE, and {change!r} has no value.")
        if name in values:
            raise ConfigError(f"{name} is given twice.")
        values[name] = value
    return values


def _listed(info: Any, url: str) -> str:
    """A text about every live option: its current value, its default and the reason where the two
    differ, its meaning, and the values that it accepts. Raises RequestError if ``info`` is not from
    a Setpoint server."""
    if not isinstance(info, dict) or "decisions" not in info:  # SGLang's server_info has no reasons
        raise RequestError(_no_answer(url), status_code=502)
    why = {each["field"]: each["why"] for each in info["decisions"]}
    known = [field for field in LIVE if field.name in info]
    paragraphs = [
        f"{field.name} = {_value_text(info[field.name])}"
        + _mark(info[field.name], field.default, why.get(field.name))
        + "\n"
        + textwrap.fill(
            f"{field.about.meaning} {allowed(field)}",
            _WIDTH,
            initial_indent="    ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        for field in known
    ]
    return "\n\n".join(paragraphs) + "\n"


def _mark(value: Any, default: Any, why: str | None) -> str:
    """The note after a value that is not the option's default, with the server's reason if there is
    one."""
    if value == default:
        return ""
    reason = f"; {why}" if why else ""
    return f" (the default is {_value_text(default)}{reason})"


def _ask(method: str, url: str, headers: dict[str, str], body: Any = None) -> Any:
    """The server's answer. Raises RequestError with the server's reason, or if the server does not
    answer."""
    try:
        response = httpx2.request(method, url, json=body, headers=headers, timeout=_TIMEOUT_S)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = reason_of(error)
        raise RequestError(f"{url} cannot be reached: {reason}.", status_code=503) from None
    if response.status_code == 401:
        raise RequestError(f"{url} refused the API key; give the right one with --api-key.")
    try:
        content = msgspec.json.decode(response.content)
        if response.is_success:
            return content
        message = str(content["message"])
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        message = f"status {response.status_code}: {_no_answer(url)}"
    raise RequestError(message, status_code=response.status_code)


def _no_answer(url: str) -> str:
    return f"{url} did not answer as expected; is it a Setpoint server?"


def _value_text(value: Any) -> str:
    """The value as a user would type it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
