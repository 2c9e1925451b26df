"""Memory of the pool is found ahead of its use: page by page in every layer, as far as is wanted,
without touching what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.cachegroups import cache_layout
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner import claim_ahead
from setpoint.engine.runner.claim_ahead import ClaimAhead
from setpoint.engine.runner.kv_pool import KVPool
from setpoint_testing.plans import Driver
from setpoint_testing.specs import tiny_spec
from setpoint_testing.tiny_models import write_tiny_llama

SPEC = tiny_spec()
STRIPES = 2 * SPEC.num_layers
PAGE_BYTES = SPEC.num_kv_heads * SPEC.head_dim * 2
"""The size of a page of one token in bf16, in one layer's K or V."""


def pool_of(num_pages: int, device: str = "cpu") -> KVPool:
    return KVPool(
        cache_layout(SPEC, SPEC.context_len),
        num_pages=num_pages - 1,
        page_size=1,
        dtype=torch.bfloat16,
        device=torch.device(device),
    )


@dataclass
class Claims:
    """Stands in for the system: how often each page of each stripe was claimed."""

    pool: KVPool
    left: int = 10**9
    """Calls until there is no memory."""
    counts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stripes = [pages for slab in self.pool.slabs for pages in slab]
        self.counts = [[0] * len(pages) for pages in self.stripes]

    def populate(self, memory: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(12, "Cannot allocate memory")
        assert 0 < len(memory) <= 4
        for stripe, counts in zip(self.stripes, self.counts, strict=True):
            begin = (memory.data_ptr() - stripe.data_ptr()) // PAGE_BYTES
            if 0 <= begin < len(stripe):
                counts[begin : begin + len(memory)] = [
                    count + 1 for count in counts[begin : begin + len(memory)]
                ]

    def claimed(self) -> list[int]:
        """For each page, the number of claims in all stripes together."""
        return [sum(each) for each in zip(*self.counts, strict=True)]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Claims:
    """The claims of a pool of 64 pages, of which 4 are claimed at a time and 16 ahead."""
    claims = Claims(pool_of(64))
    monkeypatch.setattr(claim_ahead, "populate", claims.populate)
    monkeypatch.setattr(claim_ahead, "TURN_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(claim_ahead, "AHEAD_BYTES", 16 * STRIPES * PAGE_BYTES)
    return claims


def advance(ahead: ClaimAhead, used: int) -> int:
    """Hand out the pages up to ``used``; -> how many turns there was something to do."""
    ahead.hand_out(np.arange(used + 1, dtype=np.int32))
    turns = 0
    while ahead.advance():
        turns += 1
        assert turns < 1000
    return turns


def test_every_page_ahead_is_claimed_once_in_every_layer(claims: Claims) -> None:
    ahead = ClaimAhead(claims.pool)
    assert advance(ahead, 0) == 4 * STRIPES
    assert claims.claimed() == [0] + [STRIPES] * 16 + [0] * 47
    assert advance(ahead, 0) == 0, "no further than it has to be"
    assert advance(ahead, 9) == 3 * STRIPES
    assert claims.claimed() == [0] + [STRIPES] * 25 + [0] * 38


def test_it_ends_with_the_pool(claims: Claims) -> None:
    ahead = ClaimAhead(claims.pool)
    advance(ahead, 59)
    assert claims.claimed() == [0] * 60 + [STRIPES] * 4
    assert advance(ahead, 63) == 0, "every page is in use"


def test_it_is_overtaken_in_the_middle_of_its_work(claims: Claims) -> None:
    ahead = ClaimAhead(claims.pool)
    for _ in range(STRIPES + 1):
        ahead.advance()
    advance(ahead, 19)
    assert claims.claimed()[20:36] == [STRIPES] * 16
    assert claims.claimed()[9:20] == [0] * 11, "what is in use has been written"


def test_it_gives_up_where_there_is_no_memory_and_says_so(
    claims: Claims, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    claims.left = 3
    ahead = ClaimAhead(claims.pool)
    assert advance(ahead, 0) == 3
    assert advance(ahead, 29) == 0
    assert claims.left == -1, "and asks no more"
    (record,) = caplog.records
    assert "Cannot allocate memory" in record.getMessage()


def test_other_devices_claim_their_pool_at_once() -> None:
    ahead = ClaimAhead(pool_of(8, "meta"))
    assert advance(ahead, 0) == advance(ahead, 4) == 0


def test_an_executor_claims_for_the_pool_of_its_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path)
    runner = build_runner(
        EngineConfig(
            str(folder), read_spec(folder), dtype="float32", kv_dtype="float32", num_threads=1
        )
    )
    runner.allocate(num_pages=160, max_slots=8, context_len=32)
    num_bytes: list[int] = []
    monkeypatch.setattr(claim_ahead, "populate", lambda memory: num_bytes.append(memory.nbytes))
    executor = InprocExecutor(runner)
    Driver(executor, 1, 20).generate({slot: [5, 6, 7] for slot in range(2)}, 2)
    while executor.idle():
        pass
    assert sum(num_bytes) == runner.pool.num_bytes * 120 // 161, (
        "all of it but the dummy page and those of two slots"
    )
