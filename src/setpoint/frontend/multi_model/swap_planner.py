"""Decides which of several models are loaded, whose requests wait, and which model is unloaded for
another (decision 0081).

Pure: it is told what happens and what the time is, and answers with what is to be done. Knows
nothing of engines, processes or HTTP.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class LoadState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(slots=True, frozen=True)
class AdmitRequests:
    """Send the model's waiting requests to its engine."""

    name: str


@dataclass(slots=True, frozen=True)
class LoadModel:
    name: str


@dataclass(slots=True, frozen=True)
class UnloadModel:
    name: str
    why: str


@dataclass(slots=True, frozen=True)
class CloseModel:
    """Say that the model's new requests wait from now on, because another model has waited long
    enough for its room."""

    name: str
    wanted: str


ModelAction = AdmitRequests | LoadModel | UnloadModel | CloseModel


@dataclass(slots=True)
class _Model:
    name: str
    state: LoadState = LoadState.UNLOADED
    is_open: bool = True
    """Whether new requests are admitted while it is loaded; False: another model has waited long
    enough, and gets this one's room once the admitted requests have ended."""
    num_running: int = 0
    """Its admitted requests."""
    waiting: deque[float] = field(default_factory=deque)
    """When each of its other requests came, oldest first."""
    wished_at: float | None = None
    """When a client asked for the model to be loaded, if it is not loaded yet."""
    is_dismissed: bool = False
    """Whether a client asked for it to be unloaded once its requests have ended."""
    loaded_at: float = 0.0
    used_at: float = 0.0
    """When its last request ended, or it was asked to be kept."""
    keep_s: float = math.inf
    """How long it stays loaded without requests."""

    @property
    def is_idle(self) -> bool:
        return self.state is LoadState.LOADED and not self.num_running and not self.waiting

    @property
    def expires_at(self) -> float:
        return self.used_at + self.keep_s

    @property
    def wanted_since(self) -> float:
        """When its oldest request, or the wish, came; infinite if there is none."""
        times = [*list(self.waiting)[:1], *([] if self.wished_at is None else [self.wished_at])]
        return min(times, default=math.inf)


class SwapPlanner:
    """Contract: at most ``most`` models are not UNLOADED at any time; a model with admitted
    requests is not unloaded; if admitted requests end, every waiting request is admitted at some
    time.

    A model without requests makes room at once, the one first that has been idle for longest. If
    all loaded models have requests, a waiting model gets room after its oldest request has waited
    for ``turn_s`` and the other model has been loaded for as long.
    """

    def __init__(self, names: Iterable[str], *, most: int, turn_s: float) -> None:
        self._models = {name: _Model(name) for name in names}
        self._most = most
        self._turn_s = turn_s

    def state(self, name: str) -> LoadState:
        return self._models[name].state

    def num_running(self, name: str) -> int:
        return self._models[name].num_running

    def num_waiting(self, name: str) -> int:
        return len(self._models[name].waiting)

    def wanted_since(self, name: str) -> float:
        """When the oldest of what waits for the model came; infinite: nothing waits."""
        return self._models[name].wanted_since

    def expires_at(self, name: str) -> float:
        """When the model is unloaded if no request comes for it; infinite: only for another
        model."""
        return self._models[name].expires_at

    def arrived(self, name: str, now: float) -> bool:
        """A request for the model has come. Returns whether it is admitted; otherwise it waits for
        an AdmitRequests."""
        model = self._models[name]
        if model.state is LoadState.LOADED and model.is_open:
            model.num_running += 1
            return True
        model.waiting.append(now)
        return False

    def gave_up(self, name: str, position: int) -> None:
        """A waiting request has ended. position: how many older ones of its model wait."""
        del self._models[name].waiting[position]

    def ended(self, name: str, now: float) -> None:
        """An admitted request has ended."""
        model = self._models[name]
        assert model.num_running > 0
        model.num_running -= 1
        model.used_at = now

    def keep(self, name: str, seconds: float, now: float) -> None:
        """Have the model stay loaded for so long after its last request: 0 not at all, infinite
        until another model needs its room."""
        model = self._models[name]
        model.keep_s, model.used_at = seconds, now

    def wish(self, name: str, now: float) -> None:
        """Have the model loaded as if a request waited for it."""
        model = self._models[name]
        if model.state is not LoadState.LOADED and model.wished_at is None:
            model.wished_at = now

    def dismiss(self, name: str) -> None:
        """Have the model unloaded as soon as it has no requests."""
        model = self._models[name]
        model.is_dismissed, model.wished_at = model.state is not LoadState.UNLOADED, None

    def loaded(self, name: str, now: float) -> None:
        """A LoadModel is done, or the model was loaded at the start."""
        model = self._models[name]
        model.wished_at = None
        model.state, model.is_open = LoadState.LOADED, True
        model.loaded_at = model.used_at = now

    def unloaded(self, name: str) -> None:
        """An UnloadModel is done."""
        model = self._models[name]
        model.state, model.is_dismissed = LoadState.UNLOADED, False

    def failed(self, name: str) -> None:
        """A LoadModel has failed, or the model's engine has gone for good. The caller ends the
        requests that wait."""
        model = self._models[name]
        model.state, model.wished_at, model.is_dismissed = LoadState.UNLOADED, None, False

    def stayed(self, name: str, now: float) -> None:
        """An UnloadModel was impossible."""
        self._models[name].state = LoadState.LOADED
        self._models[name].used_at = now

    def step(self, now: float) -> list[ModelAction]:
        """What is to be done now. Call it after every event, and at the time ``next_at``."""
        models = list(self._models.values())
        coming = sorted(
            (
                each
                for each in models
                if each.state is LoadState.UNLOADED and each.wanted_since < math.inf
            ),
            key=lambda each: each.wanted_since,
        )
        room = self._most - sum(each.state is not LoadState.UNLOADED for each in models)
        found: list[ModelAction] = []
        for model in coming[: max(room, 0)]:
            model.state = LoadState.LOADING
            found.append(LoadModel(model.name))
        # Room that is being made, or will be, is for those who have waited longest.
        waiting = coming[max(room, 0) :]
        being_made = sum(each.state is LoadState.UNLOADING for each in models)
        found += self._make_room(waiting[being_made:], now)
        found += self._admit()
        for model in models:
            if model.is_idle and (model.is_dismissed or model.expires_at <= now):
                model.state = LoadState.UNLOADING
                why = "a client asked for it" if model.is_dismissed else "its keep_alive has passed"
                found.append(UnloadModel(model.name, why))
        return found

    def _make_room(self, waiting: list[_Model], now: float) -> list[ModelAction]:
        """Unload models for these, in order, or close those that are to be unloaded once their
        requests have ended."""
        found: list[ModelAction] = []
        here = [each for each in self._models.values() if each.state is LoadState.LOADED]
        # A closed model without admitted requests comes first: it was closed for the oldest.
        free = sorted(
            (each for each in here if not each.num_running and (each.is_idle or not each.is_open)),
            key=lambda each: (each.is_open, each.used_at),
        )
        busy = sorted((each for each in here if each not in free), key=lambda each: each.loaded_at)
        were_open = {each.name for each in here if each.is_open}
        for each in here:
            each.is_open = True
        for wanted in waiting:
            model = free.pop(0) if free else None
            if model is None and busy:
                since = max(wanted.wanted_since, busy[0].loaded_at)
                if now - since >= self._turn_s:
                    model = busy.pop(0)
            if model is not None and model.num_running:
                model.is_open = False
                if model.name in were_open:
                    found.append(CloseModel(model.name, wanted.name))
            elif model is not None:
                model.state = LoadState.UNLOADING
                found.append(UnloadModel(model.name, f"{wanted.name} needs its room"))
        return found

    def _admit(self) -> list[ModelAction]:
        found: list[ModelAction] = []
        for model in self._models.values():
            if model.state is LoadState.LOADED and model.is_open and model.waiting:
                model.num_running += len(model.waiting)
                model.waiting.clear()
                found.append(AdmitRequests(model.name))
        return found

    def next_at(self, now: float) -> float:
        """When ``step`` has something to do although nothing happens; infinite: never."""
        times = [math.inf]
        for model in self._models.values():
            if model.is_idle:
                times.append(model.expires_at)
            if model.state is LoadState.UNLOADED and model.wanted_since < math.inf:
                times += [
                    max(model.wanted_since, each.loaded_at) + self._turn_s
                    for each in self._models.values()
                    if each.state is LoadState.LOADED and each.is_open
                ]
        return min((each for each in times if each > now), default=math.inf)
