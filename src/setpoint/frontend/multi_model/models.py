"""Loads and unloads several models as ``turns`` decides: tells their engines to give memory back or
to take it again, and sends them their requests when it is their turn.

Knows nothing of HTTP, and of processes only whether an engine may be started.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Mapping
from contextlib import suppress

from setpoint.core.errors import EngineDeadError, RequestError, SetpointError
from setpoint.core.executor import Clock
from setpoint.core.operations import MemoryPart
from setpoint.frontend.multi_model.swap_planner import (
    AdmitRequests,
    CloseModel,
    LoadModel,
    LoadState,
    ModelAction,
    SwapPlanner,
    UnloadModel,
)
from setpoint.ipc.client import EngineClient

logger = logging.getLogger(__name__)

TURN_S = 5.0
"""How long a model with requests stays loaded at least while another model's requests wait."""
AGAIN_S = 0.05
"""Pause before an engine that was not idle is asked again to give its memory back."""
LOOK_S = 0.01
"""Interval of checking whether an engine has been started."""
STOPPED_S = 5.0
"""How long a load or an unload waits for an engine whose process a signal has stopped; no other
model gets its room meanwhile."""
STOPPED = "The process of the model's engine has been stopped by a signal (SIGSTOP)."
PARTS = list(MemoryPart)
DISMISSED = "The model is not loaded: a client asked to unload it while this request waited for it."


class SwappedModel:
    """One of several models. Implements ``residence.Residence`` and ``ipc.gate.Gate``."""

    is_shared = True

    def __init__(
        self, name: str, client: EngineClient, may_load: asyncio.Event, several: ModelSwapper
    ) -> None:
        """may_load: set while an engine of this model may be started."""
        self.name = name
        self.client = client
        self.may_load = may_load
        self.num_loads = 0
        self.load_s = 0.0
        self.wishes: list[asyncio.Future[None]] = []
        """Done when the model is loaded."""
        self._several = several
        self._planner = several.planner

    @property
    def state(self) -> str:
        return "ended" if self.client.lives.has_ended else str(self._planner.state(self.name))

    @property
    def expires_in_s(self) -> float:
        return max(self._planner.expires_at(self.name) - self._several.now(), 0.0)

    def keep(self, seconds: float) -> None:
        self._planner.keep(self.name, seconds, self._several.now())
        self._several.wake()

    async def load(self) -> None:
        if self.client.lives.has_ended:
            self.client.choose()  # raises the reason
        if self._planner.state(self.name) is not LoadState.LOADED:
            self._planner.wish(self.name, self._several.now())
            wish = asyncio.get_running_loop().create_future()
            self.wishes.append(wish)
            self._several.wake()
            await wish

    def dismiss(self) -> None:
        self._planner.dismiss(self.name)
        if self._planner.state(self.name) is not LoadState.LOADING:
            self._fail_wishes(RequestError(DISMISSED, status_code=409))
        self._several.wake()

    def arrived(self) -> bool:
        is_admitted = self._planner.arrived(self.name, self._several.now())
        if not is_admitted:
            self._several.wake()
        return is_admitted

    def ended(self) -> None:
        self._planner.ended(self.name, self._several.now())
        self._several.wake()

    def gave_up(self, position: int) -> None:
        self._planner.gave_up(self.name, position)
        self._several.wake()

    def fail(self, error: SetpointError) -> None:
        """End everything that waits for the model."""
        self.client.fail_held(error)
        self._fail_wishes(error)

    def _fail_wishes(self, error: SetpointError) -> None:
        wishes, self.wishes = self.wishes, []
        for wish in wishes:
            if not wish.done():
                wish.set_exception(error)


class ModelSwapper:
    """All models. ``run`` carries out what ``turns`` decides."""

    def __init__(
        self,
        models: Mapping[str, tuple[EngineClient, asyncio.Event]],
        *,
        most: int,
        clock: Clock,
    ) -> None:
        """models: name -> client and ``may_load`` of each, in their order. most: how many may be
        loaded at the same time."""
        self.planner = SwapPlanner([*models], most=most, turn_s=TURN_S)
        self.now = clock.now
        self.models = {name: SwappedModel(name, *parts, self) for name, parts in models.items()}
        self._changed = asyncio.Event()
        self._working: set[asyncio.Task[None]] = set()

    def loaded(self, name: str) -> None:
        """Share the room with a model, whose engine is loaded now for the first time."""
        model = self.models[name]
        self.planner.loaded(name, self.now())
        model.client.gate = model

    def wake(self) -> None:
        """Look soon at what is to be done."""
        self._changed.set()

    def gone(self, name: str) -> None:
        """Note that the model's engine has ended and gets no successor."""
        model = self.models[name]
        model.may_load.clear()
        model.fail(EngineDeadError(f"The engine of the model {name} has ended."))
        self.planner.failed(name)
        self.wake()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while True:
                self._changed.clear()
                for action in self.planner.step(self.now()):
                    self._begin(action)
                left_s = self.planner.next_at(self.now()) - self.now()
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if left_s == math.inf else max(left_s, 0.001)):
                        await self._changed.wait()
        finally:
            for task in self._working:
                task.cancel()

    async def unload(self, name: str) -> None:
        """Unload a model that was loaded at the start and has no requests yet."""
        while True:
            try:
                await self._give_back(self.models[name])
            except RequestError:  # the engine has not noticed yet that it is idle
                await asyncio.sleep(AGAIN_S)
            else:
                self.planner.unloaded(name)
                return

    def _begin(self, action: ModelAction) -> None:
        match action:
            case AdmitRequests(name):
                self.models[name].client.admit_held()
                return
            case CloseModel(name, wanted):
                num_open = self.planner.num_running(name)
                logger.info(
                    "Model %s has been wanted for %.1f s while all loaded models have requests. New"
                    " requests of model %s wait from now on, and it is unloaded as soon as %s.",
                    wanted,
                    self.now() - self.planner.wanted_since(wanted),
                    name,
                    "its open request ends" if num_open == 1 else f"its {num_open} open ones end",
                )
                return
            case LoadModel(name):
                work = self._load(self.models[name])
            case UnloadModel(name, why):
                work = self._unload(self.models[name], why)
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _load(self, model: SwappedModel) -> None:
        began, since = self.now(), self.planner.wanted_since(model.name)
        model.may_load.set()
        try:
            await self._take_again(model)
        except SetpointError as error:
            logger.error("The model %s cannot be loaded: %s", model.name, error)
            model.client.orders.why_no_weights = ""  # the next request tries it again
            model.may_load.clear()
            self.planner.failed(model.name)
            model.fail(error)
        else:
            took_s = self.now() - began
            model.num_loads += 1
            model.load_s += took_s
            waited = _waited(self.planner.num_waiting(model.name), self.now() - since)
            self.planner.loaded(model.name, self.now())
            for wish in model.wishes:
                if not wish.done():
                    wish.set_result(None)
            model.wishes.clear()
            logger.info("Model %s is loaded, which took %.3f s: %s.", model.name, took_s, waited)
        self.wake()

    async def _take_again(self, model: SwappedModel) -> None:
        """Have the engine take its memory again, or wait until one has been started."""
        client = model.client
        if client.is_ready:
            with suppress(EngineDeadError):  # the next engine begins with its memory
                await _carried_out(client.orders.restore(PARTS), client)
                return
        client.orders.expect(frozenset())
        began = self.now()
        while not client.is_ready:
            if client.lives.has_ended:
                client.choose()  # raises the reason
            is_stopped = any(line.life.is_suspended for line in client.lines)
            if is_stopped and self.now() - began > STOPPED_S:
                client.orders.expect(frozenset(PARTS))  # should it go on later
                raise EngineDeadError(STOPPED)
            await asyncio.sleep(LOOK_S)

    async def _unload(self, model: SwappedModel, why: str) -> None:
        began = self.now()
        try:
            await self._give_back(model)
        except RequestError as error:  # the engine has not noticed yet that it is idle
            logger.debug("Model %s is not unloaded yet: %s", model.name, error)
            model.may_load.set()
            await asyncio.sleep(AGAIN_S)
            self.planner.stayed(model.name, self.now())
        else:
            self.planner.unloaded(model.name)
            logger.info(
                "Model %s is unloaded, which took %.3f s: %s.", model.name, self.now() - began, why
            )
        self.wake()

    async def _give_back(self, model: SwappedModel) -> None:
        """Have the engine give its memory back. Raises RequestError if it is not idle."""
        client = model.client
        model.may_load.clear()
        try:
            await _carried_out(client.orders.release(PARTS), client)
        except EngineDeadError:
            # Its next engine waits for ``may_load``, but one may be loading already.
            client.orders.expect(frozenset(PARTS))
            while any(not (line.life.is_gone or line.life.is_ready) for line in client.lines):
                await asyncio.sleep(LOOK_S)
            for line in client.lines:
                if line.life.is_ready:  # and was told to give its memory back
                    with suppress(EngineDeadError):
                        await line.get_state()


async def _carried_out(order: Awaitable[None], client: EngineClient) -> None:
    """Wait for an order to an engine that has no requests. One that a signal has stopped is ended:
    it would keep its memory as long as it is stopped."""

    async def end_stopped() -> None:
        await asyncio.sleep(STOPPED_S)
        while True:
            for line in client.lines:
                if line.life.is_suspended:
                    line.dismiss(STOPPED)
            await asyncio.sleep(LOOK_S)

    ending = asyncio.create_task(end_stopped())
    try:
        await order
    finally:
        ending.cancel()


def _waited(num_requests: int, longest_s: float) -> str:
    """Why a model is loaded, for the log."""
    if not num_requests:
        return "a client asked for it"
    if num_requests == 1:
        return f"1 request has waited for {longest_s:.3f} s"
    return f"{num_requests} requests have waited, the first for {longest_s:.3f} s"
