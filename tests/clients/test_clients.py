"""Real clients against real servers, each in an environment of its own: docs/compatibility.md has
the table.

Each folder with a ``run.py``, its checks, is a client: ``constraints.txt`` is its whole environment.
An environment is a download of up to half a gigabyte, once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from setpoint_testing.server_process import ServerProcess

HERE = Path(__file__).parent
CLIENTS = sorted(path.parent.name for path in HERE.glob("*/run.py"))
TABLE = HERE.parents[1] / "docs" / "compatibility.md"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_works(
    client: str, make_environment: Callable[[str], Path], servers: list[ServerProcess]
) -> None:
    done = subprocess.run(
        [str(make_environment(client)), str(HERE / client / "run.py"), *(s.url for s in servers)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout, done.stderr[-3000:]
    checks = json.loads(done.stdout.splitlines()[-1])
    for check in checks:
        print(f"{client}: {check['name']}: {check['seconds']} s {check['note']}")
    assert checks
    assert [check["name"] for check in checks if not check["ok"]] == []
    for server in servers:
        assert "Traceback" not in server.errors
        assert not server.engine_is_gone()


def test_the_table_of_clients_names_the_versions_that_are_run() -> None:
    """A row is: client, package and version, what is run, notes."""
    section = TABLE.read_text().partition("## Clients\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| `(\S+) (\S+)` \|", section, re.MULTILINE)
    named = {f"{package}=={version}" for package, version in rows}
    pinned = {
        path.parent.name: {*path.read_text().split()} for path in HERE.glob("*/constraints.txt")
    }
    assert [client for client in pinned if not named & pinned[client]] == []
    assert named <= set.union(*pinned.values())
