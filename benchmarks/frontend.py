"""What the process that speaks HTTP costs, without any model: CPU time for each streamed token, and
what it adds to the time to the first token.

    python benchmarks/frontend.py [--streams 1,64,256] [--only chat,generate] [--tokens 300]
    python benchmarks/frontend.py --streams 200 --only "generate with 10" --tokens 400 --unread 0.5

The real application, link, tokenizer and chat template of the default model. A process that sends a
token per stream and step stands for the engine, another one that only reads stands for the clients,
so the CPU time is the frontend's alone. With one stream every token is a wake-up of a cold process,
which is what it costs next to an engine that computes.

First tokens are measured twice: of requests that arrive evenly while others stream, and of requests
that arrive at once and whose first tokens the engine sends in one message. "in" is from the last
byte that the client sends to the engine's receipt, "out" from the engine's message to the client's
first byte of the answer; neither holds any time of an engine.

With 10 logprobs, each chunk of `/generate` repeats all before it. There the figures that matter are
what `/ready` takes meanwhile on a new connection, and by how much the memory of the process grows.
`--unread` is the share of streams whose clients read nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import pstats
import select
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from machine import environment

from setpoint.checkpoint.source import locate
from setpoint.core.messages import (
    Finish,
    LogprobBlock,
    Ready,
    Shutdown,
    Submit,
    TokenEvent,
    Tokens,
)
from setpoint.core.request import Request
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.composition import compose
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.http.app import create_app
from setpoint.frontend.http.port import bind_socket
from setpoint.frontend.http.serve import make_server
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.template_source import find_chat_template
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint.ipc.link import SocketLink
from setpoint.ipc.sockets import EngineSocket
from setpoint_testing.fake_engine import SOME_FACTS, FixedOptions

CONTEXT = 100_000
TEXT = "The quick brown fox — naïve, but not lazy — jumps over 13 dogs.\nThen it rests. "
"""The text that every answer repeats."""
MESSAGES = [{"role": "user", "content": "Tell me a long story about a fox and thirteen dogs."}]
TOOLS = [{"type": "function", "function": {"name": "find_fox", "parameters": {"type": "object"}}}]
"""No answer calls it, but every piece of text is searched for calls."""
STOPS = ["\n\nQuestion:", "###", "</answer>", "Then it sleeps"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "chat with stop strings": ("/v1/chat/completions", {"messages": MESSAGES, "stop": STOPS}),
    "chat with 5 logprobs": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5},
    ),
    "chat with tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}),
    "chat not streamed": ("/v1/chat/completions", {"messages": MESSAGES, "stream": False}),
    "responses": ("/v1/responses", {"input": "Tell me a long story about a fox."}),
    "completions": ("/v1/completions", {"prompt": TEXT}),
    "generate": ("/generate", {"text": TEXT}),
    "generate with 10 logprobs": (
        "/generate",
        {"text": TEXT, "return_logprob": True, "top_logprobs_num": 10},
    ),
    "completions with 10 logprobs": ("/v1/completions", {"prompt": TEXT, "logprobs": 10}),
}
PROBE_GAP_S = 0.02
LOOK_S = 0.005


@dataclass(frozen=True)
class Load:
    variant: str
    num_requests: int
    num_tokens: int
    step_s: float
    gap_s: float = 0.0
    """Seconds between the arrivals of requests; 0: all at once, and no step before all have
    arrived."""
    unread: float = 0.0
    """The share of requests whose clients read nothing."""

    def is_read(self, index: int) -> bool:
        return int((index + 1) * self.unread) == int(index * self.unread)

    def body(self, index: int) -> tuple[str, bytes]:
        route, fields = VARIANTS[self.variant]
        asked = {"model": "default", "rid": f"bench-{index}", "stream": True, **fields}
        limits = {"ignore_eos": True}
        if route == "/generate":
            asked["sampling_params"] = {**limits, "max_new_tokens": self.num_tokens}
        else:
            name = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
            asked |= {**limits, name: self.num_tokens}
        return route, json.dumps(asked).encode()


Times = dict[str, dict[str, float]]
"""Event -> number of a request -> when, in seconds of one clock for all processes."""


class Child:
    """A forked process that runs ``work`` and sends the result back."""

    def __init__(self, work: Callable[[], Times]) -> None:
        self._reads, writes = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.write(writes, json.dumps(work()).encode())
            finally:
                os._exit(0)
        os.close(writes)

    @property
    def is_done(self) -> bool:
        return bool(select.select([self._reads], [], [], 0)[0])

    def result(self) -> Times:
        with os.fdopen(self._reads) as reads:
            times: Times = json.loads(reads.read())
        os.waitpid(self._pid, 0)
        return times


class Engine:
    """Sends a token per stream and step. Its requests' rids end with their numbers."""

    def __init__(self, descriptor: int, load: Load, ids: list[int]) -> None:
        self._link = EngineSocket(descriptor)
        self._load = load
        self._ids = ids
        self._requests: dict[int, Request] = {}
        self._num_sent: dict[int, int] = {}
        self._times: Times = {"received": {}, "sent": {}}

    def run(self) -> Times:
        self._link.send(Ready(SOME_FACTS))
        next_step = time.perf_counter() + 3600
        while True:
            for message in self._link.receive(max(next_step - time.perf_counter(), 0.0)):
                if isinstance(message, Shutdown):
                    return self._times
                if isinstance(message, Submit):
                    self._submitted(message)
                    next_step = min(next_step, time.perf_counter() + self._load.step_s)
            if self._load.gap_s == 0 and len(self._times["received"]) < self._load.num_requests:
                next_step = time.perf_counter() + self._load.step_s
            elif time.perf_counter() >= next_step:
                next_step += self._load.step_s
                self._send(list(self._num_sent))

    def _submitted(self, message: Submit) -> None:
        self._times["received"][_number(message.request)] = time.perf_counter()
        self._requests[message.seq_id] = message.request
        self._num_sent[message.seq_id] = 0
        if self._load.gap_s:
            self._send([message.seq_id])

    def _send(self, seq_ids: list[int]) -> None:
        events = [self._event(seq_id) for seq_id in seq_ids]
        now = time.perf_counter()
        for event in events:
            if event.num_outputs == 1:
                self._times["sent"][_number(self._requests[event.seq_id])] = now
            if event.finish is not None:
                del self._num_sent[event.seq_id]
        if events:
            self._link.send(Tokens(events))

    def _event(self, seq_id: int) -> TokenEvent:
        self._num_sent[seq_id] += 1
        count, request = self._num_sent[seq_id], self._requests[seq_id]
        token = self._ids[count % len(self._ids)]
        finish = Finish("length", length=count) if count == self._load.num_tokens else None
        logprobs = None
        if request.options.logprobs is not None:
            tops = range(request.options.logprobs.top)
            logprobs = LogprobBlock(
                [-0.5], [token], [[-0.5 * k for k in tops]], [[token + k for k in tops]], [[]]
            )
        return TokenEvent(
            seq_id, [token], finish, 30, count, num_cached=8, output_logprobs=logprobs
        )


def _number(request: Request) -> str:
    return request.rid.rpartition("-")[2]


def clients(port: int, load: Load) -> Times:
    """Send the requests at their times, and read until each answer has ended; returns the times."""
    times: Times = {"asked": {}, "answered": {}, "ended": {}}
    poller, streams, unread = select.poll(), {}, []
    begin, num_asked = time.perf_counter(), 0
    while num_asked < load.num_requests or streams:
        while (
            num_asked < load.num_requests and time.perf_counter() >= begin + num_asked * load.gap_s
        ):
            stream = _ask(port, load, num_asked, times)
            if load.is_read(num_asked):
                streams[stream.fileno()] = (str(num_asked), stream)
                poller.register(stream, select.POLLIN)
            else:
                unread.append(stream)
            num_asked += 1
        wait = begin + num_asked * load.gap_s - time.perf_counter()
        timeout_ms = max(wait, 0.0) * 1e3 if num_asked < load.num_requests else None
        for descriptor, _ in poller.poll(timeout_ms):
            number, stream = streams[descriptor]
            data = stream.recv(1 << 16)
            if number not in times["answered"] and b"{" in data:
                times["answered"][number] = time.perf_counter()
            if not data:
                times["ended"][number] = time.perf_counter()
                poller.unregister(descriptor)
                streams.pop(descriptor)[1].close()
    return times


def probe(port: int, until: int) -> Times:
    """Ask `/ready` on new connections until the descriptor ``until`` is closed elsewhere; returns
    how long each answer took."""
    taken: list[float] = []
    while not select.select([until], [], [], PROBE_GAP_S)[0]:
        begin = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            while connection.recv(1 << 16):
                pass
        taken.append(time.perf_counter() - begin)
    return {"probed": {str(index): each for index, each in enumerate(taken)}}


def _ask(port: int, load: Load, index: int, times: Times) -> socket.socket:
    route, body = load.body(index)
    head = (
        f"POST {route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    stream = socket.create_connection(("127.0.0.1", port))
    stream.sendall(head.encode() + body)
    times["asked"][str(index)] = time.perf_counter()
    return stream


@dataclass(frozen=True)
class Measured:
    cpu_s: float
    """CPU seconds of the frontend, from the first token to the end of the last answer."""
    wall_s: float
    times: Times
    busy_ms: list[float]
    """CPU time that the frontend took between two looks LOOK_S apart, in order of size: on a busy
    machine too, no more than that is done before whoever waits for the event loop gets a turn."""
    grown_mb: float
    """The growth of the peak of the frontend's memory meanwhile."""

    def delays_ms(self, begin: str, end: str) -> list[float]:
        """The time from one event of a request to another, without the first quarter of the
        requests, which warm the process up."""
        pairs = [(self.times[begin][number], when) for number, when in self.times[end].items()]
        return sorted((when - before) * 1e3 for before, when in sorted(pairs)[len(pairs) // 4 :])


async def measure(load: Load, text: TextProcessor, profiler: cProfile.Profile | None) -> Measured:
    ids = text.tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    ours, theirs = socket.socketpair()
    helpers = [Child(Engine(theirs.fileno(), load, ids).run)]
    config = FrontendConfig(
        "default",
        "default",
        "",
        context_len=CONTEXT,
        max_req_input_len=CONTEXT,
        vocab_size=text.tokenizer.vocab_size,
        tool_call_parser="hermes",
    )
    service = compose(config, EngineClient(), text, FixedOptions())
    line = EngineLine(SocketLink(ours))
    service.engine.attach(line)
    assert await line.wait_ready(timeout_s=10)
    listener = bind_socket("127.0.0.1", 0)
    server = make_server(create_app(service, DIALECTS), log_level="warning")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    port = listener.getsockname()[1]
    gc.collect()
    gc.freeze()
    before_mb = reset_peak_mb()
    waits, ends = os.pipe()
    helpers.append(Child(lambda: (os.close(ends), probe(port, waits))[1]))
    helpers.append(asking := Child(lambda: (os.close(ends), clients(port, load))[1]))
    while service.engine.num_open < (1 if load.gap_s else load.num_requests):
        await asyncio.sleep(0.0005)
    if profiler is not None:
        profiler.enable()
    begin_s, begin = time.process_time(), time.perf_counter()
    busy_ms = []
    while service.engine.num_open or (load.gap_s and not asking.is_done):
        before_s = time.process_time()
        await asyncio.sleep(LOOK_S)
        busy_ms.append((time.process_time() - before_s) * 1e3)
    cpu_s, wall_s = time.process_time() - begin_s, time.perf_counter() - begin
    if profiler is not None:
        profiler.disable()
    grown_mb = memory_mb("VmHWM") - before_mb
    os.close(ends)
    os.close(waits)
    service.engine.shutdown()
    # In a thread: the last bytes may still have to be sent.
    results = [await asyncio.to_thread(helper.result) for helper in helpers]
    times = {event: when for result in results for event, when in result.items()}
    server.should_exit = True
    await serving
    service.engine.close()
    assert len(times["answered"]) == sum(map(load.is_read, range(load.num_requests)))
    return Measured(cpu_s, wall_s, times, sorted(busy_ms), grown_mb)


def reset_peak_mb() -> float:
    """Begin a new peak of this process's memory; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mb("VmRSS")


def memory_mb(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024


def rate_line(load: Load, measured: Measured) -> str:
    num_tokens = load.num_requests * load.num_tokens
    return (
        f"{load.variant}: {load.num_requests} streams, a step every {load.step_s * 1e3:g} ms:"
        f" {num_tokens / measured.wall_s:.0f} tokens/s sent with"
        f" {measured.cpu_s / measured.wall_s:.0%} of a core,"
        f" {num_tokens / measured.cpu_s:.0f} tokens per CPU second,"
        f" {measured.cpu_s / num_tokens * 1e6:.1f} µs per token"
    )


def probe_line(load: Load, measured: Measured) -> str:
    taken = sorted(each * 1e3 for each in measured.times["probed"].values())
    busy = measured.busy_ms
    return (
        f"{load.variant}: CPU ms between two turns for others: p50"
        f" {statistics.median(busy):.1f}, p99 {busy[int(len(busy) * 0.99)]:.1f},"
        f" max {busy[-1]:.1f}\n"
        f"{load.variant}: {len(taken)} probes of /ready: ms p50 {statistics.median(taken):.1f}, p99"
        f" {taken[int(len(taken) * 0.99)]:.1f}, max {taken[-1]:.1f}; memory grew by"
        f" {measured.grown_mb:.0f} MB, {measured.grown_mb / load.num_requests:.2f} MB per stream"
    )


def first_token_line(load: Load, measured: Measured) -> str:
    ways = {"in": ("asked", "received"), "out": ("sent", "answered")}
    delays = {way: measured.delays_ms(*events) for way, events in ways.items()}
    figures = ", ".join(
        f"{way} {statistics.median(each):.2f} (mean {statistics.fmean(each):.2f},"
        f" p99 {each[int(len(each) * 0.99)]:.2f})"
        for way, each in delays.items()
    )
    arrive = f"one every {load.gap_s * 1e3:g} ms" if load.gap_s else "at once"
    return f"{load.variant}: first tokens of {load.num_requests} requests, {arrive}: ms {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,64,256", help="comma-separated")
    parser.add_argument("--only", default="", help="variants, comma-separated beginnings")
    parser.add_argument("--tokens", type=int, default=300, help="per stream")
    parser.add_argument("--step-ms", type=float, default=12.8, help="between a stream's tokens")
    parser.add_argument("--open", type=int, default=64, help="streams while others arrive")
    parser.add_argument(
        "--unread", type=float, default=0.0, help="share of streams whose clients read nothing"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="cProfile of the first variant with the first of --streams instead of the figures",
    )
    args = parser.parse_args()
    print(environment("uvicorn", "starlette", "uvloop", "msgspec") + "\n")
    folder = locate(None, log=print).folder
    text = TextProcessor.from_folder(folder, find_chat_template(folder))
    step_s = args.step_ms / 1e3
    wanted = [
        name for name in VARIANTS if any(name.startswith(each) for each in args.only.split(","))
    ]
    try:
        for variant in wanted:
            for num_streams in map(int, args.streams.split(",")):
                load = Load(variant, num_streams, args.tokens, step_s, unread=args.unread)
                profiler = cProfile.Profile() if args.profile else None
                measured = uvloop.run(measure(load, text, profiler))
                if profiler is not None:
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
                    return
                print(rate_line(load, measured))
                if "10 logprobs" in variant:
                    print(probe_line(load, measured))
                if num_streams > 1 and VARIANTS[variant][1].get("stream", True):
                    print(first_token_line(load, measured))
        if "chat" in wanted:
            # Each request streams for as long as it takes --open others to arrive.
            load = Load("chat", 4 * args.open, args.open, 0.02, gap_s=0.02)
            print(first_token_line(load, uvloop.run(measure(load, text, None))))
    finally:
        text.close()


if __name__ == "__main__":
    main()
