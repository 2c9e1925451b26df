"""Drives an executor by hand: a minimal sequencer for tests of the data plane, with one page range
per slot and no policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from setpoint.core.cachegroups import cache_layout
from setpoint.core.executor import Executor
from setpoint.core.plan import OWN_LENGTH, Admit, PlanBuilder, TokenMasks
from setpoint.core.request import Ids
from setpoint.core.result import StepResult
from setpoint.core.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def allocate_rows(runner: Any, *, num_rows: int, max_slots: int, context_len: int) -> int:
    """Allocate a pool of ``num_rows`` page rows; returns the number of the model's cache groups."""
    num_groups = len(cache_layout(runner.spec, context_len).groups)
    runner.allocate(num_pages=num_rows * num_groups, max_slots=max_slots, context_len=context_len)
    return num_groups


@dataclass
class Driver:
    """Drives an executor. Slot s owns the page rows from s · pages_per_slot on; with ``share`` a
    slot begins with pages of another slot."""

    executor: Executor
    page_size: int
    pages_per_slot: int
    num_groups: int = 1
    """Cache groups of the model."""
    step_id: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """Slot -> the ids sampled since its admission."""

    def admit(
        self,
        plan: PlanBuilder,
        slot: int,
        ids: Sequence[int],
        *,
        num_prompt: int | None = None,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        share: tuple[int, int] = (0, 0),
        **more: object,
    ) -> None:
        """Add an admission to the plan. Sequence ids equal slots. share: (another slot, how many of
        its first pages to begin with)."""
        array = np.array(ids, np.int32)
        plan.admits.append(
            Admit(
                slot,
                slot,
                array,
                len(array) if num_prompt is None else num_prompt,
                sampling,
                seed,
                **more,
            )
        )  # type: ignore[arg-type]
        pages = self.pages(slot)
        other, count = share
        shared = count * self.num_groups
        pages[:shared] = self.pages(other)[:shared]
        plan.map_pages(slot, 0, pages)
        self.outputs[slot] = []

    def pages(self, slot: int) -> Ids:
        num_pages = self.pages_per_slot * self.num_groups
        return np.arange(num_pages, dtype=np.int32) + 1 + slot * num_pages

    def plan(self) -> PlanBuilder:
        self.step_id += 1
        return PlanBuilder(self.step_id, self.num_groups)

    def run(self, plan: PlanBuilder, masks: TokenMasks | None = None) -> StepResult:
        step = self.executor.submit(plan.build())
        step.finish(masks)
        result = step.result()
        bounds = pairwise(result.offsets.tolist())
        for slot, (begin, end) in zip(result.seq_ids.tolist(), bounds, strict=True):
            self.outputs[slot] += result.token_ids[begin:end].tolist()
        return result

    def decode(self, slots: Sequence[int], steps: int = 1) -> list[StepResult]:
        results = []
        for _ in range(steps):
            plan = self.plan()
            for slot in slots:
                plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
            results.append(self.run(plan))
        return results

    def generate(
        self,
        prompts: Mapping[int, Sequence[int]],
        num_tokens: int,
        *,
        chunk: int = 1 << 30,
        sampling: SamplingParams = GREEDY,
    ) -> dict[int, list[int]]:
        """The outputs of each slot: prefill the prompts in chunks, all slots together, then decode
        until each has ``num_tokens``."""
        plan = self.plan()
        for slot, ids in prompts.items():
            self.admit(plan, slot, ids, sampling=sampling, seed=slot)
        done = dict.fromkeys(prompts, 0)
        while any(len(self.outputs[slot]) < num_tokens for slot in prompts):
            for slot, ids in prompts.items():
                start = done[slot]
                if start < len(ids):
                    count = min(chunk, len(ids) - start)
                    done[slot] = start + count
                    plan.add_row(slot, slot, start, count, int(done[slot] == len(ids)))
                elif len(self.outputs[slot]) < num_tokens:
                    plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
            self.run(plan)
            plan = self.plan()
        return {slot: list(self.outputs[slot]) for slot in prompts}
