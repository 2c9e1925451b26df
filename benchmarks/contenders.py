"""The contenders of the serving benchmark: Setpoint servers as real processes, driven over HTTP,
and peers in processes of their own.

Every contender answers ``run(workload, repetition)`` with a Sample, and is idle otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import psutil
from machine import busy_cpu_s
from workloads import Workload

START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 900.0
END_TIMEOUT_S = 15.0


@dataclass(slots=True, frozen=True)
class Sample:
    """One repetition of a workload. If it has ``errors``, its figures are not used."""

    wall_s: float
    ttft_s: float | None = None
    """Seconds from the request to the first chunk, if the workload is one stream."""
    decode_s: float | None = None
    """Seconds from the first to the last token, if the workload is one stream."""
    cached_tokens: int | None = None
    """Prompt tokens of all requests that came from the prefix cache; None if the server does not
    report them."""
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds by process: "client" and "frontend" and "engine", or "server", or "peer"."""
    foreign_share: float = 0.0
    """The share of the machine's CPU time that other programs used meanwhile. If it is large, the
    figures say little."""
    errors: tuple[str, ...] = ()


class CpuMeter:
    """Measures CPU seconds of some processes, and of everything else, from now until ``read``."""

    def __init__(self, processes: Mapping[str, Sequence[psutil.Process]]) -> None:
        """processes: groups of processes, by their name in the report."""
        self._processes = processes
        self._busy, self._begin = busy_cpu_s(), time.perf_counter()
        self._before = self._seconds()

    def _seconds(self) -> dict[str, float]:
        return {name: sum(map(_cpu_s, processes)) for name, processes in self._processes.items()}

    def read(self) -> tuple[dict[str, float], float]:
        """CPU seconds by group, and the share of the machine that other programs used."""
        spent = {
            name: max(seconds - self._before[name], 0.0)
            for name, seconds in self._seconds().items()
        }
        foreign = busy_cpu_s() - self._busy - sum(spent.values())
        return spent, max(foreign, 0.0) / (time.perf_counter() - self._begin) / (
            os.cpu_count() or 1
        )


def _cpu_s(process: psutil.Process) -> float:
    """The CPU seconds of a process; 0 if it has ended meanwhile."""
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.NoSuchProcess:
        return 0.0


class Contender(Protocol):
    name: str

    async def ready(self) -> None:
        """Wait until the contender is ready to answer. Raises StartError if it never is."""

    async def run(self, workload: Workload, repetition: int) -> Sample: ...

    def close(self) -> None: ...


class StartError(RuntimeError):
    """A contender did not start; the message says how it ended."""


class HttpServer:
    """A process that answers ``GET /health`` with 200 once it serves, and OpenAI's
    ``/v1/completions`` with prompts of token ids."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        environment: Mapping[str, str],
        stream: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
        refusal: Callable[[str], str | None] = lambda log: None,
    ) -> None:
        """command: makes it listen at ``port`` of the loopback interface. stream: all requests
        stream, not only the single one of W1. refusal: the reason, if there is one, for which a
        server with this log must not be measured."""
        self.name = name
        self._stream = stream
        self._refusal = refusal
        self._start_timeout_s = start_timeout_s
        self._log = tempfile.NamedTemporaryFile("w+", prefix="contender-", suffix=".log")  # noqa: SIM115 - closed by close()
        self.url = f"http://127.0.0.1:{port}"
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self._log.close()
            raise StartError(f"{name} did not start: {error}") from None

    async def ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            self._check_log()
                            return
                except (aiohttp.ClientError, TimeoutError):
                    pass  # not listening yet, or too busy loading to answer
                await asyncio.sleep(0.1)
        code = self._process.poll()
        how = (
            f"was not ready after {self._start_timeout_s:.0f} s"
            if code is None
            else f"ended with code {code}"
        )
        raise StartError(f"{self.name} {how}; the end of its log:\n{self.log()[-2000:]}")

    def _check_log(self) -> None:
        if (reason := self._refusal(self.log())) is not None:
            raise StartError(f"{self.name} is not measured: {reason}")

    async def run(self, workload: Workload, repetition: int) -> Sample:
        return await self.requests(
            workload, repetition, stream=self._stream or workload.num_requests == 1
        )

    async def requests(self, workload: Workload, repetition: int, *, stream: bool) -> Sample:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        ) as session:
            meter, begin = CpuMeter(self.processes()), time.perf_counter()
            answers = [
                complete(session, self.url, prompt, workload.output_tokens, stream)
                for prompt in workload.prompts(repetition)
            ]
            outcomes = await asyncio.gather(*answers, return_exceptions=True)
            wall = time.perf_counter() - begin
            cpu, foreign = meter.read()
        errors = tuple(
            f"{type(outcome).__name__}: {outcome}"
            for outcome in outcomes
            if isinstance(outcome, BaseException)
        )
        received = [outcome for outcome in outcomes if isinstance(outcome, Received)]
        cached = [one.cached_tokens for one in received if one.cached_tokens is not None]
        sample = Sample(
            wall,
            cached_tokens=sum(cached) if cached else None,
            cpu_s=cpu,
            foreign_share=foreign,
            errors=errors,
        )
        if errors or workload.num_requests > 1:
            return sample
        (single,) = received
        return replace(sample, ttft_s=single.first_s, decode_s=single.last_s - single.first_s)

    def close(self) -> None:
        end_tree(self._process)
        self._log.close()

    def log(self) -> str:
        """What the process has written so far."""
        return Path(self._log.name).read_text(errors="replace")

    def processes(self) -> dict[str, Sequence[psutil.Process]]:
        server = psutil.Process(self._process.pid)
        return {"client": [psutil.Process()], "server": [server, *server.children(recursive=True)]}


class SetpointServer(HttpServer):
    """``setpoint serve`` on a free port."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stream: bool,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        port = free_port()
        command = [sys.executable, "-m", "setpoint.cli", "serve", "--port", str(port), *arguments]
        super().__init__(
            name,
            command,
            port=port,
            environment=environment,
            stream=stream,
            start_timeout_s=start_timeout_s,
        )

    def processes(self) -> dict[str, Sequence[psutil.Process]]:
        frontend = psutil.Process(self._process.pid)
        return {
            "client": [psutil.Process()],
            "frontend": [frontend],
            "engine": frontend.children(recursive=True),
        }


def end_tree(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end, and after a while kill what is left of it and its children: nothing may
    run beside the next contender."""
    try:
        members = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        members = []
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(members, timeout=1)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=1)


@dataclass(slots=True)
class Received:
    """When the chunks of an answer arrived, in seconds after the request, and what its ``usage``
    says."""

    chunks_s: list[float]
    """The times of all chunks of a stream; otherwise only the time of the answer."""
    cached_tokens: int | None
    """Known if the server runs with --enable-cache-report."""

    @property
    def first_s(self) -> float:
        return self.chunks_s[0]

    @property
    def last_s(self) -> float:
        return self.chunks_s[-1]


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    num_outputs: int,
    stream: bool,
    on_chunk: Callable[[], None] = lambda: None,
) -> Received:
    """Ask for one completion. Raises RuntimeError for anything but ``num_outputs`` tokens.
    on_chunk: called for every chunk of a stream."""
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": num_outputs,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    begin = time.perf_counter()
    chunks: list[float] = []
    usage: dict[str, Any] | None = None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:200]}")
        if not stream:
            usage = (await response.json())["usage"]
            chunks.append(time.perf_counter() - begin)
        else:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("error"):
                    raise RuntimeError(f"error in the stream: {chunk['error']}")
                usage = chunk.get("usage") or usage
                if chunk.get("choices"):
                    chunks.append(time.perf_counter() - begin)
                    on_chunk()
    if usage is None or usage["completion_tokens"] != num_outputs:
        raise RuntimeError(f"asked for {num_outputs} tokens, got {usage}")
    details = usage.get("prompt_tokens_details")
    return Received(chunks, None if details is None else details["cached_tokens"])


def parse_variant(text: str) -> tuple[str, list[str], dict[str, str]]:
    """``NAME=[ENV=VALUE …] [--flag value …]`` as (name, arguments, environment)."""
    name, _, rest = text.partition("=")
    words = shlex.split(rest)
    if not name or not words:
        raise ValueError(f"--variant {text!r} is not NAME=[ENV=VALUE …] [--flag value …]")
    num_env = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    return name, words[num_env:], dict(word.split("=", 1) for word in words[:num_env])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
