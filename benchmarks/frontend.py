"""What a streamed token costs the frontend, without any model: CPU time per token of the process
that speaks HTTP.

    python benchmarks/frontend.py [--streams 1,64] [--tokens 500] [--step-ms 4] [--profile]

The real application and link; a process that sends a token per stream and step stands for the
engine, another one that only reads for the clients. With one stream every token is a wake-up of a
cold process, which is what it costs next to an engine that computes.
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
import time
from collections.abc import Callable

import uvloop
from machine import environment

from setpoint.core.messages import Finish, Ready, Shutdown, Stop, Submit, TokenEvent, Tokens
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.http.app import create_app
from setpoint.frontend.http.port import bind_socket
from setpoint.frontend.http.serve import listen, make_server
from setpoint.frontend.ipc.client import EngineClient
from setpoint.frontend.ipc.line import EngineLine
from setpoint.frontend.ipc.link import SocketLink
from setpoint.frontend.service import Service
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc import EngineSocket
from setpoint.testing.byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from setpoint.testing.fake_engine import FixedOptions

CONTEXT = 100_000


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def engine(descriptor: int, num_streams: int, step_s: float) -> None:
    """Waits until all streams have come, then sends a token to each of them per step, until all
    have what they asked for."""
    link = EngineSocket(descriptor)
    link.send(Ready({}))
    running: dict[int, int] = {}
    while True:
        for message in link.receive(10.0 if len(running) < num_streams else 0.0):
            if isinstance(message, Submit):
                running[message.seq_id] = message.request.sampling.max_new_tokens or 0
            elif isinstance(message, (Stop, Shutdown)):
                return
        if len(running) < num_streams:
            continue
        for index in range(1, max(running.values()) + 1):
            time.sleep(step_s)
            ends = {
                seq_id: Finish("length", length=count) if index == count else None
                for seq_id, count in running.items()
            }
            link.send(
                Tokens(
                    [
                        TokenEvent(seq_id, [65 + index % 26], ends[seq_id], 99, index)
                        for seq_id in running
                    ]
                )
            )
        running = {}


def clients(port: int, num_streams: int, num_tokens: int) -> None:
    """Asks for all streams at once and reads until each has ended."""
    asked = {
        "model": "default",
        "prompt": list(range(1, 100)),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type:"
        f" application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    poller, streams = select.poll(), {}
    for _ in range(num_streams):
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(head.encode() + body)
        streams[stream.fileno()] = stream
        poller.register(stream, select.POLLIN)
    while streams:
        for descriptor, _ in poller.poll():
            data = streams[descriptor].recv(1 << 16)
            if not data or b"[DONE]" in data:
                poller.unregister(descriptor)
                streams.pop(descriptor).close()


async def measure(
    num_streams: int, num_tokens: int, step_s: float, profiler: cProfile.Profile | None
) -> float:
    """CPU seconds of this process while the streams run."""
    ours, theirs = socket.socketpair()
    helpers = [in_child(lambda: engine(theirs.fileno(), num_streams, step_s))]
    config = FrontendConfig(
        "tiny", "tiny", "", context_len=CONTEXT, max_req_input_len=CONTEXT, vocab_size=VOCAB_SIZE
    )
    service = Service(
        config, EngineClient(), TextProcessor(Tokenizer(make_byte_tokenizer())), FixedOptions()
    )
    line = EngineLine(SocketLink(ours))
    service.engine.attach(line)
    assert await line.wait_ready(timeout_s=10)
    listener = bind_socket("127.0.0.1", 0)
    server = make_server(create_app(service, DIALECTS), log_level="warning")
    serving = asyncio.create_task(listen(server, listener))
    while not server.started:
        await asyncio.sleep(0.01)
    gc.collect()
    gc.freeze()
    helpers.append(in_child(lambda: clients(listener.getsockname()[1], num_streams, num_tokens)))
    while service.engine.num_open < num_streams:
        await asyncio.sleep(0.001)
    if profiler is not None:
        profiler.enable()
    begin = time.process_time()
    while service.engine.num_open:
        await asyncio.sleep(0.1)
    spent = time.process_time() - begin
    if profiler is not None:
        profiler.disable()
    service.engine.shutdown()
    server.should_exit = True
    await serving
    for pid in helpers:
        os.waitpid(pid, 0)
    service.engine.close()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,64", help="comma-separated")
    parser.add_argument("--tokens", type=int, default=500, help="per stream")
    parser.add_argument("--step-ms", type=float, default=4.0, help="between the tokens of a stream")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="cProfile of the first of --streams instead of the figures",
    )
    args = parser.parse_args()
    print(environment("uvicorn", "starlette", "uvloop", "msgspec") + "\n")
    for num_streams in map(int, args.streams.split(",")):
        profiler = cProfile.Profile() if args.profile else None
        spent = uvloop.run(measure(num_streams, args.tokens, args.step_ms / 1e3, profiler))
        if profiler is not None:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
            return
        print(
            f"{num_streams} streams, a step every {args.step_ms:g} ms:"
            f" {spent / args.tokens / num_streams * 1e6:.0f} µs per token"
        )


if __name__ == "__main__":
    main()
