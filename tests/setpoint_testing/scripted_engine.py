"""An engine process without a model: the real loop and link around a scripted executor. Certain
prompts end it. ``python -m setpoint_testing.scripted_engine DESCRIPTOR``

It starts in a fraction of a second. Its tokens are those of
``setpoint_testing.scripted.hashed_token``, so that a test knows them. A prompt with a token of
:class:`Deadly` ends the process in the step that computes that token, or, for ``Deadly.LATER``, in
the third decode step after it.
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import sys
import time

from setpoint.core.control import EngineFacts
from setpoint.core.messages import Finish, Ready, TokenEvent, Tokens
from setpoint.core.plan import StepPlan
from setpoint.core.request import Ids
from setpoint.core.settings import Settings
from setpoint.ipc.sockets import EngineSocket
from setpoint.launch.heartbeat import Heartbeat, write_stacks_when_asked
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler
from setpoint.scheduler.scheduler_config import SchedulerConfig
from setpoint_testing.harness import Recorder
from setpoint_testing.scripted import ScriptedExecutor, ScriptedStep, hashed_token

VOCAB = 200
"""Size of the vocabulary of answers; prompts may have any id of a byte."""
CONTEXT = 4000
STEP_S = 0.002
MAX_RUNNING = 4
FLOOD_IDS = [201, 202, 203]
"""The tokens of a flood; no answer contains them."""


class Deadly(enum.IntEnum):
    KILL = 250
    LATER = 251
    TORN = 252
    """The process writes half a message, then ends."""
    FLOOD = 253
    """The process writes tokens and ends of a thousand requests that do not exist yet, then
    ends."""
    CUT = 254
    """The process closes its link and goes on."""
    EXIT = 255
    HANG = 249
    """The process goes on, but its loop hangs."""
    HANG_LOCKED = 248
    """The loop hangs in C code that holds the interpreter's lock."""


class Executor(ScriptedExecutor):
    def __init__(self, descriptor: int, link: EngineSocket) -> None:
        super().__init__(num_pages=MAX_RUNNING * CONTEXT, page_size=1, next_token=self._next)
        self._descriptor = descriptor
        self._link = link
        self._hashed = hashed_token(VOCAB)

    def submit(self, plan: StepPlan) -> ScriptedStep:
        time.sleep(STEP_S)
        return super().submit(plan)

    def _next(self, history: Ids) -> int:
        ids = history.tolist()
        for deadly in Deadly:
            if deadly in ids and (deadly is not Deadly.LATER or ids.index(deadly) == len(ids) - 4):
                self._end(deadly)
        return self._hashed(history)

    def _end(self, how: Deadly) -> None:
        match how:
            case Deadly.TORN:
                os.set_blocking(self._descriptor, True)
                os.write(self._descriptor, (1000).to_bytes(4, "little") + b"half a message")
            case Deadly.FLOOD:
                newest = int(self.plans[-1].rows.seq_ids.max())
                for seq_id in range(newest + 1, newest + 1001):
                    self._link.send(Tokens([TokenEvent(seq_id, FLOOD_IDS)]))
                    self._link.send(Tokens([TokenEvent(seq_id, [], Finish("length", length=3))]))
            case Deadly.CUT:
                self._link.close()
                time.sleep(600)
            case Deadly.EXIT:
                os._exit(3)
            case Deadly.HANG:
                time.sleep(600)
            case Deadly.HANG_LOCKED:
                ctypes.PyDLL(None).sleep(600)
            case Deadly.KILL | Deadly.LATER:
                pass
        os.kill(os.getpid(), signal.SIGKILL)


class WallClock:
    def now(self) -> float:
        return time.monotonic()


def main() -> None:
    descriptor = int(sys.argv[1])
    write_stacks_when_asked()
    link = EngineSocket(descriptor)
    config = SchedulerConfig(
        num_slots=MAX_RUNNING,
        max_req_len=CONTEXT - 1,
        max_req_input_len=CONTEXT - 6,
        vocab_size=256,
    )
    cache = KVCache(num_pages=MAX_RUNNING * CONTEXT, page_size=1)
    recorder = Recorder()
    settings = Settings(max_running_requests=MAX_RUNNING)
    scheduler = Scheduler(config, settings, cache, observer=recorder)
    loop = Loop(
        scheduler,
        Executor(descriptor, link),
        link,
        depth=0,
        clock=WallClock(),
        observer=recorder,
        heartbeat=Heartbeat(link, lambda: scheduler.state.stands_still),
    )
    facts = EngineFacts(
        max_total_num_tokens=config.max_req_len,
        max_running_requests=config.num_slots,
        max_req_input_len=config.max_req_input_len,
        kernels=f"process {os.getpid()}",
    )
    link.send(Ready(facts))
    loop.run()


if __name__ == "__main__":
    main()
