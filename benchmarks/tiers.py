"""What a prefix cache in files brings and costs (docs/decisions/0073-cache-tiers.md):

    file      a prompt of 1,024 tokens whose prefix is in files, against computing it: with the
              files in the page cache (aim: 10 times faster), and with none of them there (3 times)
    restart   the second turn of 64 conversations after kill -9: share of hits (aim: 95 %), time to
              first token (aim: half)
    small     200 conversations of 6 turns over a pool of half of their tokens: throughput
    fresh     traffic without reuse: what saving costs (aim: at most 2 %)
    slow      traffic without reuse over a storage that takes 0.1 s for each block: when the server
              stops saving, and what it saves after that

    python benchmarks/tiers.py [--only file,restart] [--model FOLDER] [--folder FOLDER] [--quick]

Every pair is measured in this run, on servers that differ in the tier alone. The folder is emptied
before each scene; it decides which disk is measured. Each scene takes at most ten minutes on two
cores. --quick shows in a minute or two that the scenes work: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from machine import environment

from setpoint_testing.server_process import ServerProcess, running_server, wait_until

WORDS = range(1000, 40000)
SLOW_STORE = """
import time
from setpoint.tiers.memory_store import MemoryStore

class SlowStore(MemoryStore):
    def __init__(self):
        super().__init__(1 << 30)

    def put(self, key, data):
        time.sleep(0.1)
        return super().put(key, data)
"""


@contextmanager
def server(
    arguments: argparse.Namespace,
    *more: str,
    tier: bool = True,
    backend: str = "file",
    extra: dict[str, str] | None = None,
) -> Iterator[ServerProcess]:
    options = ["--enable-metrics", *more]
    if arguments.model:
        options += ["--model-path", arguments.model]
    if tier:
        settings = json.dumps(extra or {"path": str(arguments.folder / "cache")})
        options += ["--enable-hierarchical-cache", "--hicache-storage-backend", backend]
        options += ["--hicache-storage-backend-extra-config", settings]
    with running_server(Path(tempfile.mkdtemp()), *options) as found:
        time.sleep(2.0)  # it finds out which weights it has
        yield found


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.choice(WORDS) for _ in range(count)]


async def ask(
    session: aiohttp.ClientSession, url: str, ids: list[int], num_new: int
) -> tuple[float, dict[str, Any], list[int]]:
    """(seconds to the first token, meta_info, output ids)."""
    body = {
        "input_ids": ids,
        "stream": True,
        "sampling_params": {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True},
    }
    began, first, last = time.perf_counter(), 0.0, {}
    async with session.post(f"{url}/generate", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                last = json.loads(line[6:])
    return first, last["meta_info"], last["output_ids"]


async def at_once(
    url: str, prompts: list[list[int]], num_new: int, *, width: int
) -> list[tuple[float, dict[str, Any], list[int]]]:
    limit = asyncio.Semaphore(width)
    timeout = aiohttp.ClientTimeout(3600)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 22) as session:

        async def one(ids: list[int]) -> tuple[float, dict[str, Any], list[int]]:
            async with limit:
                return await ask(session, url, ids, num_new)

        return await asyncio.gather(*map(one, prompts))


def kill(each: ServerProcess) -> None:
    wait_until(each.is_idle, timeout_s=120)
    each.process.send_signal(signal.SIGKILL)
    each.wait_end()
    time.sleep(1.0)


def tier_state(each: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = each.state()["tiers"]
    return found


def forget(folder: Path) -> None:
    """Take the folder's files out of the page cache."""
    os.sync()  # what is not on the disk yet stays
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def scene_file(arguments: argparse.Namespace) -> None:
    for cold, aim in ((False, 10), (True, 3)):
        shutil.rmtree(arguments.folder, ignore_errors=True)
        rng = random.Random(1)
        count = 3 if arguments.quick else 12
        prompts = [tokens(rng, 1024 + 8) for _ in range(count)]
        others = [tokens(rng, 1024 + 8) for _ in range(count)]
        with server(arguments) as first:
            asyncio.run(at_once(first.url, prompts, 2, width=1))
            kill(first)
        with server(arguments) as second:
            computed, loaded = [], []
            for other, prompt in zip(others, prompts, strict=True):  # in turns
                computed += asyncio.run(at_once(second.url, [other], 2, width=1))
                wait_until(second.is_idle)  # what that one saves is no part of the next
                if cold:
                    forget(arguments.folder)
                loaded += asyncio.run(at_once(second.url, [prompt], 2, width=1))
        hits = sum(meta["cached_tokens_details"]["storage"] for _, meta, _ in loaded)
        slow = statistics.median(first for first, _, _ in computed)
        fast = statistics.median(first for first, _, _ in loaded)
        print(
            f"file, {'cold' if cold else 'warm'}: {hits / count:.0f} of 1,032 tokens from files;"
            f" first token {1e3 * fast:.0f} ms loaded, {1e3 * slow:.0f} ms computed:"
            f" {slow / fast:.1f} times (aim: {aim})"
        )


def scene_restart(arguments: argparse.Namespace) -> None:
    rng = random.Random(2)
    system = tokens(rng, 400)
    openings = [system + tokens(rng, 600) for _ in range(8 if arguments.quick else 64)]
    results = {}
    for tier in (False, True):
        shutil.rmtree(arguments.folder, ignore_errors=True)
        with server(arguments, tier=tier) as first:
            answers = asyncio.run(at_once(first.url, openings, 16, width=8))
            kill(first)
        seconds = [
            opening + answer[2] + tokens(rng, 60)
            for opening, answer in zip(openings, answers, strict=True)
        ]
        with server(arguments, tier=tier) as second:
            found = asyncio.run(at_once(second.url, seconds, 16, width=8))
        hits = sum(meta["cached_tokens"] for _, meta, _ in found)
        results[tier] = (
            hits / sum(len(opening) + 16 for opening in openings),
            statistics.mean(first for first, _, _ in found),
        )
    print(
        f"restart: {results[True][0]:.1%} of the first turns' tokens hit"
        f" (without {results[False][0]:.1%}); mean time to first token {results[True][1]:.3f} s,"
        f" without {results[False][1]:.3f} s:"
        f" {results[True][1] / results[False][1]:.2f} times (aims: 95 %, 0.5 times)"
    )


def scene_small(arguments: argparse.Namespace) -> None:
    """Turns of all conversations in rounds, so that each comes back when it has been evicted."""
    num, turns, new, answer = 20 if arguments.quick else 200, 6, 80, 16
    pool = num * (200 + turns * (new + answer)) // 2
    speeds = {}
    for tier in (False, True):
        shutil.rmtree(arguments.folder, ignore_errors=True)
        rng = random.Random(3)
        histories = [tokens(rng, 200) for _ in range(num)]
        with server(arguments, "--max-total-tokens", str(pool), tier=tier) as each:
            began, made = time.perf_counter(), 0
            for _ in range(turns):
                found = asyncio.run(at_once(each.url, histories, answer, width=16))
                made += answer * num
                histories = [
                    history + got[2] + tokens(rng, new)
                    for history, got in zip(histories, found, strict=True)
                ]
            speeds[tier] = made / (time.perf_counter() - began)
    print(
        f"small: {num} conversations, pool of {pool} tokens: {speeds[True]:.0f} tokens/s with"
        f" files, {speeds[False]:.0f} without: {speeds[True] / speeds[False]:.2f} times"
    )


def scene_fresh(arguments: argparse.Namespace) -> None:
    """Both servers stand side by side and get the traffic in turns, so that the machine's moods
    hit both."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    rng, rounds = random.Random(4), 4 if arguments.quick else 24
    pool = ("--max-total-tokens", "60000")
    with server(arguments, *pool, tier=False) as plain, server(arguments, *pool) as tiered:
        for _ in range(rounds):
            for tier, each in ((False, plain), (True, tiered)):
                prompts = [tokens(rng, 600) for _ in range(16)]
                began = time.perf_counter()
                asyncio.run(at_once(each.url, prompts, 16, width=8))
                seconds[tier].append(time.perf_counter() - began)
        state = tier_state(tiered)
    ratios = [one / other - 1 for one, other in zip(seconds[True], seconds[False], strict=True)]
    half = rounds // 2
    for name, part in (("first half", slice(half)), ("second half", slice(half, None))):
        cost = sum(seconds[True][part]) / sum(seconds[False][part]) - 1
        print(f"fresh: traffic without reuse takes {cost:+.1%} with files ({name}; aim: 2 %)")
    print(
        f"fresh: median of the pairs {statistics.median(ratios):+.1%}; saving took"
        f" {state['save_s']:.1f} s of threads beside; thrifty: {state['is_thrifty']} (after 20 s)"
    )


def scene_slow(arguments: argparse.Namespace) -> None:
    """A storage so slow that the limit of loss is reached soon."""
    arguments.folder.mkdir(parents=True)
    (arguments.folder / "slow_store.py").write_text(SLOW_STORE)
    rng, seconds = random.Random(5), {}
    extra = {"module_path": "slow_store", "class_name": "SlowStore"}
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{arguments.folder}{os.pathsep}{before}".rstrip(os.pathsep)
    try:
        with (
            server(arguments, tier=False) as plain,
            server(arguments, backend="dynamic", extra=extra) as tiered,
        ):
            began = time.perf_counter()
            while not tier_state(tiered)["is_thrifty"]:
                asyncio.run(at_once(tiered.url, [tokens(rng, 600) for _ in range(8)], 16, width=8))
                if time.perf_counter() - began > 240:
                    print("slow: after 240 s the server still saves everything")
                    return
            until = time.perf_counter() - began
            wait_until(tiered.is_idle, timeout_s=240)
            saved = tier_state(tiered)["saved_tokens"]
            for each in (plain, tiered):
                prompts = [tokens(rng, 600) for _ in range(16 if arguments.quick else 128)]
                began = time.perf_counter()
                asyncio.run(at_once(each.url, prompts, 16, width=8))
                seconds[each] = time.perf_counter() - began
            more = tier_state(tiered)["saved_tokens"] - saved
    finally:
        os.environ["PYTHONPATH"] = before
    print(
        f"slow: thrifty after {until:.0f} s; from then on {more} tokens were saved, and traffic"
        f" without reuse takes {seconds[tiered] / seconds[plain] - 1:+.1%}"
    )


SCENES = {
    "file": scene_file,
    "restart": scene_restart,
    "small": scene_small,
    "fresh": scene_fresh,
    "slow": scene_slow,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--only", default=",".join(SCENES))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tiers-bench")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    print(environment("torch", "lmdb", "xxhash"))
    for name in arguments.only.split(","):
        shutil.rmtree(arguments.folder, ignore_errors=True)
        began = time.perf_counter()
        SCENES[name](arguments)
        print(f"({name}: {time.perf_counter() - began:.0f} s)", flush=True)
    shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
