"""What the KV cache's bookkeeping costs: time to match and insert long prompts, to evict, and
memory per cached token.

    python benchmarks/cache.py

Aims: match or insert of a 32k-token prompt <= 1 ms; <= 24 bytes per cached token at page size 1
with edges of 32 tokens.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from machine import environment

from setpoint.core.request import Ids
from setpoint.scheduler.cache.evict import POLICIES
from setpoint.scheduler.cache.manager import KVCache

PROMPT_TOKENS = 32_768
PAGE_SIZES = (1, 16, 64)
ROUNDS = 30
EDGE_TOKENS = 32


def _median_us(operation: Callable[[int], object]) -> float:
    """The median time of ROUNDS calls; ``operation`` gets the number of the round."""
    times = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        operation(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure_times(page_size: int) -> dict[str, float]:
    """Microseconds per operation on prompts of PROMPT_TOKENS tokens, in a tree with ROUNDS of
    them."""
    rng = np.random.default_rng(0)
    num_pages = PROMPT_TOKENS // page_size
    cache = KVCache(num_pages=num_pages * ROUNDS, page_size=page_size)
    prompts = [rng.integers(0, 128_000, PROMPT_TOKENS, dtype=np.int32) for _ in range(ROUNDS)]
    pages = [_alloc(cache, num_pages) for _ in range(ROUNDS)]
    handles = [cache.match(prompt) for prompt in prompts]
    # Half of every prompt cached, half new: what a request with a shared context asks for.
    half = PROMPT_TOKENS // 2
    branches = [
        np.concatenate([prompt[:half], rng.integers(0, 128_000, half, dtype=np.int32)])
        for prompt in prompts
    ]
    return {
        "insert": _median_us(lambda i: cache.extend(handles[i], prompts[i], pages[i])),
        "peek": _median_us(lambda i: cache.peek(prompts[i])),
        "match": _median_us(lambda i: cache.match(prompts[i]).release()),
        "match + split": _median_us(lambda i: cache.match(branches[i]).release()),
        "pages of a handle": _median_us(lambda i: handles[i].pages()),
        "alloc 1 page": _median_alloc_us(page_size, num_free=ROUNDS),
        **{
            f"alloc 1 page, evicting, {policy}": _median_alloc_us(
                page_size, num_free=0, policy=policy
            )
            for policy in POLICIES
        },
    }


def _median_alloc_us(page_size: int, *, num_free: int, policy: str = "lru") -> float:
    """The median time to allocate one page, as decoding does, from a pool that 4,096 leaves of one
    page fill except for ``num_free`` pages."""
    cache = KVCache(
        num_pages=4096 + num_free,
        page_size=page_size,
        eviction_policy=policy,
        eviction_parameters=(
            {"threshold": 2 * page_size, "next_prompt_estimate": 0} if policy == "tlru" else {}
        ),
    )
    for number in range(4096):
        with cache.match(np.zeros(0, np.int32)) as handle:
            cache.extend(handle, np.full(page_size, number, np.int32), _alloc(cache, 1))
    return _median_us(lambda _: cache.alloc(1))


def _alloc(cache: KVCache, num_pages: int) -> Ids:
    pages = cache.alloc(num_pages)
    assert pages is not None
    return pages


def measure_bytes_per_token(page_size: int, edge_tokens: int, branching: int) -> float:
    """Python-side bytes per cached token (tracemalloc: objects and buffers) of a tree whose edges
    all hold ``edge_tokens``.

    Every inner node has ``branching`` children; the pool's own arrays are counted, at one page in
    use per page in the pool.
    """
    depth = 1 + int(np.log(4_000) / np.log(branching))
    num_nodes = (branching**depth - 1) // (branching - 1)
    gc.collect()
    tracemalloc.start()
    cache = KVCache(num_pages=num_nodes * edge_tokens // page_size, page_size=page_size)
    for leaf in range(branching ** (depth - 1)):
        path = [leaf // branching**height for height in reversed(range(depth))]
        # The tokens of an edge depend on its place in the tree, so that every leaf shares the edges
        # of its ancestors.
        ids = np.concatenate(
            [
                np.random.default_rng([height, number]).integers(
                    0, 128_000, edge_tokens, dtype=np.int32
                )
                for height, number in enumerate(path)
            ]
        )
        with cache.match(ids) as handle:
            for end in range(handle.num_tokens + edge_tokens, len(ids) + 1, edge_tokens):
                own = _alloc(cache, edge_tokens // page_size)
                table = np.concatenate([handle.pages(), own])
                cache.extend(handle, ids[:end], table)
    del ids, path, handle, own, table
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cache.evictable_tokens == num_nodes * edge_tokens
    return used / cache.evictable_tokens


def print_tables() -> None:
    columns = [measure_times(page_size) for page_size in PAGE_SIZES]
    print(
        f"{f'median µs, {PROMPT_TOKENS} tokens per prompt':<52} | "
        + " | ".join(f"page size {size:>2}" for size in PAGE_SIZES)
    )
    for name in columns[0]:
        print(f"{name:<52} | " + " | ".join(f"{column[name]:>12.1f}" for column in columns))
    print(f"\n{'bytes per cached token, page size 1':<52} |")
    for edge, branching in (
        (EDGE_TOKENS, 2),
        (EDGE_TOKENS, 8),
        (8 * EDGE_TOKENS, 2),
        (64 * EDGE_TOKENS, 2),
    ):
        row = f"edges of {edge} tokens, {branching} children per inner node"
        print(f"{row:<52} | {measure_bytes_per_token(1, edge, branching):>12.1f}")


if __name__ == "__main__":
    print(environment("numpy") + "\n")
    print_tables()
