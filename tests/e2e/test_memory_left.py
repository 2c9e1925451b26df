"""The memory that the ready line tells."""

from __future__ import annotations

import re

from setpoint_testing.server_process import ServerProcess


def test_what_is_left_is_left_after_the_pool(smol: ServerProcess) -> None:
    """... although an operating system takes memory only when it is written."""
    found = re.search(
        r"avail mem=(\S+) GB.*K size: (\S+) GB, V size: (\S+) GB.*available_cpu_mem=(\S+) GB",
        smol.errors,
        re.DOTALL,
    )
    assert found, smol.errors
    loaded, keys, values, left = map(float, found.groups())
    assert keys > 0.1
    assert left <= loaded - keys - values + 0.02
