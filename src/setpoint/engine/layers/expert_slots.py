"""Where the experts of a layer lie, and how many tokens they get.

On several ranks, either each has a part of every expert, or each has whole experts in slots of its
own (``core.expert_placement``). Slots can be filled anew between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from setpoint.core.expert_placement import Loads, Placement, of_experts, places, trivial
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.parallel.group import Span


class Matrices(Protocol):
    """The matrices of one kind of the experts in this rank's slots (``layers.experts.Grouped``)."""

    def hold(self, layers: list[Any], first: int) -> None:
        """Hold those of these layers, in the slots from ``first`` on."""
        ...

    def refresh(self) -> None:
        """Multiply by the matrices that are held now, also in steps that have been captured."""
        ...


class ExpertSlots:
    """The slots of one layer, and a count of their tokens that each step adds to."""

    def __init__(self, experts: nn.ModuleList, groups: Mapping[str, Matrices]) -> None:
        """groups: attribute of an expert -> the matrices of that name, together."""
        self.own: Span | None = None
        """The slots of this rank; None if it has a part of every expert. Written by ``divide``."""
        self.placement = trivial(len(experts), len(experts))
        """The experts in the slots of all ranks; written by ``divide`` and ``place``."""
        self._experts = experts
        self._groups = groups
        self._load: torch.Tensor
        """[slots] int64: the tokens of each slot since the experts were placed."""
        self._places: torch.Tensor | None = None
        """The placement as ``Ops.place_experts`` reads it; None if ``own`` is."""
        self._past: Loads | int = 0
        """The tokens of each expert before they were placed."""
        self._seen: Loads | int = 0
        """The result of ``expert_load`` when ``new_load`` was called last."""

    def divide(self, placement: Placement, own: Span) -> None:
        """Hold only the experts in the slots ``own``, whole. Must be called before weights are
        loaded."""
        self.own, self.placement = own, placement
        self._leave_out(set(range(len(self._experts))) - self._held(placement))
        self._fill()

    def count_on(self, device: torch.device) -> None:
        """Make the tables on the experts' device. Must be called once the weights are loaded."""
        self._load = torch.zeros(len(self.placement), dtype=torch.int64, device=device)
        if self.own is not None:
            table = places(self.placement, len(self._experts))
            self._places = torch.from_numpy(table).to(device)

    def of(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """The slots of experts ids [T, k] int32, as many. Counts them."""
        positions: torch.Tensor | None = ctx.batches[0].positions
        if self._places is not None:
            positions = ctx.data.gather(positions.unsqueeze(1)).view(-1)
        elif len(positions) != len(ids):  # the others' are not worth an exchange of their own
            positions = None
        return ctx.ops.place_experts(ids, self._load, positions, self._places)

    def gather(self, parts: torch.Tensor, slots: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """parts [T · k, C], of which this rank has the rows of its slots -> all rows, or its own
        columns of all rows if it has a part of every expert."""
        if self.own is None:
            return parts
        return ctx.group.gather_rows(parts, slots.view(-1), self.own)

    def take(self, placement: Placement) -> list[nn.Module]:
        """Make room for the experts that this rank needs for a placement and does not hold. Their
        layers are returned, and must be loaded next."""
        taken = self._held(placement) - self._held(self.placement)
        for expert in taken:
            for name in self._groups:
                getattr(self._experts[expert], name).take()
        return [module for expert in taken for module in self._experts[expert].modules()]

    def drop(self) -> None:
        """Give up what ``take`` has made room for."""
        self._leave_out(set(range(len(self._experts))) - self._held(self.placement))

    def place(self, placement: Placement) -> None:
        """Fill the slots anew, after ``take`` and loading: from the next step on, captured or not,
        tokens go there. Experts that are not in this rank's slots any more are given up."""
        assert self._places is not None
        self._past = self.expert_load()
        left = self._held(self.placement) - self._held(placement)
        self.placement = placement
        self._fill()
        for group in self._groups.values():
            group.refresh()
        self._places.copy_(torch.from_numpy(places(placement, len(self._experts))))
        self._load.zero_()
        self._leave_out(left)

    def slot_load(self) -> Loads:
        """The tokens of each slot since the experts were placed."""
        return self._load.cpu().numpy()

    def expert_load(self) -> Loads:
        """The tokens of each expert since the weights were loaded."""
        now = of_experts(self.slot_load(), self.placement, len(self._experts))
        return self._past + now

    def new_load(self) -> Loads:
        """The tokens of each expert since the last call."""
        now = self.expert_load()
        found, self._seen = now - self._seen, now
        return found

    @property
    def one(self) -> int:
        """An expert that this rank holds."""
        return self.placement[0 if self.own is None else self.own[0]]

    def _held(self, placement: Placement) -> set[int]:
        """The experts in this rank's slots."""
        assert self.own is not None
        return set(placement[slice(*self.own)])

    def _fill(self) -> None:
        assert self.own is not None
        held = [self._experts[expert] for expert in self.placement[slice(*self.own)]]
        for name, group in self._groups.items():
            group.hold([getattr(expert, name) for expert in held], self.own[0])

    def _leave_out(self, experts: set[int]) -> None:
        for expert in experts:
            for name in self._groups:
                getattr(self._experts[expert], name).leave_out()
