"""The choice of an engine, by hand-made loads."""

from __future__ import annotations

from setpoint.core.messages import Cached
from setpoint.core.prefix_digest import names_of
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.ipc.balance import CacheAware, EngineLoad


def request(first: int) -> Request:
    ids = pack_ids(list(range(first, first + 128)))
    return Request(rid="", prompt_ids=ids, sampling=SamplingParams(), seed=0)


def test_prompts_that_come_one_by_one_fill_both_caches() -> None:
    """No engine has anything to do when the next one comes, so load alone would not tell them
    apart."""
    rule, loads = CacheAware(), [EngineLoad(rank, keeps_prefixes=True) for rank in range(2)]
    for first in (1000, 2000, 3000, 4000):
        asked = request(first)
        index = rule.choose(loads, asked)
        loads[index].take(Cached(b"".join(names_of(asked.with_digests().digests)), b""))
    assert [load.num_held for load in loads] == [4, 4]
    where = [rule.choose(loads, request(first)) for first in (1000, 2000, 3000, 4000)]
    assert where == [0, 1, 0, 1]
