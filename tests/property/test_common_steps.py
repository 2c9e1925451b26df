"""Engines that compute in step (DP attention) make the same exchanges in every step, whatever each of
them has to do: real loops and schedulers with requests that come, end, are aborted and paused at
random, around an executor that counts its exchanges and looks at what they bring."""

from __future__ import annotations

import mmap
import random
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from setpoint.core.control import Continue, Pause, PauseMode
from setpoint.core.messages import Abort, Shutdown, Stop, Submit, ToFrontend, Tokens, ToLoop
from setpoint.core.plan import StepPlan
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.core.settings import Settings
from setpoint.engine.parallel.shared_tokens import SharedMemoryDataRanks
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler
from setpoint.scheduler.scheduler_config import SchedulerConfig
from setpoint_testing.harness import Recorder, ids_of
from setpoint_testing.ranks import SMALL_BYTES
from setpoint_testing.scripted import ScriptedExecutor, ScriptedStep, hashed_token, reference

PAGES, VOCAB, WIDTH = 64, 97, 8
QUIET_S = 0.002
"""How long a loop waits for a message before the next part of its trace."""
PATIENCE_S = 60.0
NEXT_TOKEN = hashed_token(VOCAB)


class SteppingExecutor(ScriptedExecutor):
    """Each of its steps makes the exchanges of a model with ``num_layers`` layers of experts."""

    def __init__(self, data: SharedMemoryDataRanks, num_layers: int) -> None:
        super().__init__(num_pages=PAGES, page_size=1, next_token=NEXT_TOKEN)
        self.data = data
        self.rank, self.size = data.experts.rank, data.size
        self.num_layers = num_layers
        self.steps: list[tuple[int, tuple[int, ...]]] = []
        """For each step the number of its exchanges, and the tokens of each rank."""
        self.num_idle = 0

    def submit(self, plan: StepPlan) -> ScriptedStep:
        if len(plan.rows):
            self._step(int(plan.rows.counts.sum()))
        return super().submit(plan)

    def accompany(self) -> None:
        if self.data.is_awaited:
            self.num_idle += 1
            self._step(0)

    def shutdown(self) -> None:
        self.data.leave()

    def _step(self, num_tokens: int) -> None:
        self.data.begin(num_tokens)
        number, counts, num_exchanges = len(self.steps), (), 0
        for layer in range(self.num_layers):
            x = torch.full((num_tokens, WIDTH), self.rank, dtype=torch.int64)
            x[:, 0], x[:, 1], x[:, 2] = number, layer, torch.arange(num_tokens)
            found = self.data.gather(x)
            assert (found[:, :2] == torch.tensor([number, layer])).all(), "of another exchange"
            counts = tuple((found[:, -1] == rank).sum().item() for rank in range(self.size))
            assert sum(counts) == len(found)
            shares = self.data.experts.gather(found[:, :2].contiguous() + self.rank, self._widths)
            assert (shares - found[:, :2].repeat(1, self.size) == self._ranks).all()
            assert torch.equal(self.data.own(found, num_tokens), x)
            num_exchanges += 2
        self.steps.append((num_exchanges, counts))

    @property
    def _widths(self) -> tuple[int, ...]:
        return (2,) * self.size

    @property
    def _ranks(self) -> torch.Tensor:
        return torch.arange(self.size).repeat_interleave(2)


@dataclass
class Trace:
    """Implements scheduler.loop.Link: what the frontend sends to one engine, at which of its looks
    for messages."""

    rng: random.Random
    waiting: deque[list[ToLoop]] = field(default_factory=deque)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    requests: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """Sequence -> its prompt, and how many tokens it wants."""
    cut: set[int] = field(default_factory=set)
    """Sequences that are aborted or stopped."""
    finished: set[int] = field(default_factory=set)
    bell: threading.Event = field(default_factory=threading.Event)
    all_over: threading.Event = field(default_factory=threading.Event)
    report: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    has_reported: bool = False

    def fill(self, num_requests: int) -> None:
        """Requests of unequal sizes, some of which are cut off, and pauses."""
        rng = self.rng
        for seq_id in range(num_requests):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 7, 20]))]
            most = rng.choice([1, 3, 12])
            self.requests[seq_id] = prompt, most
            sampling = SamplingParams(max_new_tokens=most, ignore_eos=True)
            ids = pack_ids(ids_of(prompt))
            request = Request(rid=str(seq_id), prompt_ids=ids, sampling=sampling, seed=1)
            self.waiting.append([Submit(seq_id, request)])
            self.waiting.extend([] for _ in range(rng.choice([0, 0, 2, 9])))
            if rng.random() < 0.3:
                end = Abort([seq_id]) if rng.random() < 0.5 else Stop(seq_id)
                self.waiting.append([end])
                self.cut.add(seq_id)
            if rng.random() < 0.2:
                mode = rng.choice([PauseMode.IN_PLACE, PauseMode.RETRACT])
                self.waiting.append([Pause(100 + seq_id, mode)])
                self.waiting.extend([] for _ in range(rng.randrange(8)))
                self.waiting.append([Continue(200 + seq_id)])

    def receive(self, timeout_s: float) -> list[ToLoop]:
        if timeout_s and (self.rng.random() < 0.5 or not self.waiting):
            self.bell.wait(QUIET_S)
            self.bell.clear()
        if self.all_over.is_set():
            return [Shutdown()]
        if self.waiting:
            return self.waiting.popleft()
        if self.requests.keys() <= self.finished | self.cut and not self.has_reported:
            self.has_reported = True
            self.report.release()
        return []

    def send(self, message: ToFrontend) -> None:
        if isinstance(message, Tokens):
            for event in message.events:
                self.outputs.setdefault(event.seq_id, []).extend(event.ids)
                if event.finish is not None:
                    self.finished.add(event.seq_id)


class Ticks:
    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1e-4
        return self._now


def loop_of(executor: SteppingExecutor, trace: Trace) -> Loop:
    rules = SchedulerConfig(
        num_slots=3, max_req_len=PAGES - 1, max_req_input_len=PAGES - 6, vocab_size=VOCAB
    )
    settings = Settings(max_running_requests=3, chunked_prefill_size=6)
    cache, recorder = KVCache(num_pages=PAGES, page_size=1), Recorder()
    return Loop(
        Scheduler(rules, settings, cache, observer=recorder),
        executor,
        trace,
        depth=0,
        clock=Ticks(),
        observer=recorder,
        accompany=executor.accompany,
    )


def run(seed: int) -> list[SteppingExecutor]:
    """Run the engines of a seed to their end."""
    rng = random.Random(seed)
    size, num_layers = rng.choice([2, 2, 3, 4]), rng.randint(1, 3)
    traces = [Trace(random.Random(f"{seed} {rank}")) for rank in range(size)]
    report = threading.Semaphore(0)
    for trace in traces:
        trace.report = report
        trace.fill(rng.choice([0, 1, 3, 6]))

    def wake(rank: int) -> None:
        for other, trace in enumerate(traces):
            if other != rank:
                trace.bell.set()

    memory = mmap.mmap(-1, SMALL_BYTES)
    executors = [
        SteppingExecutor(
            SharedMemoryDataRanks(memory, rank, size, lambda rank=rank: wake(rank)), num_layers
        )
        for rank in range(size)
    ]
    loops = [loop_of(*each) for each in zip(executors, traces, strict=True)]
    errors: list[BaseException] = []

    def serve(loop: Loop) -> None:
        try:
            loop.run()
        except BaseException as error:
            errors.append(error)
            report.release(size)

    threads = [threading.Thread(target=serve, args=(loop,), daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    for _ in traces:
        assert report.acquire(timeout=PATIENCE_S), "an engine waits for another one"
    for trace in traces:
        trace.all_over.set()
    for thread in threads:
        if not errors:
            thread.join(PATIENCE_S)
    assert not errors, errors
    for trace in traces:
        for seq_id, (prompt, most) in trace.requests.items():
            expected = reference(np.array(prompt, np.int32), most, NEXT_TOKEN)
            found = trace.outputs.get(seq_id, [])
            assert found == expected[: len(found)]
            assert len(found) == most or seq_id in trace.cut
    return executors


def check(seeds: range) -> int:
    """Returns the number of steps in which an engine had nothing to compute."""
    num_idle = 0
    for seed in seeds:
        executors = run(seed)
        first = executors[0]
        for other in executors[1:]:
            assert other.steps == first.steps, seed
        assert all(count == 2 * first.num_layers for count, _ in first.steps)
        num_idle += sum(executor.num_idle for executor in executors)
    return num_idle


@pytest.mark.cases(1)
@pytest.mark.parametrize("block", range(2))
def test_equal_numbers_of_exchanges_in_every_step(block: int) -> None:
    assert check(range(block * 30, (block + 1) * 30)) > 100


@pytest.mark.full
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_traces(block: int) -> None:
    check(range(block * 100, (block + 1) * 100))
