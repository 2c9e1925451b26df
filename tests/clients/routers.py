"""Checks of a router in front of two servers: what it proxies, and where it sends it. The scripts of
the routers name the program and run them.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from checks import MODEL, URLS, asked, check, refused

ASK = [{"role": "user", "content": "What is the capital of France?"}]
LAUNCH: list[str] = []
"""The command of a router's program, without options; set by its script."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def router(*options: str) -> Iterator[str]:
    """A router's URL."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [*LAUNCH, "--worker-urls", *URLS[:2], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        for _ in range(200):
            assert process.poll() is None, process.communicate()[0].decode()[-3000:]
            try:
                if len(asked("/workers", url=url)["workers"]) == 2:
                    break
            except (urllib.error.URLError, ConnectionError):
                pass
            time.sleep(0.1)
        else:
            raise AssertionError("the router does not know both workers after 20 s")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def num_answers() -> list[int]:
    return [asked("/server_info", url=url)["requests"]["num_sequences"] for url in URLS[:2]]


@check("round_robin: both servers answer")
def both() -> None:
    with router("--policy", "round_robin") as url:
        before = num_answers()
        for _ in range(4):
            asked("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}, url=url)
        assert [now - then for now, then in zip(num_answers(), before, strict=True)] == [2, 2]


@check("cache_aware: chat, completions, a stream, models")
def proxied() -> None:
    with router("--policy", "cache_aware") as url:
        body = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 8}
        answer = asked("/v1/chat/completions", body, url=url)
        assert answer["choices"][0]["message"]["content"]
        assert asked("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}, url=url)
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body | {"stream": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            lines = stream.read().decode().split("\n\n")
        assert lines[-2] == "data: [DONE]"
        assert asked("/v1/models", url=url)["data"][0]["id"] == MODEL


@check("power_of_two with polled loads")
def loads() -> None:
    with router("--policy", "power_of_two") as url:
        for _ in range(3):
            asked("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}, url=url)
        assert asked("/get_loads", url=url)


@check("a refusal passes through")
def refusal() -> None:
    with router("--policy", "random") as url:
        with refused(urllib.error.HTTPError) as errors:
            asked("/v1/chat/completions", {"model": MODEL, "messages": []}, url=url)
        (error,) = errors
        assert error.code == 400
        assert "messages" in error.read().decode()
