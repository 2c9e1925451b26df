"""Machines in a network that delays and loses packets or is cut, for tests: network namespaces whose
only way to each other is a relay in this process.

The kernel's own emulation (``tc netem``) is a module that many kernels lack. Needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

DEVICE = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
LONGEST_PACKET = 1 << 16


@dataclass
class Link:
    """What happens to every packet, in either direction; may change at any time."""

    delay_s: float = 0.0
    loss: float = 0.0
    """The share of packets that are lost."""
    is_cut: bool = False
    num_packets: int = 0
    num_lost: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))


@dataclass
class Machine:
    """A namespace with one address."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """The command that runs ``words`` on this machine."""
        return ["ip", "netns", "exec", self.name, *words]

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns that runs in a thread on this machine."""
        with ThreadPoolExecutor(1, initializer=self._enter) as thread:
            return thread.submit(function, *arguments).result()

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.name).open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


def why_no_network() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    if os.geteuid():
        return "needs root"
    try:
        with network():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces cannot be made here: {error}"


@contextmanager
def network(link: Link | None = None) -> Iterator[tuple[Machine, Machine]]:
    """Two machines; their link is a perfect one if not given."""
    with ExitStack() as stack:
        machines, ends = [], []
        for number in (1, 2):
            name = f"setpoint-{os.getpid()}-{number}"
            machine = Machine(name, f"10.77.0.{number}")
            end, device = _tunnel(stack, number)
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "address", "add", f"{machine.address}/24", "dev", device)
            for each in (device, "lo"):
                _ip("-n", name, "link", "set", each, "up")
            machines.append(machine)
            ends.append(end)
        ended = threading.Event()
        relay = threading.Thread(target=_relay, args=(ends, link or Link(), ended), daemon=True)
        relay.start()
        stack.callback(relay.join)
        stack.callback(ended.set)
        yield machines[0], machines[1]


def _tunnel(stack: ExitStack, number: int) -> tuple[int, str]:
    """A device whose packets are read from and written to the descriptor, and its name."""
    end = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    stack.callback(os.close, end)
    name = f"sp{os.getpid()}-{number}"
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return end, name


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _relay(ends: Sequence[int], link: Link, ended: threading.Event) -> None:
    """Carry packets from each end to the other."""
    waiting: list[tuple[float, int, int, bytes]] = []
    """(when it is due, its number, the end that gets it, the packet), a heap."""
    while not ended.is_set():
        until = waiting[0][0] - time.monotonic() if waiting else 0.05
        readable, _, _ = select.select(ends, [], [], max(until, 0))
        now = time.monotonic()
        for end in readable:
            packet = os.read(end, LONGEST_PACKET)
            link.num_packets += 1
            if link.is_cut or link.random.random() < link.loss:
                link.num_lost += 1
                continue
            other = ends[1] if end == ends[0] else ends[0]
            heapq.heappush(waiting, (now + link.delay_s, link.num_packets, other, packet))
        while waiting and waiting[0][0] <= now:
            *_, other, packet = heapq.heappop(waiting)
            try:
                os.write(other, packet)
            except BlockingIOError:
                link.num_lost += 1  # its queue is full, as that of a real device may be
