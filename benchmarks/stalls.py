"""Streams while a long prompt is computed: two streams run, and when both have a few tokens, a long
prompt arrives. Prompts are new in every repetition."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import aiohttp
import numpy as np
from contenders import REQUEST_TIMEOUT_S, HttpServer, complete
from workloads import VOCAB


@dataclass(slots=True, frozen=True)
class Scene:
    num_streams: int = 2
    stream_input: int = 32
    stream_output: int = 96
    head_start: int = 8
    """Tokens that every stream has before the long prompt comes."""
    long_input: int = 4000
    long_output: int = 8

    def prompts(self, repetition: int) -> list[list[int]]:
        """The prompts of the streams, then the long one. Repetition -1 is for warming up."""
        rng = np.random.default_rng([57, repetition + 1])
        return [
            rng.integers(*VOCAB, length).tolist()
            for length in (*[self.stream_input] * self.num_streams, self.long_input)
        ]


FULL = Scene()
QUICK = Scene(stream_output=24, head_start=2, long_input=600, long_output=2)


async def play(server: HttpServer, scene: Scene, repetition: int) -> tuple[float, float]:
    """Returns the longest gap between two tokens of a stream, and how long the long prompt waited
    for its first token, in seconds."""
    *short, long = scene.prompts(repetition)
    left = [scene.head_start] * scene.num_streams
    started = asyncio.Event()

    def seen(stream: int) -> None:
        left[stream] -= 1
        if max(left) <= 0:
            started.set()

    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        streams = [
            group.create_task(
                complete(
                    session,
                    server.url,
                    prompt,
                    scene.stream_output,
                    True,
                    lambda index=index: seen(index),
                )
            )
            for index, prompt in enumerate(short)
        ]
        await started.wait()
        answer = await complete(session, server.url, long, scene.long_output, True)
        received = [await stream for stream in streams]
    gaps = (
        later - earlier for stream in received for earlier, later in pairwise(stream.chunks_s[:-1])
    )
    return max(gaps), answer.first_s
