"""Requests over one engine life after the other, in any order of events: every reader gets what its
engine said of its own request and nothing else, and every request ends once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.messages import (
    Abort,
    Finish,
    Ready,
    Stop,
    Submit,
    ToEngine,
    ToFrontend,
    TokenEvent,
    Tokens,
    decode_to_engine,
    encode,
)
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.ipc.client import EngineClient
from setpoint.ipc.engine_life import EngineState
from setpoint.ipc.line import EngineLine
from setpoint.ipc.mailbox import Mailbox
from setpoint_testing.fake_engine import SOME_FACTS


class Link:
    """Keeps what the frontend says; says what the test wants, also after its close."""

    def __init__(self) -> None:
        self.heard: list[ToEngine] = []

    def start(self, receiver: Callable[[bytes], None], on_cut: Callable[[], None]) -> None:
        self._receiver = receiver

    def say(self, message: ToFrontend) -> None:
        self._receiver(encode(message))

    def send(self, data: bytes) -> None:
        self.heard.append(decode_to_engine(data))

    def close(self) -> None: ...


@dataclass
class Reader:
    """What the test knows of a submission."""

    rid: str
    life: int
    mailbox: Mailbox = field(default_factory=Mailbox)
    expected: list[int] = field(default_factory=list)
    end: str = ""
    """"" while open; finished, stopped, or the reason of its engine's death."""


class Frontend:
    """The real client, and a model of it that only knows the rules."""

    def __init__(self) -> None:
        self.client = EngineClient()
        self.lives: list[tuple[Link, EngineLine]] = []
        self.readers: dict[int, Reader] = {}

    @property
    def state(self) -> EngineState | None:
        return self.lives[-1][1].life.state if self.lives else None

    def open(self) -> dict[int, Reader]:
        return {seq_id: each for seq_id, each in self.readers.items() if not each.end}

    def attach(self) -> None:
        if self.state not in (EngineState.STARTING, EngineState.READY):
            link = Link()
            self.lives.append((link, EngineLine(link)))
            self.client.attach(self.lives[-1][1])

    def ready(self, life: int) -> None:
        if self.lives:
            self.lives[life % len(self.lives)][0].say(Ready(SOME_FACTS))

    def submit(self, rid: str) -> None:
        reader = Reader(rid, len(self.lives))
        request = Request(rid=rid, prompt_ids=pack_ids([1]), sampling=SamplingParams(), seed=0)
        if self.state is not EngineState.READY:
            with pytest.raises(EngineDeadError):
                self.client.submit(request, reader.mailbox)
        elif rid in {each.rid for each in self.open().values()}:
            with pytest.raises(RequestError, match="Duplicate"):
                self.client.submit(request, reader.mailbox)
        else:
            seq_id = self.client.submit(request, reader.mailbox)
            assert seq_id not in self.readers
            assert all(seq_id > other for other in self.readers)
            self.readers[seq_id] = reader

    def stop(self, seq_id: int) -> None:
        self.client.stop(seq_id)
        if seq_id in self.open():
            self.readers[seq_id].end = "stopped"

    def abort(self, prefix: str) -> None:
        """Asks only: the engine says the end."""
        before = len(self.lives[-1][0].heard) if self.lives else 0
        self.client.abort(prefix)
        wanted = [seq_id for seq_id, each in self.open().items() if each.rid.startswith(prefix)]
        if self.lives:
            assert self.lives[-1][0].heard[before:] == ([Abort(wanted)] if wanted else [])

    def say(self, life: int, seq_id: int, token: int, is_end: bool) -> None:
        """Any life says a token, dead ones included, about any number, whether or not it ever got
        that number."""
        if not self.lives:
            return
        life = life % len(self.lives)
        finish = Finish("length", length=1) if is_end else None
        reader = self.open().get(seq_id)
        num_outputs = 1 if reader is None else len(reader.expected) + 1
        event = TokenEvent(seq_id, [token], finish, num_outputs=num_outputs)
        self.lives[life][0].say(Tokens([event]))
        if reader is not None and reader.life == life + 1:
            reader.expected.append(token)
            reader.end = "finished" if is_end else ""

    def end(self, is_death: bool) -> None:
        if self.state in (EngineState.STARTING, EngineState.READY):
            line = self.lives[-1][1]
            line.died("It is dead.") if is_death else self.client.shutdown()
            for reader in self.open().values():
                reader.end = line.life.death

    async def check(self) -> None:
        assert self.client.num_open == len(self.open())
        assert self.client.is_ready == (self.state is EngineState.READY)
        for life, (link, _) in enumerate(self.lives):
            got = [each.seq_id for each in link.heard if isinstance(each, Submit)]
            assert got == sorted(s for s, each in self.readers.items() if each.life == life + 1)
            stopped = {each.seq_id for each in link.heard if isinstance(each, Stop)}
            assert stopped == {s for s in got if self.readers[s].end == "stopped"}
        for reader in self.readers.values():
            found = []
            if reader.expected:
                found = [event.ids[0] for _, event in await reader.mailbox.take()]
            assert found == reader.expected
            if reader.end not in ("", "stopped", "finished"):
                with pytest.raises(EngineDeadError, match=reader.end):
                    await reader.mailbox.take()


def random_action(rng: random.Random, num_submitted: int) -> tuple[str, *tuple[Any, ...]]:
    """The numbers that an engine speaks of are mostly those of late requests, or of the next."""
    name = rng.choices(
        ["attach", "ready", "submit", "stop", "abort", "say", "end"], [3, 3, 8, 2, 1, 12, 1]
    )[0]
    seq_id = max(0, num_submitted - rng.randrange(4))
    match name:
        case "ready":
            return name, rng.randrange(4)
        case "submit":
            return name, rng.choice(["a", "ab", "b", "c"])
        case "stop":
            return name, seq_id
        case "abort":
            return name, rng.choice(["a", "b"])
        case "say":
            return name, rng.randrange(4), seq_id, rng.randrange(100), rng.random() < 0.3
        case "end":
            return name, rng.random() < 0.7
    return (name,)


async def run_trace(seed: int) -> Frontend:
    rng, frontend = random.Random(seed), Frontend()
    for _ in range(100):
        name, *arguments = random_action(rng, len(frontend.readers))
        getattr(frontend, name)(*arguments)
    await frontend.check()
    return frontend


def test_requests_belong_to_the_life_they_were_sent_on() -> None:
    ends: Counter[str] = Counter()
    num_lives = 0
    for seed in range(100):
        frontend = asyncio.run(run_trace(seed))
        num_lives += len(frontend.lives)
        ends.update(reader.end for reader in frontend.readers.values())
    # The traces must exercise what they claim to.
    assert num_lives > 300
    assert min(ends.values()) > 50, ends
    assert len(ends) == 5, "open, stopped, finished, asked to end, died"
