"""A simulated server: the real session, client, lines and service over simulated engines, and the
chance that decides what happens to them."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from setpoint.checkpoint.folder.description import Description
from setpoint.checkpoint.source import ModelSource
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.tiers import storage_config
from setpoint.config.hardware import Hardware
from setpoint.config.live_changes import ConfigInputs
from setpoint.config.options import Options
from setpoint.core.messages import Submit
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.launch.parent.engine import Launched
from setpoint.launch.parent.engine_session import EngineSession
from setpoint.launch.parent.phases import Phases
from setpoint.launch.parent.served_model import ServedModel
from setpoint.launch.settings import tier_config
from setpoint.observe.progress_display import Waiting
from setpoint.scheduler import invariants
from setpoint.scheduler.scheduler import Scheduler
from setpoint_testing.byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from setpoint_testing.simulation.engine import (
    CRASHED,
    EngineTiers,
    MessageFault,
    Poison,
    SimulatedEngine,
    SimulatedExecutor,
    Start,
    StepFault,
)
from setpoint_testing.simulation.model import END_OF_TEXT
from setpoint_testing.simulation.tiers import SharedStorage, SimulatedTiers, TieredExecutor
from setpoint_testing.simulation.virtual_time import VirtualLoop
from setpoint_testing.specs import tiny_spec

CONTEXT = 200
OLD_MESSAGES = 8
"""How many messages of dead engines are kept, to arrive once more."""


@dataclass(slots=True)
class Setting:
    """What kind of server it is."""

    options: Options
    overlap_depth: int = 0
    is_strict: bool = False
    """Whether every invariant is checked after each turn."""
    slow_s: float = 0.02
    """The longest step, and the longest way of a message."""

    @classmethod
    def drawn(cls, options: Options, rng: random.Random, depths: Sequence[int]) -> Setting:
        """A server with these options. depths: of which the overlap depth is one."""
        return cls(
            options,
            overlap_depth=rng.choice(depths),
            is_strict=rng.random() < 0.2,
            slow_s=rng.choice([0.005, 0.02, 0.1]),
        )


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(make_byte_tokenizer(), special_tokens={"eos_token": "<|eos|>"})


@cache
def _served(options: Options) -> ServedModel:
    spec = tiny_spec(vocab_size=VOCAB_SIZE, context_len=CONTEXT, eos_token_ids=(END_OF_TEXT,))
    cores = options.parallel.dp_size
    asked = ConfigInputs(
        options=options,
        given=frozenset({"max_total_tokens", "max_running_requests"}),
        hardware=Hardware("cpu", cores, 16 << 30, num_engines=cores),
        model=spec,
        found={
            "model_path": ("simulated", "simulated"),
            "tokenizer_path": ("simulated", "simulated"),
            "tool_call_parser": ("none", "simulated"),
            "reasoning_parser": ("none", "simulated"),
        },
        env=EnvSettings(),
        drawn_seed=0,
    )
    folder = Path("simulated")
    described = Description(
        folder / "config.json", {}, folder / "generation_config.json", {}, (), ()
    )
    source = ModelSource(folder, "simulated", "simulated", False, described)
    return ServedModel(source, folder, None, asked, asked.resolve(), {})


class World:
    """Everything that a simulated server is made of, and what happens in it, noted in order."""

    def __init__(
        self, seed: int | str, setting: Setting, storage: SharedStorage | None = None
    ) -> None:
        """storage: what the cache tiers of the engines share, if the server has some."""
        self.loop = VirtualLoop()
        self.storage = storage
        self.rng = random.Random(seed)
        self.setting = setting
        self.numbers = count(3)
        self.poison = Poison()
        self.engines: list[SimulatedEngine] = []
        """All that were ever started."""
        self.notes: list[tuple[float, str, str]] = []
        """(when, who, what)."""
        self.starts: Callable[[int], Start] = lambda rank: Start()
        self.step_faults: Callable[[SimulatedEngine], StepFault | None] = lambda engine: None
        self.deaths: list[tuple[float, int]] = []
        """When an engine ended, and how. One that the server itself has killed had crashed before,
        as far as the server can know."""
        self.wrong: list[str] = []
        """What must not happen, and has."""
        self._first: dict[str, int] = {}
        """rid -> the first of its numbers that an engine has read."""
        self._rids: dict[int, str] = {}
        """Number on a line -> rid."""
        self._old: deque[bytes] = deque(maxlen=OLD_MESSAGES)
        served = _served(setting.options)
        served = replace(
            served,
            config=replace(served.config, overlap_depth=setting.overlap_depth),
            tells_prefixes=served.num_engines > 1,
        )
        self._launched = Launched(
            [], served, TextProcessor(_tokenizer()), Waiting("", None), self._spawn
        )
        for rank in range(served.num_engines):
            process = self._spawn(rank)
            process.hand_over(served.job(rank=rank))
            self._launched.processes.append(process)
        self.session: EngineSession

    def note(self, who: SimulatedEngine | str, what: str) -> None:
        name = who if isinstance(who, str) else f"engine {who.rank}/{who.pid}"
        self.notes.append((self.loop.time(), name, what))

    def trace(self) -> str:
        return "".join(f"{at:12.6f}  {who:14}  {what}\n" for at, who, what in self.notes)

    def new_session(self) -> EngineSession:
        self.session = EngineSession(self._launched, Phases(started_at=0.0), clock=self.loop)
        return self.session

    def living(self) -> list[SimulatedEngine]:
        return [each for each in self.engines if each.code is None]

    def serving(self) -> list[SimulatedEngine]:
        """The engines of the ranks that take requests."""
        ready = {line.rank for line in self.session.client.lines if line.life.is_ready}
        processes = self._launched.processes
        return [each for each in self.engines if each.rank in ready and each in processes]

    # ------------------------------------------------------------------ what engines ask

    def _spawn(self, rank: int) -> SimulatedEngine:
        """A ``Spawn``."""
        start = self.starts(rank)
        engine = SimulatedEngine(self, rank, 1000 + len(self.engines), start)
        self.engines.append(engine)
        self.note(engine, f"starts ({start.kind} after {start.seconds:.3f} s)")
        return engine

    def executor(
        self, engine: SimulatedEngine, num_pages: int, page_size: int
    ) -> tuple[SimulatedExecutor, EngineTiers | None]:
        if self.storage is None:
            return SimulatedExecutor(engine, num_pages, page_size), None
        options = self.setting.options
        config = tier_config(options, storage_config(options.tiers), page_size=page_size)
        assert config is not None
        executor = TieredExecutor(engine, num_pages, page_size)
        return executor, SimulatedTiers(engine, executor, self.storage, config.block)

    def step_s(self) -> float:
        return self.rng.uniform(0.001, self.setting.slow_s)

    def delay_s(self) -> float:
        return self.rng.uniform(0.0, self.setting.slow_s)

    def fault_of_step(self, engine: SimulatedEngine) -> StepFault | None:
        return self.step_faults(engine)

    def keep_for_later(self, data: bytes) -> None:
        self._old.append(data)

    def with_fault(
        self, engine: SimulatedEngine, fault: MessageFault | None, data: bytes
    ) -> list[bytes]:
        """What is sent in the place of a message."""
        match fault:
            case "doubled":
                return [data, data]
            case "cut":
                return [data[: self.rng.randrange(len(data))]]
            case "garbled":
                # Nothing in msgpack begins with C1. Other bytes might be another true message: the
                # product trusts the kernel to carry what was sent.
                return [b"\xc1" + self.rng.randbytes(len(data) - 1)]
            case "foreign" if self._old:
                return [self.rng.choice(self._old), data]
            case _:
                return [data]

    def died(self, engine: SimulatedEngine, code: int) -> None:
        self.note(engine, f"ends with {code}")
        self.deaths.append((self.loop.time(), CRASHED if engine.is_given_up else code))

    def came_to(self, message: Submit) -> None:
        rid = message.request.rid
        self._rids[message.seq_id] = rid
        self._first[rid] = min(message.seq_id, self._first.get(rid, message.seq_id))

    def refused(self, number: int) -> None:
        rid = self._rids[number]
        if self._first[rid] < number:
            self.wrong.append(
                f"{rid} had an engine, and the next one refuses it: its queue is full"
            )

    def check(self, engine: SimulatedEngine, scheduler: Scheduler) -> None:
        if self.setting.is_strict and (found := invariants.violations(scheduler.state)):
            self.wrong.append(f"engine {engine.rank}/{engine.pid}: {found}")

    def step_failed(self, error: Exception) -> None:
        if "a fault in the middle of a step" not in str(error):
            self.wrong.append(f"an engine raised {error!r}")


class _Noting(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note("log", record.getMessage())


@contextmanager
def noted_logs(world: World) -> Iterator[None]:
    """Have the product's log lines be part of the notes, and appear nowhere else."""
    logger, handler = logging.getLogger("setpoint"), _Noting(world)
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate, logger.level = before


def options_of(values: Mapping[str, Any]) -> Options:
    return Options().replace(**values)
