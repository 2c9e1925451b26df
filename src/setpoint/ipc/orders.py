"""What the frontend has decided for its engines (the live settings, the weights, released memory,
the storage of cached prefixes and pauses), and what each engine has been told of it.

An order is a state that holds for all engines. An engine can miss the call that brings it: it is
starting, stopped by a signal, or dead. It is told what it has missed before it gets the next
request, so all engines work under the same orders. A pause may be one of some ranks only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec

from setpoint.core.control import PAUSED, OperationDone, OptionChange, PauseDone, PauseMode
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.operations import (
    AttachStorage,
    DetachStorage,
    LoadWeights,
    MemoryPart,
    ReleaseMemory,
    RestoreMemory,
    StorageOrder,
)
from setpoint.core.settings import Settings
from setpoint.ipc.line import EngineLine

T = TypeVar("T")

EMPTY = (PauseMode.ABORT, PauseMode.RETRACT)
"""The pauses in which no request keeps memory, as operations need it."""


class Fleet(Protocol):
    """The engines, as far as orders need them."""

    async def on(
        self, ranks: Collection[int] | None, call: Callable[[EngineLine], Awaitable[T]]
    ) -> list[T]:
        """Make a control call on the engines of these ranks that take requests. There may be none
        if one may come. None: on all; there must be one."""
        ...

    def ready(self) -> list[EngineLine]:
        """The lines that take requests."""
        ...

    @property
    def lines(self) -> list[EngineLine]:
        """The latest line of each rank."""
        ...

    @property
    def ranks(self) -> Collection[int]:
        """All ranks."""
        ...

    def open_on(self, ranks: Collection[int]) -> list[int]:
        """The numbers of the open requests that engines of these ranks have; if these are all, also
        of those that wait for one."""
        ...

    def abort_submissions(self, numbers: Iterable[int], *, message: str) -> None: ...

    def dispatch(self) -> None:
        """Send the requests that wait, as far as engines can take them."""
        ...


@dataclass(slots=True, frozen=True)
class _State:
    """What an engine is to be like, whichever requests it has."""

    settings: Settings | None = None
    """None: those of the start; the same for the next two."""
    weights: LoadWeights | None = None
    storage: StorageOrder | None = None
    released: frozenset[MemoryPart] = frozenset()


@dataclass(slots=True)
class _Sent:
    """What was sent to a line, or is in its job."""

    state: _State
    paused: PauseMode | None = None


@dataclass(slots=True, eq=False, frozen=True)
class _Pause:
    mode: PauseMode


class Orders:
    """Each method that returns normally has the effect on all engines that it is for, also on those
    that are started later; a change or a pause that raises has it on none. A pause always ends."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pauses: dict[int, list[_Pause]] = {}
        """Rank -> the pause that an operator wants, and above it those that it is about to get."""
        self._holds: list[_Pause] = []
        """Pauses of all ranks for work that is going on; they do not depend on operators."""
        self._state = _State()
        """The state that is in force, or about to be."""
        self.why_no_weights = ""
        """Why released weights could not be restored; "" once they are, and until that is tried."""
        self._started_with = _State()
        """What an engine that is started now has from its start."""
        self._told: dict[EngineLine, _Sent] = {}
        """What each line that has not ended has been told."""

    @property
    def paused(self) -> dict[int, PauseMode]:
        """Rank -> the pause that is in force for it, or about to be."""
        if self._holds:
            return dict.fromkeys(self._fleet.ranks, self._holds[-1].mode)
        return {rank: pauses[-1].mode for rank, pauses in self._pauses.items() if pauses}

    def asks_for_standstill(self, rank: int) -> bool:
        """Whether an operator wants that the rank computes nothing."""
        return bool(self._pauses.get(rank) or self._state.released)

    @property
    def holds_released(self) -> bool:
        """Whether memory is released, or about to be, and not resumed."""
        return bool(self._state.released)

    @property
    def storage(self) -> StorageOrder | None:
        """What engines that are started now do about their storage; None: as at the start."""
        return self._started_with.storage

    def attached(self, line: EngineLine) -> None:
        """The client has a new line; its engine was started just now."""
        self._told[line] = _Sent(self._started_with)

    def ended(self, line: EngineLine) -> None:
        del self._told[line]

    def tell(self, line: EngineLine) -> None:
        """The line takes requests from now on, or again: send it the orders that it has missed."""
        told, wanted, paused = self._told[line], self._state, self.paused.get(line.rank)
        before = told.state
        if wanted.weights is None and before.weights is not None:
            line.dismiss("It has weights that another engine could not load.")
            return
        if wanted.storage is None and isinstance(before.storage, DetachStorage):
            line.dismiss("It has no storage, and another engine kept it.")
            return
        if wanted.settings is not None and wanted.settings != before.settings:
            line.begin_change(wanted.settings)
        if wanted.storage != before.storage:
            line.begin_operation(_storage_order(wanted.storage))
        loads = wanted.weights is not None and wanted.weights is not before.weights
        released = before.released - {MemoryPart.WEIGHTS} if loads else before.released
        if (loads or released != wanted.released) and told.paused not in EMPTY:
            # It may have requests that were open when it was stopped: they go on with the new
            # weights.
            line.begin_pause(PauseMode.RETRACT)
            told.paused = PauseMode.RETRACT
        if wanted.weights is not None and loads:
            line.begin_operation(wanted.weights)
        if back := released - wanted.released:
            line.begin_operation(RestoreMemory(sorted(back)))
        if away := wanted.released - released:
            line.begin_operation(ReleaseMemory(sorted(away)))
        told.state = wanted
        if paused != told.paused:
            line.begin_pause(paused)
            told.paused = paused

    async def pause(self, mode: PauseMode, ranks: Collection[int] | None = None) -> int:
        """Pause the engines of these ranks (None: of all), and those that take their places;
        returns how many requests are paused. New requests go to the ranks that are not paused."""
        ranks = list(self._fleet.ranks if ranks is None else ranks)
        own = _Pause(mode)
        for rank in ranks:
            self._pauses.setdefault(rank, []).append(own)
        try:
            num_paused = await self._stop(mode, ranks)
        except BaseException:
            for rank in ranks:
                if own in self._pauses[rank]:  # the pause may have ended meanwhile
                    self._pauses[rank].remove(own)
            self._take_back()
            raise
        for rank in ranks:
            if own in self._pauses[rank]:
                del self._pauses[rank][: self._pauses[rank].index(own)]
        return num_paused

    async def resume(self, ranks: Collection[int] | None = None) -> None:
        """End the pause of these ranks (None: of all) for which an operator has asked."""
        ranks = list(self._fleet.ranks if ranks is None else ranks)
        for rank in ranks:
            self._pauses[rank] = []
        await self._go_on(ranks)

    @asynccontextmanager
    async def held(self, *, keep_pause: bool = False) -> AsyncIterator[None]:
        """End all requests, and have no engine compute within the block, whichever pauses begin and
        end meanwhile. keep_pause: engines are paused after a block that does not raise, as if an
        operator had asked for it."""
        hold = _Pause(PauseMode.ABORT)
        ranks = list(self._fleet.ranks)
        async with self._held_by(hold, ranks, keep_pause=keep_pause):
            await self._stop(hold.mode, ranks)
            yield

    @asynccontextmanager
    async def at_rest(self, *, flushes: bool, keep_pause: bool = False) -> AsyncIterator[None]:
        """Have no engine compute within the block, and end no request. Raises RequestError, with no
        engine changed, if one has requests that no pause holds up; flushes: or paused requests that
        keep memory. Requests that arrive meanwhile wait. keep_pause: as of ``held``."""
        ranks = list(self._fleet.ranks)
        if len(ranks) == 1 and not keep_pause:  # the engine itself does what it is told, or refuses
            yield
            return
        hold = _Pause(PauseMode.RETRACT)

        async def stand_still(line: EngineLine) -> None:
            if (told := self._told.get(line)) is not None:  # it may have ended
                # Also if it refuses: it is told to continue then, which does nothing.
                told.paused = told.paused or hold.mode
            await line.hold(flushes=flushes)

        async with self._held_by(hold, ranks, keep_pause=keep_pause):
            await self._fleet.on(None, stand_still)
            yield

    @asynccontextmanager
    async def _held_by(
        self, hold: _Pause, ranks: Collection[int], *, keep_pause: bool
    ) -> AsyncIterator[None]:
        """A hold is in force within the block, and with keep_pause after one that does not
        raise."""
        self._holds.append(hold)
        try:
            yield
            for rank in ranks if keep_pause else ():
                self._pauses[rank] = self._pauses.get(rank) or [hold]
        finally:
            self._holds.remove(hold)
            with suppress(EngineDeadError):  # what the work has done holds for the next engine, too
                await self._go_on(ranks)

    async def _stop(self, mode: PauseMode, ranks: Collection[int]) -> int:
        """Pause engines; returns how many requests are paused. With ``abort``, all requests end
        that are open now, wherever they are when the last engine is paused."""
        numbers = self._fleet.open_on(ranks) if mode is PauseMode.ABORT else []

        async def pause(line: EngineLine) -> PauseDone:
            told = self._told.get(line) or _Sent(_State())  # it may have ended since the call began
            had, told.paused = told.paused, mode
            try:
                return await line.pause(mode)
            except RequestError:
                told.paused = had
                raise

        done = await self._fleet.on(ranks, pause)
        self._fleet.abort_submissions(numbers, message=PAUSED)
        return sum(each.num_paused_reqs for each in done)

    async def _go_on(self, ranks: Collection[int]) -> None:
        """A pause of these ranks has ended; another one may be in force."""

        async def go_on(line: EngineLine) -> None:
            told, paused = self._told.get(line), self.paused.get(line.rank)
            if told is None or (paused is not None and paused == told.paused):
                return
            told.paused = paused
            if paused is None:
                await line.resume()
            else:
                await line.pause(paused)

        self._fleet.dispatch()
        try:
            await self._fleet.on(ranks, go_on)
        except BaseException:
            self._take_back()
            raise

    async def change(
        self,
        settings: Settings,
        options: list[OptionChange],
        *,
        before: Settings,
        by: str,
        why: str,
    ) -> None:
        """Have all engines work under these settings. before: the present ones."""

        async def change(line: EngineLine) -> None:
            await line.change(settings, options, by=by, why=why)

        self._state = replace(self._state, settings=before)
        await self._order(change, list(self._fleet.ranks), settings=settings)
        self._started_with = replace(self._started_with, settings=settings)

    async def load(self, weights: LoadWeights) -> list[OperationDone]:
        """Have all engines, which are ``held`` or ``at_rest``, compute with these weights, and note
        that engines which are started from now on have them from their start."""

        async def load(line: EngineLine) -> OperationDone:
            done = await line.operate(weights)
            if (told := self._told.get(line)) is not None:
                left = told.state.released - {MemoryPart.WEIGHTS}
                told.state = replace(told.state, released=left)
            return done

        done = await self._order(load, weights=weights)
        self._started_with = replace(self._started_with, weights=weights)
        left = self._state.released - {MemoryPart.WEIGHTS}
        self._state = replace(self._state, released=left)
        self.why_no_weights = ""
        return done

    async def use_storage(self, storage: StorageOrder) -> None:
        """Have all engines keep prefixes in this storage, or in none, and those that are started
        from now on."""
        await self._order(lambda line: line.operate(storage), storage=storage)
        self._started_with = replace(self._started_with, storage=storage)

    async def flush(self) -> bool:
        """Flush the caches if all engines can: each is idle, or its paused requests keep no memory,
        and no signal has stopped it. Returns whether they have."""
        if any(line.life.is_suspended for line in self._fleet.lines):
            return False
        try:
            async with self.at_rest(flushes=True):
                done = await self._fleet.on(None, lambda line: line.flush_cache())
        except RequestError as error:
            if error.status_code != 400:
                raise
            return False
        return all(each.is_flushed for each in done) and not any(
            line.life.is_suspended for line in self._fleet.lines
        )

    async def release(self, parts: Collection[MemoryPart]) -> None:
        """Have all engines give these parts of their memory back."""
        async with self.at_rest(flushes=MemoryPart.KV_CACHE in parts):
            wanted = self._state.released | set(parts)
            await self._keep_released(wanted, ReleaseMemory(list(parts)))

    async def restore(self, parts: Collection[MemoryPart]) -> None:
        """Have all engines take these parts of their memory again."""
        is_for_weights = MemoryPart.WEIGHTS in self._state.released.intersection(parts)
        try:
            await self._keep_released(self._state.released - set(parts), RestoreMemory(list(parts)))
        except RequestError as error:
            if is_for_weights:
                self.why_no_weights = error.message
            raise
        if is_for_weights:
            self.why_no_weights = ""

    def expect(self, released: frozenset[MemoryPart]) -> None:
        """Have engines that become ready from now on give these parts back, and no others. No
        engine is ready now."""
        self._state = replace(self._state, released=released)

    async def _keep_released(
        self, released: frozenset[MemoryPart], operation: ReleaseMemory | RestoreMemory
    ) -> None:
        await self._order(lambda line: line.operate(operation), released=released)

    async def _order(
        self,
        call: Callable[[EngineLine], Awaitable[T]],
        ranks: Collection[int] | None = None,
        **changes: Any,
    ) -> list[T]:
        """Have these fields of ``_State`` hold for all engines. call: brings them to one. ranks:
        all, if no engine has to be there; None: one has to."""
        before = {name: getattr(self._state, name) for name in changes}

        async def bring(line: EngineLine) -> T:
            told = self._told.get(line) or _Sent(_State())  # it may have ended since the call began
            had = {name: getattr(told.state, name) for name in changes}
            told.state = replace(told.state, **changes)
            try:
                return await call(line)
            except RequestError:
                told.state = replace(told.state, **had)
                raise

        self._state = replace(self._state, **changes)
        try:
            return await self._fleet.on(ranks, bring)
        except BaseException:
            self._state = replace(self._state, **before)
            self._take_back()
            raise

    def _take_back(self) -> None:
        for line in self._fleet.ready():
            self.tell(line)


def _storage_order(wanted: StorageOrder | None) -> StorageOrder:
    """What an engine is told that has missed it. None: it has attached a storage that another
    engine could not attach, where there was none."""
    if isinstance(wanted, AttachStorage):
        return msgspec.structs.replace(wanted, replaces=True)
    return DetachStorage()
