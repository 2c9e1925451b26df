"""The application of Ray Serve (deploy/ray), on a Ray of one machine. Ray has an environment of its own, like a client; everything else comes from the
environment of the tests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import setpoint
from setpoint_testing.server_process import (
    PATIENCE_S,
    free_port,
    wait_until,
)

HERE = Path(__file__).parent
REPLICA = "ray::ServeReplica:default:Replica"
LONG_S = 5 * PATIENCE_S
POOL = {"max_total_tokens": "8000"}

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(make_environment: Callable[[str], Path]) -> str:
    """The Python of Ray's environment."""
    try:
        return str(make_environment("ray"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Ray cannot be installed: {error}")


PATHS = [
    str(Path(setpoint.__file__).parents[1]),
    str(HERE.parents[1] / "deploy" / "ray"),
    *(path for path in sys.path if path.endswith("site-packages")),
]
ENVIRON = {
    "PYTHONPATH": os.pathsep.join(PATHS),
    "HF_HUB_OFFLINE": "1",
    # Otherwise Ray would write a token to the user's home, and joining would need the first of these.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill actors if others fill the machine
}


class Cluster:
    """The process of ``ray/cluster.py``, and what it has started."""

    def __init__(self, python: str, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._out = folder / "out.txt"
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [python, str(HERE / "ray" / "cluster.py"), str(port)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRON},
            )
        self._num_answers = 0

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    def ask(self, **command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        self._num_answers += 1
        found: list[str] = []

        def is_answered() -> bool:
            assert self.process.poll() is None, self.output[-3000:]
            found[:] = re.findall(r"^=> (.*)$", self.output, re.MULTILINE)
            return len(found) == self._num_answers

        wait_until(is_answered, timeout_s=LONG_S)
        return json.loads(found[-1])

    def replicas(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(REPLICA):
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in psutil.wait_procs(children, timeout=10)[1]:
            process.kill()


@pytest.fixture(scope="module")
def cluster(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(python, tmp_path_factory.mktemp("ray"))
    try:
        yield started
    finally:
        started.end()


@dataclass
class Count:
    answered: int = 0
    lost: list[str] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, number: int, num_tokens: int, *, stream: bool) -> None:
    """A completion of exactly so many tokens. Raises AssertionError or httpx.HTTPError if it is not
    answered whole."""
    body = {
        "text": f"Story number {number} about",
        "stream": stream,
        "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True},
    }
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    if stream:
        lines = [line for line in response.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        answer = json.loads(lines[-2].removeprefix("data: "))
    else:
        answer = response.json()
    assert answer["meta_info"]["completion_tokens"] == num_tokens


async def load(
    url: str, until: Callable[[], bool], *, width: int, num_tokens: int, stream: bool
) -> Count:
    """Keep so many requests open until it is over, and wait for their answers."""
    count = Count()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        while not until():
            try:
                await ask(client, number, num_tokens, stream=stream)
                count.answered += 1
            except (AssertionError, httpx.HTTPError) as error:
                count.lost.append(repr(error)[:200])

    limits = httpx.Limits(max_connections=width)
    async with httpx.AsyncClient(base_url=url, timeout=LONG_S, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(width)))
    return count


BUILD = """
import json, sys, yaml
from ray.serve.schema import ServeDeploySchema
from setpoint.core.errors import ConfigError
from rayserve.app import app
(application,) = ServeDeploySchema.parse_obj(yaml.safe_load(open(sys.argv[1]))).applications
assert application.import_path == "rayserve.app:app"
app(application.args)
for arguments in json.loads(sys.argv[2]):
    try:
        app(arguments)
    except ConfigError as error:
        print(error)
"""
"""Builds applications, which starts nothing."""


def test_the_file_of_the_guide_builds_and_wrong_arguments_are_refused(python: str) -> None:
    wrong = [
        {"dp_size": 2},
        {"num_cpus": "many"},
        {"router": "best"},
        {"max_totl_tokens": "4k"},
    ]
    file = HERE.parents[1] / "deploy" / "ray" / "serve.yaml"
    done = subprocess.run(
        [python, "-c", BUILD, str(file), json.dumps(wrong)],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
        env={**os.environ, **ENVIRON},
    )
    assert done.returncode == 0, done.stderr
    for line, words in zip(
        done.stdout.splitlines(),
        (
            "A replica does not have the option dp_size",
            "num_cpus must be a number",
            "cache_aware or ray",
            "max_total_tokens",
        ),
        strict=True,
    ):
        assert words in line


def test_a_rolling_update_loses_nothing(cluster: Cluster) -> None:
    """Under load, all replicas are replaced by replicas with another option."""
    settings = {**POOL, "min_replicas": 2, "max_replicas": 2}
    cluster.ask(deploy=settings)
    before = {process.pid for process in cluster.replicas()}
    done: list[object] = []

    async def both() -> tuple[Count, ...]:
        async def update() -> None:
            await asyncio.to_thread(cluster.ask, deploy=settings | {"max_running_requests": 16})
            done.append(True)

        *counts, _ = await asyncio.gather(
            load(cluster.url, lambda: bool(done), width=6, num_tokens=64, stream=True),
            load(cluster.url, lambda: bool(done), width=6, num_tokens=16, stream=False),
            update(),
        )
        return tuple(counts)

    counts = asyncio.run(both())
    print("rolling update:", counts)
    assert all(count.answered and not count.lost for count in counts), counts
    wait_until(lambda: not before & {each.pid for each in cluster.replicas()}, timeout_s=LONG_S)


def test_a_killed_replica_loses_the_streams_that_it_was_sending(cluster: Cluster) -> None:
    """Requests whose answers have not begun are given to another replica."""
    cluster.ask(deploy={**POOL, "min_replicas": 2, "max_replicas": 2})
    done: list[object] = []

    async def kill() -> None:
        await asyncio.sleep(2)
        victim = cluster.replicas()[0]
        victim.kill()
        await asyncio.to_thread(
            wait_until,
            lambda: (
                len([each for each in cluster.replicas() if each.pid != victim.pid]) == 2
                and cluster.ask(replicas={}) == 2
            ),
            timeout_s=LONG_S,
            every_s=0.5,
        )
        done.append(True)

    async def both() -> tuple[Count, Count]:
        streams, whole, _ = await asyncio.gather(
            load(cluster.url, lambda: bool(done), width=8, num_tokens=200, stream=True),
            load(cluster.url, lambda: bool(done), width=8, num_tokens=100, stream=False),
            kill(),
        )
        return streams, whole

    streams, whole = asyncio.run(both())
    print("a killed replica: streams", streams, "whole answers", whole)
    assert whole.answered
    assert whole.lost == []
    assert 0 < len(streams.lost) <= 8  # no request that came later
    assert streams.answered


def test_replicas_come_with_a_queue_and_go_without(cluster: Cluster) -> None:
    cluster.ask(
        deploy={
            **POOL,
            "min_replicas": 1,
            "max_replicas": 2,
            "max_running_requests": 2,
            "upscale_delay_s": 1,
            "downscale_delay_s": 5,
        }
    )
    wait_until(lambda: cluster.ask(replicas={}) == 1, timeout_s=LONG_S, every_s=0.5)
    done: list[object] = []

    async def both() -> Count:
        async def watch() -> None:
            await asyncio.to_thread(
                wait_until,
                lambda: cluster.ask(replicas={}) == 2,
                timeout_s=LONG_S,
                every_s=0.5,
            )
            done.append(True)

        count, _ = await asyncio.gather(
            load(cluster.url, lambda: bool(done), width=16, num_tokens=64, stream=False), watch()
        )
        return count

    count = asyncio.run(both())
    print("autoscaling:", count)
    assert count.answered
    assert count.lost == []
    wait_until(lambda: cluster.ask(replicas={}) == 1, timeout_s=LONG_S, every_s=0.5)


@dataclass
class Share:
    prompt: int = 0
    cached: int = 0

    @property
    def cached_share(self) -> float:
        return self.cached / self.prompt


def cached_share(cluster: Cluster, router: str) -> float:
    """The share of prompt tokens that came from a cache: 12 groups with beginnings of 512 tokens,
    of which a pool holds half, asked in turn."""
    cluster.ask(
        deploy={
            "max_total_tokens": "3800",
            "max_running_requests": 2,
            "min_replicas": 2,
            "max_replicas": 2,
            "router": router,
        }
    )
    share = Share()
    with httpx.Client(base_url=cluster.url, timeout=LONG_S) as client:
        for turn in range(6):
            for group in range(12):
                ids = [(group * 997 + at * 31) % 40_000 + 10 for at in range(512)]
                body = {
                    "input_ids": [*ids, *range(turn * 16 + 10, turn * 16 + 26)],
                    "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                }
                response = client.post("/generate", json=body)
                assert response.status_code == 200, response.text
                info = response.json()["meta_info"]
                share.prompt += info["prompt_tokens"]
                share.cached += info["cached_tokens"]
    return share.cached_share


def test_the_router_finds_what_is_cached(cluster: Cluster) -> None:
    """With Ray's own router, a group is in a cache only by chance: the 12 groups in turn drive each
    other out of both."""
    ours, rays = cached_share(cluster, "cache_aware"), cached_share(cluster, "ray")
    print(f"cached share: {ours:.3f}, with Ray's router {rays:.3f}")
    assert ours > 1.6 * rays
