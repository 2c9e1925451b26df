"""The loads of experts, and their balancing among ranks while serving (--enable-eplb, decision
0067). Both belong to rank 0, which routes the same tokens as every rank."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from setpoint.core.control import ExpertLoads
from setpoint.core.errors import SetpointError
from setpoint.core.expert_placement import Placement, balanced, balancedness, rank_loads
from setpoint.engine.parallel.split import mixtures
from setpoint.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class ExpertBalancer:
    """Computes a new placement of the experts every so many steps, and then moves one layer before
    each step until it is reached."""

    def __init__(
        self,
        runner: ModelRunner,
        move: Callable[[int, Placement], None],
        *,
        every: int,
        at_most: float = 1.0,
    ) -> None:
        """move: fills the slots of a layer on all ranks, or raises SetpointError with nothing
        changed. every: number of steps between two balancings. at_most: the largest balancedness of
        the ranks at which experts are placed anew."""
        self.num_rebalances = 0
        self._runner = runner
        self._move = move
        self._every = every
        self._at_most = at_most
        self._num_steps = 0
        self._pending = deque[tuple[int, Placement]]()
        self._news = ""
        """What the log says once everything pending is done."""
        self._is_failing = False
        """Whether the last balancing has failed, of which the log then says no more."""

    def before_step(self) -> None:
        """Called before each step."""
        self._num_steps += 1
        if self._pending:
            self._move_one(*self._pending.popleft())
        elif self._num_steps > self._every:
            self._num_steps = 0
            self._plan()

    def _plan(self) -> None:
        size, before, after = self._runner.backends.group.size, [], []
        planned: list[tuple[int, Placement]] = []
        for layer, mixture in enumerate(mixtures(self._runner.model)):
            slots = mixture.expert_slots
            load = slots.new_load()
            found = balanced(load, slots.placement, size)
            if found != slots.placement:
                planned.append((layer, found))
            before.append(rank_loads(load, slots.placement, size))
            after.append(rank_loads(load, found, size))
        as_it_was = balancedness(np.stack(before))
        if not planned or as_it_was > self._at_most:
            return
        self._pending.extend(planned)
        layers = "layer" if len(planned) == 1 else "layers"
        self._news = (
            f"Experts are placed anew in {len(planned)} {layers}. Balancedness of the last"
            f" {self._every} steps: {as_it_was:.3f}; with the new placement it would have been"
            f" {balancedness(np.stack(after)):.3f}."
        )

    def _move_one(self, layer: int, placement: Placement) -> None:
        try:
            self._move(layer, placement)
        except SetpointError as error:
            self._pending.clear()
            if not self._is_failing:
                logger.warning("The experts stay where they are: %s", error)
            self._is_failing = True
            return
        if not self._pending:
            self._is_failing = False
            self.num_rebalances += 1
            logger.info("%s", self._news)


def expert_loads(runner: ModelRunner, balancer: ExpertBalancer | None) -> ExpertLoads | None:
    """The loads at this moment; None for a model without experts, and while its weights are
    released."""
    found = [] if runner.model is None else mixtures(runner.model)
    if not found:
        return None
    slots = [mixture.expert_slots for mixture in found]
    size = 1 if slots[0].own is None else runner.backends.group.size
    experts = np.stack([each.expert_load() for each in slots])
    ranks = np.stack([each.slot_load().reshape(size, -1).sum(1) for each in slots])
    return ExpertLoads(
        num_layers=len(slots),
        num_experts=experts.shape[1],
        num_tokens=int(experts.sum()),
        num_unused=int((experts == 0).sum()),
        balancedness=balancedness(experts),
        rank_tokens=ranks.sum(0).tolist(),
        eplb_balancedness=balancedness(ranks),
        num_rebalances=0 if balancer is None else balancer.num_rebalances,
    )
