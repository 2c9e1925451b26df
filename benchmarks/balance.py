"""Which engine gets a request: the methods of --load-balance-method against each other.

    python benchmarks/balance.py [--methods round_robin,cache_aware] [--dp-size 2] [--repeat 3]

Two traffics over the default model, each with servers that start anew for every method, in turns.
"groups": requests of 32 groups, in random order; a group's requests begin with the same 512 tokens,
and an engine's pool holds half of the groups. "skewed": four of five requests are of one group, and
the pools hold all of them. Reported are the share of prompt tokens that came from a cache, and the
wall time; the last lines compare medians with the first method.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass

import aiohttp
from contenders import SetpointServer
from machine import environment

NUM_GROUPS = 32
PREFIX_TOKENS = 512
OWN_TOKENS = 32
OUTPUT_TOKENS = 16
SLACK = 1.1
"""The pool is so much larger than half the groups: requests that run need room of their own."""


@dataclass(frozen=True)
class Result:
    cached_share: float
    wall_s: float


def prompts_of(traffic: str, count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    groups = [[rng.randrange(1000, 40000) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_GROUPS)]
    chosen = [
        0 if traffic == "skewed" and rng.random() < 0.8 else rng.randrange(NUM_GROUPS)
        for _ in range(count)
    ]
    return [
        groups[group] + [rng.randrange(1000, 40000) for _ in range(OWN_TOKENS)] for group in chosen
    ]


async def run(url: str, prompts: list[list[int]], concurrency: int) -> Result:
    waiting, num_prompt, num_cached = list(reversed(prompts)), 0, 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def work() -> None:
            nonlocal num_prompt, num_cached
            while waiting:
                body = {
                    "input_ids": waiting.pop(),
                    "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True},
                }
                async with session.post(f"{url}/generate", json=body) as response:
                    assert response.status == 200, await response.text()
                    meta = (await response.json())["meta_info"]
                num_prompt += meta["prompt_tokens"]
                num_cached += meta["cached_tokens"]

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return Result(num_cached / num_prompt, time.perf_counter() - started)


async def measure(args: argparse.Namespace) -> None:
    methods = args.methods.split(",")
    found: dict[tuple[str, str], list[Result]] = {}
    for repetition in range(args.repeat):
        for traffic in ("groups", "skewed"):
            prompts = prompts_of(traffic, args.requests, repetition)
            groups_held = NUM_GROUPS / 2 if traffic == "groups" else 4 * NUM_GROUPS
            pool = int(SLACK * groups_held * (PREFIX_TOKENS + OWN_TOKENS + OUTPUT_TOKENS))
            for method in methods:
                options = ["--dp-size", str(args.dp_size), "--load-balance-method", method]
                server = SetpointServer(
                    method,
                    [*options, "--max-total-tokens", str(pool)],
                    environment={},
                    stream=False,
                )
                try:
                    await server.ready()
                    result = await run(server.url, prompts, args.concurrency)
                finally:
                    server.close()
                found.setdefault((traffic, method), []).append(result)
                print(
                    f"{traffic:8} {method:16} cached {result.cached_share:.3f},"
                    f" {result.wall_s:.1f} s",
                    flush=True,
                )
    print(f"# {environment()}; {args.requests} requests, {args.concurrency} at once")
    for traffic in ("groups", "skewed"):
        base = found[traffic, methods[0]]
        for method in methods[1:]:
            other = found[traffic, method]
            share = statistics.median(each.cached_share for each in other) / max(
                statistics.median(each.cached_share for each in base), 1e-9
            )
            speed = statistics.median(each.wall_s for each in base) / statistics.median(
                each.wall_s for each in other
            )
            print(f"{traffic}: {method} / {methods[0]}: cached {share:.2f}, speed {speed:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="round_robin,total_requests,cache_aware")
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=8)
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
