"""What the frontend believes of an engine's cache is what the cache holds, after any calls."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from setpoint.core.messages import Cached, decode_to_frontend, encode
from setpoint.core.prefix_digest import grown, names_of
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.ipc import balance
from setpoint.ipc.balance import CacheAware, EngineLoad
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.cache.news import CacheNews

BLOCK = 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens, so that short sequences have many."""
    monkeypatch.setitem(grown.__kwdefaults__, "block", BLOCK)
    monkeypatch.setattr(balance, "BLOCK_TOKENS", BLOCK)


def request_of(ids: list[int], namespace: str = "") -> Request:
    options = Request(rid="r", prompt_ids=b"", sampling=SamplingParams(), seed=0).options
    return Request(
        rid="r",
        prompt_ids=pack_ids(ids),
        sampling=SamplingParams(),
        seed=0,
        options=type(options)(namespace=namespace),
    )


def run(seed: int, seen: Counter[str]) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 1, 2, 4, 3, 8])
    cache = KVCache(num_pages=60 // page_size + 4, page_size=page_size)
    cache.listen(CacheNews(BLOCK))
    load, handles = EngineLoad(0, keeps_prefixes=True), []
    for _ in range(60):
        namespace = rng.choice(["", "", "other"])
        ids = np.array([rng.randrange(2) for _ in range(rng.randrange(1, 24))], dtype=np.int32)
        match rng.choices(["add", "release", "flush", "reset", "tell"], [10, 8, 1, 0.3, 6])[0]:
            case "add":
                ids = ids[: len(ids) // page_size * page_size]
                handle = cache.match(ids, namespace)
                pages = cache.alloc((len(ids) - handle.num_tokens) // page_size)
                if pages is None:
                    handle.release()
                    continue
                whole = np.concatenate([handle.pages(), pages])
                private = cache.extend(handle, ids, whole)
                cache.free(private)
                handles.append(handle)
                seen["added"] += 1
            case "release" if handles:
                handles.pop(rng.randrange(len(handles))).release()
            case "flush":
                cache.flush()
            case "reset":
                for handle in handles:
                    handle.release()
                handles.clear()
                cache.reset()
            case _:
                for news in cache.take_news():
                    assert isinstance(news, Cached)
                    load.take(decode_to_frontend(encode(news)))  # type: ignore[arg-type]
                    seen["told"] += 1
                    seen["removed"] += len(news.removed) > 0
                    seen["cleared"] += news.is_cleared
                prompt = [int(each) for each in ids]
                held = cache._tree.match_len(ids, namespace)
                names = names_of(grown(b"", pack_ids(prompt), namespace))
                believed = load.num_cached(names)
                if BLOCK % page_size == 0:
                    assert believed == held // BLOCK * BLOCK, (seed, page_size)
                else:  # two pages may begin with one block
                    assert believed < held + page_size, (seed, page_size)
                seen["matched"] += held >= BLOCK


def test_news_add_up_to_the_cache() -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        run(seed, seen)
    assert min(seen[name] for name in ("added", "told", "removed", "cleared", "matched")) > 50, seen


def test_requests_with_one_beginning_stay_together_until_that_costs_more() -> None:
    aware, loads = CacheAware(), [EngineLoad(rank, keeps_prefixes=True) for rank in range(2)]
    start = list(range(100, 100 + 50 * BLOCK))
    chosen = []
    for number in range(20):
        request = request_of([*start, number])
        index = aware.choose(loads, request)
        loads[index].add(request)
        chosen.append(index)
    first = chosen.index(1)
    assert first == -(-50 * BLOCK // balance.REQUEST_TOKENS)
    assert abs(chosen.count(0) - chosen.count(1)) <= first
    other = request_of(start, "another namespace")
    assert aware.choose(loads, other) == int(loads[1].num_requests < loads[0].num_requests)


def test_what_open_requests_bring_is_forgotten_with_them() -> None:
    load, request = EngineLoad(0, keeps_prefixes=True), request_of(list(range(5 * BLOCK)))
    names = names_of(grown(b"", request.prompt_ids, ""))
    load.add(request)
    assert load.num_cached(names) == 5 * BLOCK
    load.remove(request)
    assert load.num_cached(names) == 0
    assert not load._coming
