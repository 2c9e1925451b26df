"""Simulated servers whose engines share a storage: whatever happens to engines and transfers, every
client gets what it gets alone without cache tiers (``setpoint_testing.simulation.tier_run``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from setpoint.core.messages import PagesMoved
from setpoint.scheduler.tiers import Tiers
from setpoint.scheduler.transfers import Transfers
from setpoint.tiers.identity import TierIdentity
from setpoint.tiers.mover import StoreMover
from setpoint.tiers.store import Bytes
from setpoint_testing.simulation.tier_run import simulate_tiers
from setpoint_testing.simulation.tiers import SUM_BYTES, EngineStore, SimulatedTiers

BLOCK = 20
"""Seeds in one test."""
HAPPENS = (
    *("lookups", "loads", "saves", "tokens loaded", "tokens saved"),
    *("prompt loaded", "prompt missed", "prompt timed_out"),
    *("aborted in a lookup", "aborted in a load"),
    *("killed during a lookup", "killed during a load", "killed during a save"),
    *("killed within a lookup", "killed within a load", "killed within a save", "blocks torn"),
    *("load ended after it was cancelled", "load ended after a pause", "save ended after a pause"),
    *("load ended after a flush", "save ended after a flush"),
    *("load ended after LoadWeights", "save ended after LoadWeights"),
    *("load ended after ReleaseMemory", "save ended after ReleaseMemory"),
    *("load ended after a retraction", "save ended after a retraction"),
    *("messages twice", "damaged blocks found", "blocks evicted", "errors of the store"),
    *("hangs in a lookup", "hangs in a load", "hangs in a save", "tiers off", "stores off"),
    *("transfer ended: a block is missing", "transfer ended: cancelled"),
    *("write_through", "write_through_selective", "write_back"),
    *("timeout", "best_effort", "wait_complete"),
)
"""What the seeds of the long test must contain; those of a short one contain half of it and more."""

FOUND = {213: "an engine that hung when it was told to end was not ended, and never started again"}


def check(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        report = simulate_tiers(seed)
        again = f"python -m setpoint_testing.simulation --tiers --seed {seed} -v"
        assert not report.wrong, (again, report.wrong)
        seen.update(report.seen)
    return seen


@pytest.mark.cases(1)
@pytest.mark.parametrize("block", range(3))
def test_every_client_gets_what_it_gets_without_tiers(block: int) -> None:
    seen = check(range(block * BLOCK, (block + 1) * BLOCK))
    lacking = [what for what in HAPPENS if not seen[what]]
    assert len(lacking) <= len(HAPPENS) // 2, lacking
    assert seen["tokens loaded"] > 1000


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_is_mended(seed: int) -> None:
    check(range(seed, seed + 1))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_many_more_seeds() -> None:
    seen = check(range(100, 1300))
    assert all(seen[what] for what in HAPPENS), [what for what in HAPPENS if not seen[what]]
    assert seen["tokens loaded"] > 100_000


# ------------------------------------------------------------------ what it must find


def ended_at_once(self: Tiers, seq_id: int) -> None:
    """The pages of a load are given to others while it still writes."""
    wait = self._waits.pop(seq_id)
    if wait.transfer_id is not None:
        self._mover.cancel(wait.transfer_id)
        self._transfers.end(PagesMoved(wait.transfer_id, 0))


def read_without_sum(self: EngineStore, key: bytes) -> Bytes | None:
    sealed = self._storage.blocks.get(key)
    return None if sealed is None else np.frombuffer(sealed[:-SUM_BYTES], np.uint8)


def moved_all(self: StoreMover, message: PagesMoved) -> None:
    """A load that ended early says that all has arrived."""
    self._post(PagesMoved(message.id, 1 << 20))


def known_before(self: TierIdentity) -> None:
    """The weights change while the tiers still serve as the old ones."""


FAULTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "pages are free before their transfer has ended": (Tiers, "cancel", ended_at_once),
    "a key without the weights": (SimulatedTiers, "_found_identity", lambda self: b"one for all"),
    "a flush leaves what transfers bring": (Transfers, "flush", lambda self: None),
    "a damaged block is taken": (EngineStore, "get", read_without_sum),
    "what has not arrived is taken": (StoreMover, "_end", moved_all),
    "blocks are written under the name of earlier weights": (TierIdentity, "forget", known_before),
}
RARE = {
    "pages are free before their transfer has ended",
    "a damaged block is taken",
    "blocks are written under the name of earlier weights",
}
"""Faults that need more seeds than a quick test has."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[pytest.mark.full] if each in RARE else []) for each in FAULTS],
)
def test_a_fault_of_the_product_gives_wrong_tokens(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    where, name, instead = FAULTS[fault]
    monkeypatch.setattr(where, name, instead)
    assert any(simulate_tiers(seed).wrong for seed in range(400))
