"""``--kv-events-config``: what a router learns of the caches of a server with two engines, also when
one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from setpoint_testing.kv_subscriber import BATCH, Subscriber
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    free_port,
    free_ports,
    running_server,
    wait_until,
)

PAGE = 4
LINES = ("--dtype", "float32", "--num-threads", "1", "--page-size", str(PAGE))


class Router:
    """Subscribes to one rank. What came before it asks for again."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], events: int, replay: int) -> None:
        self.live = context.socket(zmq.SUB)
        self.live.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.live.connect(f"tcp://127.0.0.1:{events}")
        self.again = context.socket(zmq.DEALER)
        self.again.connect(f"tcp://127.0.0.1:{replay}")
        self.believed = Subscriber()
        self.next_number = 0
        self.ranks: set[int | None] = set()

    def close(self) -> None:
        self.live.close(linger=0)
        self.again.close(linger=0)

    def hears(self) -> bool:
        """Whether its subscription has arrived: a batch was heard live."""
        return bool(self.live.poll(100))

    def catch_up(self) -> None:
        self.again.send_multipart((b"", self.next_number.to_bytes(8, "big")))
        while True:
            assert self.again.poll(1000 * PATIENCE_S)
            _, _, number, payload = self.again.recv_multipart()
            if not payload:
                return
            self.take(number, payload)

    def listen(self) -> None:
        while self.live.poll(0):
            _, number, payload = self.live.recv_multipart()
            self.take(number, payload)

    def take(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") < self.next_number:
            return
        assert int.from_bytes(number, "big") == self.next_number, "there is a gap"
        self.next_number += 1
        batch = BATCH.decode(payload)
        self.ranks.add(batch.attn_dp_rank)
        self.believed.take(batch.events)

    def num_cached(self, ids: list[int]) -> int:
        """Tokens of a prompt that are cached, found from the beginning as a router would."""
        self.listen()
        known = {(parent, tokens): name for name, (parent, tokens) in self.believed.blocks.items()}
        parent, length = None, 0
        while (name := known.get((parent, tuple(ids[length : length + PAGE])))) is not None:
            parent, length = name, length + PAGE
        return length

    def holds(self, ids: list[int]) -> bool:
        return self.num_cached(ids) == len(ids) // PAGE * PAGE


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    base = free_ports(4)
    return base, base + 2


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, ports: tuple[int, int]
) -> Iterator[ServerProcess]:
    config = {
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{ports[0]}",
        "bind": True,
        "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
        "topic": "kv",
    }
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), *LINES, "--dp-size", "2", "--enable-metrics"),
        *("--kv-events-config", json.dumps(config)),
    ) as server:
        yield server


@pytest.fixture
def routers(server: ServerProcess, ports: tuple[int, int]) -> Iterator[list[Router]]:
    with zmq.Context() as context:
        found = [Router(context, ports[0] + rank, ports[1] + rank) for rank in range(2)]
        for rank, each in enumerate(found):
            for first in count(50):  # what is published before a subscription arrives is not heard
                generate(server, [first] * (2 * PAGE), rank)
                if each.hears():
                    break
            each.catch_up()
        yield found
        for each in found:
            each.close()


def generate(server: ServerProcess, ids: list[int], rank: int) -> Any:
    sampling = {"max_new_tokens": 1, "ignore_eos": True}
    return server.generate(input_ids=ids, sampling_params=sampling, routed_dp_rank=rank)[
        "meta_info"
    ]


@pytest.mark.full
def test_a_router_knows_what_each_engine_has(server: ServerProcess, routers: list[Router]) -> None:
    for rank, start in ((0, 10), (1, 20), (1, 10)):
        ids = [start] * 22
        generate(server, ids, rank)
        wait_until(partial(routers[rank].holds, ids))
        assert generate(server, ids, rank)["cached_tokens"] == 20
    assert routers[0].num_cached([20] * 22) == 0
    assert [each.ranks for each in routers] == [{0}, {1}]
    assert httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE_S).status_code == 200
    wait_until(lambda: not any(each.num_cached([10] * 22) for each in routers))
    assert not routers[0].believed.blocks
    assert not routers[1].believed.blocks


def test_an_engine_that_dies_has_nothing_any_more(
    server: ServerProcess, routers: list[Router]
) -> None:
    ids = [30] * 22
    for rank, router in enumerate(routers):
        generate(server, ids, rank)
        wait_until(partial(router.holds, ids))
    shown = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()["ranks"]
    os.kill(shown[0]["pid"], signal.SIGKILL)
    wait_until(lambda: not routers[0].num_cached(ids))
    assert not routers[0].believed.blocks
    assert routers[1].num_cached(ids) == 20
    wait_until(lambda: "Engine 0 is ready again" in server.errors)
    assert generate(server, ids, 0)["cached_tokens"] == 0
    wait_until(partial(routers[0].holds, ids))  # and the numbers had no gap


def test_the_server_says_where_and_how_much(
    server: ServerProcess, routers: list[Router], ports: tuple[int, int]
) -> None:
    shown = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()["kv_events"]
    assert shown == {
        "publisher": "zmq",
        "endpoint_host": "127.0.0.1",
        "endpoint_port_base": ports[0],
        "topic": "kv",
        "block_size": PAGE,
        "dp_size": 2,
        "replay_endpoint_port_base": ports[1],
    }
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    samples = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
    for each in routers:
        each.listen()
    published = float(samples["setpoint:kv_event_batches_total"])
    assert published == sum(each.next_number for each in routers)
    assert float(samples["setpoint:kv_event_overruns_total"]) == 0
    assert "everybody who can connect can read them" in server.errors


def test_a_port_in_use_ends_the_start_at_once(tiny_model: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "bind": True}
        command = [sys.executable, "-m", "setpoint.cli", "serve", "--port", str(free_port())]
        command += ["--model-path", str(tiny_model), "--kv-events-config", json.dumps(config)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith(
        f"--kv-events-config: endpoint cannot bind to tcp://127.0.0.1:{port}: address already in"
        " use. Name another port."
    )


def test_the_program_of_the_page_reads_them(
    server: ServerProcess, ports: tuple[int, int], tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs/routing.md").read_text()
    (program,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "zmq" in each)
    for mine, given in zip(ports, (5557, 5657), strict=True):
        program = program.replace(f":{given}", f":{mine}")

    def generate(first: int) -> None:
        ids = [first, *range(40, 40 + 2 * PAGE)]
        server.generate(input_ids=ids, sampling_params={"max_new_tokens": 1}, routed_dp_rank=0)

    def num_stored() -> int:
        return printed.read_text().count(" 0 BlockStored ")

    generate(30)
    printed = tmp_path / "printed"
    with printed.open("w") as output:
        reader = subprocess.Popen([sys.executable, "-c", program], stdout=output)
    try:
        wait_until(num_stored)
        before = num_stored()
        generate(31)
        wait_until(lambda: num_stored() > before)
        assert reader.poll() is None
    finally:
        reader.kill()
        reader.wait()
