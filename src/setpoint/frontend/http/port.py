"""Binds the port before anything heavy is imported or the model is loaded, so that a port in use is
reported at once."""

from __future__ import annotations

import errno
import ipaddress
import socket

from setpoint.core.errors import ConfigError


def bind_socket(host: str, port: int, *, flag: str = "--port", what: str = "") -> socket.socket:
    """A TCP socket bound to the address, not listening yet. flag: the port's option. what: begins
    the message of an error. Raises ConfigError with advice if it cannot be bound."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"{what}--host {host}: {error.strerror or error}; give an address of this machine, e.g."
            " 127.0.0.1."
        ) from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, error, flag=flag, what=what) from error
    return sock


def is_loopback(sock: socket.socket) -> bool:
    """Whether only programs on this machine can reach the bound socket."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def cannot_listen(
    host: str, port: int, error: OSError, *, flag: str = "--port", what: str = ""
) -> ConfigError:
    """The error for an address that cannot be used, with advice."""
    if error.errno == errno.EADDRINUSE:
        advice = f"stop the program that uses it, or choose another with {flag}"
    elif error.errno == errno.EACCES:
        advice = f"ports below 1024 need privileges; choose another with {flag}"
    else:
        advice = f"check --host and {flag}"
    return ConfigError(f"{what}Cannot listen on {host}:{port}: {error.strerror}; {advice}.")
