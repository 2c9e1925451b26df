"""Bodies that once froze the event loop for 8 to 77 s are refused at once, and others are served
meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server, wait_until

JSON = {"content-type": "application/json"}
NOT_FROZEN_S = 2.0
"""Far above the processor time that the server uses while a quiet machine answers /ready (the test
prints it; below 0.1 s), far below what the bodies once took. Processor time does not grow on a busy
machine, as time does."""


class Processor:
    """The processor time that a server's process has used."""

    def __init__(self, server: ServerProcess) -> None:
        self._process = psutil.Process(server.process.pid)

    def seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


Body = Callable[[int], bytes]
"""Makes a body of about so many bytes."""


def filled(head: bytes, item: bytes, tail: bytes) -> Body:
    return lambda size: head + item * ((size - len(head) - len(tail)) // len(item)) + tail


def keys(size: int) -> bytes:
    return (
        b'{"prompt": "a", "max_tokens": 1, "logit_bias": {'
        + b",".join(b'"%d":1' % key for key in range(size // 11))
        + b"}}"
    )


BODIES: dict[str, tuple[str, Body]] = {
    "empty lists in input_ids": ("/generate", filled(b'{"input_ids": [', b"[],", b"[]]}")),
    "empty lists in prompt": ("/v1/completions", filled(b'{"prompt": [', b"[],", b"[]]}")),
    "empty strings to tokenize": ("/tokenize", filled(b'{"prompt": [', b'"",', b'""]}')),
    "keys of logit_bias": ("/v1/completions", keys),
    "messages": (
        "/v1/chat/completions",
        filled(b'{"messages": [', b'{"role":"user","content":"a"},', b"{}]}"),
    ),
    "lists that ask for nothing": (
        "/generate",
        filled(b'{"text": "a", "image_data": [', b"[],", b"1]}"),
    ),
    "numbers with exponents": (
        "/generate",
        filled(b'{"input_ids": [', b"1.7976931348623157e308,", b"1]}"),
    ),
    "ids": ("/generate", filled(b'{"input_ids": [', b"1,", b"1]}")),
    "lists of ids": (
        "/generate",
        filled(b'{"input_ids": [', b"[" + b"1," * 1999 + b"1],", b"[999]]}"),
    ),
    "text": ("/generate", filled(b'{"text": "', b"x", b'"}')),
    "text of quotes": ("/v1/completions", filled(b'{"prompt": "', rb"\"", b'"}')),
}
FIVE = tuple(BODIES)[:5]
CASES = [
    *((name, 60_000_000) for name in FIVE),
    *((name, 4_000_000) for name in BODIES),  # just below the limit of bytes
    *zip(
        FIVE, (390_000, 390_000, 390_000, 1_400_000, 750_000), strict=True
    ),  # just below the limit of parts
]


@contextmanager
def looking(server: ServerProcess, waits: list[float]) -> Iterator[None]:
    """Ask ``/ready`` again and again, and note the processor time that the server used until each
    answer."""
    stop, processor = threading.Event(), Processor(server)

    def look() -> None:
        with httpx.Client(timeout=120) as client:
            while not stop.is_set():
                started = processor.seconds()
                assert client.get(f"{server.url}/ready").status_code == 200
                waits.append(processor.seconds() - started)
                stop.wait(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        wait_until(lambda: waits)
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.cases(6)
@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_big_body_disturbs_nobody(tiny: ServerProcess, name: str, size: int) -> None:
    route, make = BODIES[name]
    body = make(size)
    waits: list[float] = []
    process = psutil.Process(tiny.process.pid)
    before = process.memory_info().rss
    with looking(tiny, waits):
        started = time.perf_counter()
        try:
            status = str(
                httpx.post(
                    f"{tiny.url}{route}", content=body, headers=JSON, timeout=300
                ).status_code
            )
        except httpx.WriteError:
            status = "413, cut off"
        took = time.perf_counter() - started
        time.sleep(0.05)
    kept = (process.memory_info().rss - before) / 1e6
    print(
        f"\n{name}, {size / 1e6:g} MB: {status} after {took:.2f} s, most processor time until /ready"
        f" {max(waits) * 1e3:.0f} ms, {kept:+.0f} MB kept"
    )
    assert status.startswith(("400", "413"))
    assert max(waits) < NOT_FROZEN_S
    assert (
        tiny.generate(
            text="still there", sampling_params={"max_new_tokens": 2, "ignore_eos": True}
        )["meta_info"]["completion_tokens"]
        == 2
    )


def test_a_stream_goes_on_while_big_bodies_come(tiny: ServerProcess) -> None:
    route, make = BODIES["lists of ids"]
    body, stop = make(4_000_000), threading.Event()

    def post() -> None:
        while not stop.is_set():
            assert (
                httpx.post(
                    f"{tiny.url}{route}", content=body, headers=JSON, timeout=PATIENCE_S
                ).status_code
                == 400
            )

    sampling = {"max_new_tokens": 500, "ignore_eos": True}
    posting = threading.Thread(target=post)
    times: list[float] = []
    last = ""
    processor = Processor(tiny)
    posting.start()
    try:
        with httpx.stream(
            "POST",
            f"{tiny.url}/generate",
            json={"text": "a", "stream": True, "sampling_params": sampling},
            timeout=PATIENCE_S,
        ) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    times.append(processor.seconds())
                    last = line
    finally:
        stop.set()
        posting.join()
    longest = max(after - before for before, after in pairwise(times))
    print(f"\nmost processor time between two chunks {longest * 1e3:.0f} ms")
    # A chunk may have several tokens, if the frontend was busy.
    assert json.loads(last.removeprefix("data: "))["meta_info"]["completion_tokens"] == 500
    assert longest < NOT_FROZEN_S


HOSTILE = (
    "{% if messages[0].content == 'boo' %}{% for i in range(99999) %}{% for j in range(99999) %}{%"
    " endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


@pytest.mark.full
def test_a_template_that_never_ends_disturbs_nobody(tiny_model: Path, tmp_path: Path) -> None:
    """Red before: the event loop rendered it, and the server was gone for good."""
    (tmp_path / "hostile.jinja").write_text(HOSTILE)
    arguments = [
        "--model-path",
        str(tiny_model),
        "--dtype",
        "float32",
        "--chat-template",
        str(tmp_path / "hostile.jinja"),
    ]
    waits: list[float] = []

    def chat(text: str) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)

    with running_server(tmp_path / "server", *arguments) as server:
        assert chat("hi").status_code == 200
        with looking(server, waits):
            refused = chat("boo")
            again = chat("hi")
        assert refused.status_code == 400
        assert "computes for more than 2 s" in refused.text
        assert again.status_code == 200
        print(f"\nmost processor time until /ready {max(waits) * 1e3:.0f} ms")
        assert max(waits) < NOT_FROZEN_S
