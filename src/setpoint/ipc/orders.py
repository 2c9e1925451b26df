"""What the frontend has decided for its engines (the live settings, the weights, released memory
and pauses), and what each engine has been told of it.

An engine can miss a call: it is starting, stopped by a signal, or dead. It is told what it has
missed before it gets the next request, so all engines work under the same orders. A pause may be
one of some ranks only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from setpoint.core.control import OperationDone, OptionChange, PauseMode, Standstill
from setpoint.core.errors import RequestError
from setpoint.core.operations import LoadWeights, MemoryPart, ReleaseMemory, RestoreMemory
from setpoint.core.settings import Settings
from setpoint.ipc.line import EngineLine

T = TypeVar("T")


class OnRanks(Protocol):
    """Makes a control call on the engines of these ranks that take requests; None: of all."""

    async def __call__(
        self, ranks: Collection[int] | None, call: Callable[[EngineLine], Awaitable[T]]
    ) -> list[T]: ...


@dataclass(slots=True)
class _Told:
    """What was sent to a line, or is in its job."""

    settings: Settings | None
    """None: those of the start; the same for weights."""
    weights: LoadWeights | None
    paused: PauseMode | None = None
    released: frozenset[MemoryPart] = frozenset()


@dataclass(slots=True, eq=False, frozen=True)
class _Pause:
    mode: PauseMode


class Orders:
    """Each method that returns normally has the effect on all engines that it is for; a change or a
    pause that raises has it on none. A pause always ends."""

    def __init__(
        self,
        on: OnRanks,
        ready: Callable[[], list[EngineLine]],
        ranks: Callable[[], Collection[int]],
        resumed: Callable[[], None],
    ) -> None:
        """ready: returns the lines that take requests. ranks: returns those that there are.
        resumed: called when ranks take requests again that were paused."""
        self._on = on
        self._ready = ready
        self._ranks = ranks
        self._resumed = resumed
        self._pauses: dict[int, list[_Pause]] = {}
        """Rank -> its pause, and above it those that it is about to get."""
        self._settings: Settings | None = None
        """In force, or about to be; None: those of the start."""
        self._weights: LoadWeights | None = None
        """The same."""
        self._released: frozenset[MemoryPart] = frozenset()
        """The same."""
        self.why_no_weights = ""
        """Why released weights could not be restored; "" once they are, and until that is tried."""
        self._started_with = _Told(None, None)
        """What an engine that is started now has from its start."""
        self._told: dict[EngineLine, _Told] = {}
        """For each line that has not ended."""

    @property
    def paused(self) -> dict[int, PauseMode]:
        """Rank -> the pause that is in force for it, or about to be."""
        return {rank: pauses[-1].mode for rank, pauses in self._pauses.items() if pauses}

    def attached(self, line: EngineLine) -> None:
        """The client has a new line; its engine was started just now."""
        self._told[line] = replace(self._started_with)

    def ended(self, line: EngineLine) -> None:
        del self._told[line]

    def tell(self, line: EngineLine) -> None:
        """The line takes requests from now on, or again: send it the orders that it has missed."""
        told, paused = self._told[line], self.paused.get(line.rank)
        if self._settings is not None and self._settings != told.settings:
            line.begin_change(self._settings)
            told.settings = self._settings
        if self._weights is None and told.weights is not None:
            line.dismiss("It has weights that another engine could not load.")
            return
        if self._weights is not None and self._weights is not told.weights:
            # It may have requests that were open when it was stopped: they go on with the new
            # weights.
            line.begin_pause(PauseMode.RETRACT)
            line.begin_operation(self._weights)
            told.weights, told.paused = self._weights, PauseMode.RETRACT
            told.released -= {MemoryPart.WEIGHTS}
        if self._released != told.released:
            self._tell_released(line, told)
        if paused != told.paused:
            line.begin_pause(paused)
            told.paused = paused

    def _tell_released(self, line: EngineLine, told: _Told) -> None:
        line.begin_pause(PauseMode.RETRACT)
        told.paused = PauseMode.RETRACT
        if back := told.released - self._released:
            line.begin_operation(RestoreMemory(sorted(back)))
        if away := self._released - told.released:
            line.begin_operation(ReleaseMemory(sorted(away)))
        told.released = self._released

    async def pause(self, mode: PauseMode, ranks: Collection[int] | None = None) -> int:
        """Pause the engines of these ranks (None: of all), and those that take their places;
        returns how many requests are paused. New requests go to the ranks that are not paused."""
        ranks_now = list(self._ranks() if ranks is None else ranks)
        own = _Pause(mode)

        async def pause(line: EngineLine) -> Standstill:
            if line in self._told:  # it may have ended since the call began
                self._told[line].paused = mode
            return await line.pause(mode)

        for rank in ranks_now:
            self._pauses.setdefault(rank, []).append(own)
        try:
            done = await self._on(ranks, pause)
        except BaseException:
            for rank in ranks_now:
                if own in self._pauses[rank]:  # the pause may have ended meanwhile
                    self._pauses[rank].remove(own)
            self._take_back()
            raise
        for rank in ranks_now:
            if own in self._pauses[rank]:
                del self._pauses[rank][: self._pauses[rank].index(own)]
        return sum(each.num_paused_reqs for each in done)

    async def resume(self, ranks: Collection[int] | None = None) -> None:
        """End the pause of these ranks (None: of all)."""

        async def resume(line: EngineLine) -> None:
            if line in self._told:
                self._told[line].paused = None
            await line.resume()

        for rank in self._ranks() if ranks is None else ranks:
            self._pauses[rank] = []
        self._resumed()
        await self._on(ranks, resume)

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
            if line in self._told:
                self._told[line].settings = settings
            await line.change(settings, options, by=by, why=why)

        self._settings = settings
        try:
            await self._on(None, change)
        except BaseException:
            self._settings = before
            self._take_back()
            raise
        self._started_with.settings = settings

    async def load(self, weights: LoadWeights) -> list[OperationDone]:
        """Have all engines compute with these weights, and note that engines which are started from
        now on have them from their start."""
        before = self._weights

        async def load(line: EngineLine) -> OperationDone:
            told = self._told.get(line) or _Told(None, None)
            had, told.weights = told.weights, weights
            try:
                done = await line.operate(weights)
            except RequestError:
                told.weights = had
                raise
            told.released -= {MemoryPart.WEIGHTS}
            return done

        self._weights = weights
        try:
            done = await self._on(None, load)
        except BaseException:
            self._weights = before
            self._take_back()
            raise
        self._started_with.weights = weights
        self._released -= {MemoryPart.WEIGHTS}
        self.why_no_weights = ""
        return done

    async def release(self, parts: Collection[MemoryPart]) -> None:
        """Have all engines give these parts of their memory back."""
        await self._keep_released(self._released | set(parts), ReleaseMemory(list(parts)))

    async def restore(self, parts: Collection[MemoryPart]) -> None:
        """Have all engines take these parts of their memory again."""
        is_for_weights = MemoryPart.WEIGHTS in self._released.intersection(parts)
        try:
            await self._keep_released(self._released - set(parts), RestoreMemory(list(parts)))
        except RequestError as error:
            if is_for_weights:
                self.why_no_weights = error.message
            raise
        if is_for_weights:
            self.why_no_weights = ""

    def expect(self, released: frozenset[MemoryPart]) -> None:
        """Have engines that become ready from now on give these parts back, and no others. No
        engine is ready now."""
        self._released = released

    async def _keep_released(
        self, released: frozenset[MemoryPart], operation: ReleaseMemory | RestoreMemory
    ) -> None:
        before = self._released

        async def operate(line: EngineLine) -> None:
            told = self._told.get(line) or _Told(None, None)
            had, told.released = told.released, released
            try:
                await line.operate(operation)
            except RequestError:
                told.released = had
                raise

        self._released = released
        try:
            await self._on(None, operate)
        except BaseException:
            self._released = before
            self._take_back()
            raise

    def _take_back(self) -> None:
        for line in self._ready():
            self.tell(line)
