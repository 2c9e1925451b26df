"""What the scripts of the clients share. It runs in each client's own environment, so it needs
nothing but Python. A script declares checks and ends with ``report()``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CHECKS: list[tuple[str, Callable[[], Any]]] = []

URLS = sys.argv[1:]
"""Base URLs of the servers, without a slash at the end; all but the routers use the first."""
URL = URLS[0] if URLS else ""
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def asked(path: str, body: dict[str, Any] | None = None, *, url: str = "") -> Any:
    """The JSON answer of the server to a plain request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        (url or URL) + path, data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def refused(kind: type[BaseException]) -> Iterator[list[Any]]:
    """The body must raise a ``kind``, which is then the item of the list."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, "not refused"


def tokenizer() -> str:
    """The folder of the served model's tokenizer, so that no client asks the hub for it."""
    return str(asked("/server_info")["tokenizer_path"])


def run(*command: str, **options: Any) -> str:
    """The output of a program of this environment. Raises AssertionError with it if it fails."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    )
    return done.stdout


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Declare a check: it fails by raising. A text that it returns is a note for the report."""

    def declared(function: Callable[[], Any]) -> Callable[[], Any]:
        _CHECKS.append((name, function))
        return function

    return declared


def report() -> None:
    """Run all checks and print the result as the last line: a list of name, ok, note."""
    done = []
    for name, function in _CHECKS:
        begin = time.monotonic()
        try:
            note = str(function() or "")
            ok = True
        except BaseException:  # a client may call sys.exit
            note, ok = traceback.format_exc(), False
        seconds = round(time.monotonic() - begin, 2)
        done.append({"name": name, "ok": ok, "seconds": seconds, "note": note})
    print("\n" + json.dumps(done))
