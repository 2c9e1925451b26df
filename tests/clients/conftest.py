"""An environment for each client, and the servers that all of them talk to."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from setpoint_testing.server_process import ServerProcess, free_port, running_server

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
"""Kept between runs; each is made again when its constraints change."""


def environment(client: str) -> Path:
    """The Python of a client's own environment, which holds exactly what its constraints list.
    ``TORCH_SOURCE_ARGS`` says where torch comes from, as in the Makefile."""
    constraints = HERE / client / "constraints.txt"
    folder = ENVIRONMENTS / client
    python = folder / "bin" / "python"
    stamp = folder / ".constraints"
    wanted = hashlib.sha256(constraints.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        lines = constraints.read_text().split()
        torch = [line for line in lines if line.startswith("torch==")]
        install = [str(python), "-m", "pip", "install", "-q", "--no-deps"]
        source = os.environ.get("TORCH_SOURCE_ARGS", "").split()
        for packages, more in ((torch, source), (sorted({*lines} - {*torch}), [])):
            if packages:
                subprocess.run([*install, *more, *packages], check=True)
        stamp.write_text(wanted)
    return python


@pytest.fixture(scope="session")
def make_environment() -> Callable[[str], Path]:
    return environment


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers of the default model, as a router needs."""
    home = tmp_path_factory.mktemp("servers")
    events = {
        "publisher": "zmq",
        "bind": True,
        "topic": "kv",
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    options = ("--tool-call-parser", "hermes", "--enable-metrics")
    with (
        running_server(
            home / "first", *options, "--file-storage-path", str(home / "files")
        ) as first,
        running_server(
            home / "second", *options, "--kv-events-config", json.dumps(events)
        ) as second,
    ):
        yield [first, second]
