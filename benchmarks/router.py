"""smg in front of Setpoint servers: its policies against each other, and servers that leave and
join while requests run.

    .venv/bin/pip install -e '.[route]'
    python benchmarks/router.py [--parts policies,leave,join] [--policies round_robin,cache_aware]

"policies": two servers, requests of groups in random order; a group's requests begin with the same
letters, and a server's pool holds half of the groups. Reported are the share of prompt tokens that
came from a cache, and the wall time. "leave": two servers, of which one is killed (SIGKILL) or
asked to end (SIGTERM) under load, with smg's retries and without. "join": a second server is added
while the first one serves. Reported is how the requests ended. smg has the arguments that
``setpoint route`` gives it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import string
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from contenders import HttpServer, SetpointServer, free_port
from machine import environment

from setpoint.commands.route_command import ALWAYS
from setpoint.core.excerpt import excerpt

POLICIES = "round_robin,random,power_of_two,least_load,prefix_hash,consistent_hashing,cache_aware"
NUM_GROUPS = 16
PREFIX_TOKENS = 512
OWN_TOKENS = 32
OUTPUT_TOKENS = 16
LONG_OUTPUT_TOKENS = 64
"""Output tokens of the requests during which a server leaves or joins."""
SLACK = 1.15
"""The pool is so much larger than half the groups: requests that run need room of their own."""


@dataclass(slots=True)
class Tally:
    """How requests ended."""

    ends: Counter[str] = field(default_factory=Counter)
    num_prompt: int = 0
    num_cached: int = 0
    wall_s: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{count} {how}" for how, count in sorted(self.ends.items()))


class Fleet:
    """Servers and the router in front of them; ended together."""

    def __init__(self, server_options: list[str]) -> None:
        self._options = server_options
        self.servers: list[SetpointServer] = []
        self.router: HttpServer | None = None

    async def add(self) -> SetpointServer:
        server = SetpointServer("server", self._options, environment={}, stream=False)
        self.servers.append(server)
        await server.ready()
        return server

    async def route(self, policy: str, *extra: str) -> str:
        """Start the router; returns its URL once it knows the servers."""
        port = free_port()
        command = [sys.executable, "-c", "import sys; from smg.cli import main; main(sys.argv[1:])"]
        command += ["launch", "--worker-urls", *(each.url for each in self.servers)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--policy", policy]
        command += ["--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1"]
        self.router = HttpServer("smg", [*command, *ALWAYS, *extra], port=port, environment={})
        await self.router.ready()
        await self.knows(len(self.servers))
        return self.router.url

    async def knows(self, count: int) -> None:
        """Wait until the router sends requests to so many servers."""
        assert self.router is not None
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                async with session.get(f"{self.router.url}/workers") as response:
                    workers = (await response.json())["workers"]
                if sum(bool(each.get("is_healthy", True)) for each in workers) == count:
                    return
                await asyncio.sleep(0.1)
        raise RuntimeError(f"smg does not know {count} servers: {workers}")

    def close(self) -> None:
        for each in (self.router, *self.servers):
            if each is not None:
                each.close()


@contextmanager
def fleet(options: list[str]) -> Any:
    found = Fleet(options)
    try:
        yield found
    finally:
        found.close()


def prompts_of(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)

    def letters(num: int) -> str:
        return " ".join(rng.choice(string.ascii_uppercase) for _ in range(num))

    groups = [letters(PREFIX_TOKENS) for _ in range(NUM_GROUPS)]
    return [f"{rng.choice(groups)} {letters(OWN_TOKENS)}" for _ in range(count)]


async def load(
    url: str,
    prompts: list[str],
    *,
    concurrency: int,
    output_tokens: int,
    stream: bool = False,
    after: Callable[[int], None] = lambda done: None,
) -> Tally:
    """Send all prompts. after: called with the number of requests that have ended."""
    waiting, tally = list(reversed(prompts)), Tally()
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def work() -> None:
            while waiting:
                sampling = {"max_new_tokens": output_tokens, "ignore_eos": True}
                body = {"text": waiting.pop(), "sampling_params": sampling, "stream": stream}
                tally.ends[await ask(session, url, body, tally)] += 1
                after(tally.ends.total())

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        tally.wall_s = time.perf_counter() - started
    return tally


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], tally: Tally) -> str:
    """How the request ended."""
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                return f"refused {response.status}"
            if body["stream"]:
                events = (await response.text()).split("\n\n")
                if "data: [DONE]" not in events:
                    return "cut off"
                last = json.loads(events[-3].removeprefix("data: "))
                if "meta_info" not in last:
                    return f"ended with an error event ({excerpt(str(last))})"
                meta = last["meta_info"]
            else:
                meta = (await response.json())["meta_info"]
    except aiohttp.ClientError as error:
        return f"cut off ({type(error).__name__})" if body["stream"] else type(error).__name__
    if meta["completion_tokens"] != body["sampling_params"]["max_new_tokens"]:
        return "answered in part"
    tally.num_prompt += meta["prompt_tokens"]
    tally.num_cached += meta["cached_tokens"]
    return "answered"


def server_options(groups_held: float, *, more: tuple[str, ...] = ()) -> list[str]:
    tokens = int(SLACK * groups_held * (PREFIX_TOKENS + OWN_TOKENS + OUTPUT_TOKENS))
    return ["--max-total-tokens", str(tokens), "--num-threads", "1", *more]


async def policies(args: argparse.Namespace) -> None:
    names = args.policies.split(",")
    found: dict[str, list[Tally]] = {}
    with fleet(server_options(NUM_GROUPS / 2)) as running:
        await running.add()
        await running.add()
        for repetition in range(args.repeat):
            for number, name in enumerate(names):
                # Other groups each time, so that nothing is cached from before.
                prompts = prompts_of(args.requests, 100 * repetition + number)
                url = await running.route(name)
                tally = await load(
                    url, prompts, concurrency=args.concurrency, output_tokens=OUTPUT_TOKENS
                )
                running.router.close()
                running.router = None
                found.setdefault(name, []).append(tally)
                share = tally.num_cached / max(tally.num_prompt, 1)
                print(f"{name:20} cached {share:.3f}, {tally.wall_s:.1f} s; {tally}", flush=True)
    for name in names[1:]:
        shares, walls = (
            [
                [each.num_cached / each.num_prompt for each in found[one]]
                for one in (name, names[0])
            ],
            [[each.wall_s for each in found[one]] for one in (names[0], name)],
        )
        share = statistics.median(shares[0]) / statistics.median(shares[1])
        speed = statistics.median(walls[0]) / statistics.median(walls[1])
        print(f"{name} / {names[0]}: cached {share:.2f}, speed {speed:.2f}")


async def leave(args: argparse.Namespace) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        for extra in ((), ("--disable-retries",)):
            for stream in (False, True):
                with fleet(server_options(2 * NUM_GROUPS)) as running:
                    first = await running.add()
                    await running.add()
                    url = await running.route("round_robin", *extra)

                    def after(done: int, number: int = number, first: HttpServer = first) -> None:
                        if done == args.requests // 4:
                            first._process.send_signal(number)

                    tally = await load(
                        url,
                        prompts_of(args.requests, 7),
                        concurrency=args.concurrency,
                        output_tokens=LONG_OUTPUT_TOKENS,
                        stream=stream,
                        after=after,
                    )
                how = "streams" if stream else "whole answers"
                retries = "without retries" if extra else "with retries"
                print(f"{number.name}, {how}, {retries}: {tally}", flush=True)


async def join(args: argparse.Namespace) -> None:
    with fleet(server_options(2 * NUM_GROUPS)) as running:
        await running.add()
        url = await running.route("round_robin")
        sending = asyncio.create_task(
            load(
                url,
                prompts_of(args.requests, 8),
                concurrency=args.concurrency,
                output_tokens=LONG_OUTPUT_TOKENS,
            )
        )
        second = await running.add()
        started = time.perf_counter()
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/workers", json={"url": second.url}) as response:
                status = response.status
            await running.knows(2)
            known_s = time.perf_counter() - started
            tally = await sending
            async with session.get(f"{second.url}/server_info") as response:
                requests = (await response.json())["requests"]
    print(
        f"a server joins: POST /workers answers {status}, known after {known_s:.1f} s; {tally};"
        f" {requests['num_sequences']} of them by the new server"
    )


PARTS = {"policies": policies, "leave": leave, "join": join}


async def measure(args: argparse.Namespace) -> None:
    print(f"# {environment()}; {args.requests} requests, {args.concurrency} at once", flush=True)
    for part in args.parts.split(","):
        await PARTS[part](args)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
