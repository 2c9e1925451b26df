"""Memory of the pool is found ahead of its use: as far as is told, without touching what it holds, and only as long as the pool lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from setpoint.engine.kernels.device import claim
from setpoint.engine.kernels.memory import populate
from setpoint.engine.runner import populating
from setpoint.engine.runner.kv_pool import KVPool
from setpoint.testing.specs import tiny_spec

MIB = 1 << 20
SPEC = tiny_spec()
BYTES = 2 * 2 * 2 * 16 * 2
"""Of a token in bf16: layers, K and V, heads, dimensions."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_populated_memory_is_resident_and_holds_what_it_held() -> None:
    memory = claim((64 * MIB,), torch.uint8, torch.device("cpu"))
    memory[5 * MIB] = 7
    before = resident_bytes()
    assert populate(memory[: 32 * MIB])
    assert 30 * MIB < resident_bytes() - before < 34 * MIB
    assert memory[5 * MIB] == 7
    assert not populate(torch.empty(8, device="meta"))


class Runner(SimpleNamespace):
    """Plain namespaces have no weak references."""


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "populate"]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_it_stays_ahead_of_the_highest_page_in_use_and_ends_with_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(populating, "INTERVAL_S", 0.01)
    monkeypatch.setattr(populating, "AHEAD_BYTES", 8 * MIB)
    monkeypatch.setattr(KVPool, "populate", lambda self, begin, end: done.append((begin, end)) or True)
    device = torch.device("cpu")
    pool = KVPool(SPEC, num_pages=64 * MIB // BYTES - 1, page_size=1, dtype=torch.bfloat16, device=device)
    table = torch.zeros(2, 8, dtype=torch.int32)
    runner = Runner(pool=pool, page_size=1, slots=SimpleNamespace(pages=SimpleNamespace(tensor=table)))
    populating.populate_ahead(runner)
    ahead = 8 * MIB // BYTES
    wait_until(lambda: done[-1][1] == ahead)
    time.sleep(0.1)
    assert done[-1][1] == ahead, "no further than it has to be"
    table[1, 3] = 500
    wait_until(lambda: done[-1][1] == 500 + ahead)
    table[:] = 0
    time.sleep(0.1)
    assert [end for _, end in done[1:-1]] == [begin for begin, _ in done[2:]], "every page once"
    assert running()
    del runner, pool
    wait_until(lambda: not running())


def test_a_device_whose_memory_cannot_be_populated_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVPool, "populate", lambda self, begin, end: False)
    pool = KVPool(SPEC, num_pages=8, page_size=1, dtype=torch.bfloat16, device=torch.device("cpu"))
    populating.populate_ahead(SimpleNamespace(pool=pool))
    assert not running()
