"""What a subscriber to KV events believes is what the radix tree holds, after any calls."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from setpoint.core.messages import Blocks, ToFrontend, decode_to_frontend, encode
from setpoint.core.pagerows import PageRow, WindowColumns
from setpoint.core.prefix_digest import first_digest
from setpoint.scheduler.cache.block_news import BlockNews
from setpoint.scheduler.cache.manager import KVCache
from setpoint_testing.harness import VOCAB, Harness, Wire
from setpoint_testing.kv_subscriber import EVENTS, Subscriber, blocks_of

ROWS = (
    PageRow(1, (WindowColumns(5, 1, 2),), read_step=1),
    PageRow(0, (WindowColumns(7, 0, 1),), read_step=1),
)
"""The page rows of models with windows."""


def hear(cache: KVCache, subscriber: Subscriber) -> None:
    for news in cache.take_news():
        assert isinstance(news, Blocks)
        take(news, subscriber)


def take(news: Blocks, subscriber: Subscriber) -> None:
    received = decode_to_frontend(encode(news))
    assert isinstance(received, Blocks)
    subscriber.take(EVENTS.decode(received.events))


def check(cache: KVCache, subscriber: Subscriber) -> None:
    """Names, tokens and the blocks before."""
    assert subscriber.blocks == blocks_of(cache._tree, cache.page_size, first_digest)


def run(seed: int, page_size: int, seen: Counter[str]) -> None:
    rng = random.Random(seed)
    cache = KVCache(num_pages=60, page_size=page_size)
    cache.listen(BlockNews(page_size))
    subscriber, handles = Subscriber(), []
    for _ in range(60):
        namespace = rng.choice(["", "", "other"])
        pages = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        ids = np.repeat(np.array(pages, np.int32), page_size)
        match rng.choices(["add", "release", "flush", "reset"], [10, 8, 1, 0.3])[0]:
            case "add":
                handle = cache.match(ids, namespace)
                found = cache.alloc((len(ids) - handle.num_tokens) // page_size)
                if found is None:
                    handle.release()
                    continue
                whole = np.concatenate([handle.pages(), found])
                cache.free(cache.extend(handle, ids, whole))
                handles.append(handle)
            case "release" if handles:
                handles.pop(rng.randrange(len(handles))).release()
            case "flush":
                cache.flush()
            case "reset":
                for handle in handles:
                    handle.release()
                handles.clear()
                cache.reset()
        if rng.random() < 0.7:  # several changes in one batch, too
            hear(cache, subscriber)
            check(cache, subscriber)
    seen.update(subscriber.seen)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_events_add_up_to_the_cache(page_size: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        run(seed, page_size, seen)
    assert min(seen[name] for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared")) > 30, (
        seen
    )


class EventWire(Wire):
    """Passes events on to a subscriber."""

    def __init__(self) -> None:
        super().__init__()
        self.subscriber = Subscriber()

    def send(self, message: ToFrontend) -> None:
        if isinstance(message, Blocks):
            take(message, self.subscriber)
        super().send(message)


def trace(seed: int, page_size: int, row: PageRow | None, seen: Counter[str]) -> None:
    """Random requests through the scheduler and its loop."""
    rng = random.Random(seed)
    num_pages = max(12, 48 // page_size) * (1 if row is None else row.width)
    wire = EventWire()
    harness = Harness(
        wire=wire,
        num_pages=num_pages,
        page_size=page_size,
        row=row,
        depth=rng.choice([0, 1, 2]),
        chunked_prefill_size=rng.choice([None, 16]),
        max_running_requests=5,
        conservativeness=0.05,
        test_retract_interval=rng.choice([0, 5]),
    )
    harness.cache.listen(BlockNews(page_size))
    longest = min(harness.config.max_req_input_len - 1, 60)
    prefixes = [[rng.randrange(VOCAB) for _ in range(longest // 2)] for _ in range(2)]
    for number in range(16):
        prompt = [*rng.choice(prefixes), *(rng.randrange(3) for _ in range(rng.randrange(1, 9)))]
        harness.submit(f"r{number}", prompt[:longest], max_new_tokens=rng.choice([1, 8, 30]))
        for _ in range(rng.choice([0, 1, 5])):
            harness.turn()
            check(harness.cache, wire.subscriber)
    for _ in range(300):
        harness.turn()
        check(harness.cache, wire.subscriber)
    assert harness.scheduler.state.is_idle
    harness.cache.flush()
    hear(harness.cache, wire.subscriber)
    check(harness.cache, wire.subscriber)
    assert row is not None or not wire.subscriber.blocks
    seen.update(wire.subscriber.seen)
    seen["retractions"] += len(harness.recorder.retractions)
    seen["hits"] += sum(each.num_cached > 0 for each in harness.outcomes.values())


@pytest.mark.cases(2)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("row", [None, *ROWS])
def test_events_of_a_scheduler_that_retracts(page_size: int, row: PageRow | None) -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        trace(seed, page_size, row, seen)
    assert min(seen[name] for name in ("BlockStored", "BlockRemoved", "retractions", "hits")) > 3, (
        seen
    )
