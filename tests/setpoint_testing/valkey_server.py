"""A Valkey or Redis server for a test."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSWORD = "hush-hush"


def missing() -> str:
    """What such a test lacks on this machine; empty if nothing."""
    if shutil.which("valkey-server") is None and shutil.which("redis-server") is None:
        return "needs a Valkey or Redis server (Debian's package redis-server)"
    return "" if importlib.util.find_spec("valkey") else "needs the package valkey"


@contextmanager
def valkey_server(folder: Path) -> Iterator[str]:
    """The URL of a server that asks for a password and keeps nothing on disk."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    assert program is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (
        *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)),
        *("--requirepass", PASSWORD, "--maxmemory", "64mb"),
    )
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.05)
        yield f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()
