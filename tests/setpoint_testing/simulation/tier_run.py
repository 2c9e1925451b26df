"""Simulated runs of servers with cache tiers: two lives on one storage, the first with other weights and
without faults, the second with everything that can go wrong with engines, transfers and the storage.

The pools are too small for what the requests have in common, so prefixes are evicted and loaded again.
What each request gets alone on a server without tiers, it must get here.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from setpoint.core.control import PauseMode
from setpoint.core.operations import MemoryPart
from setpoint_testing.simulation.clients import Order, draw_orders, letters
from setpoint_testing.simulation.model import token_after
from setpoint_testing.simulation.run import (
    PATIENCE_S,
    Plan,
    Report,
    Run,
    alone,
    judge,
)
from setpoint_testing.simulation.tiers import SharedStorage, SimulatedTiers, Trouble
from setpoint_testing.simulation.world import Setting, options_of

NUM_ORDERS = 14
BUSY_S = 3.0
MOST_PROMPT = 130
WEIGHTS = ("simulated", "weights 1")
"""The weights that a server starts with, and others."""
TROUBLES: tuple[Trouble, ...] = ("errors", "slow", "slow", "hang")


def tier_plan_of(seed: int) -> Plan:
    rng = random.Random(f"tiers {seed}")
    ranks = rng.choice([1, 1, 2, 3])
    storage = {
        "block_tokens": rng.choice([8, 16]),
        "prefetch_threshold": rng.choice([8, 16, 32]),
        "prefetch_timeout_base": rng.choice([0.05, 0.3, 1.0]),
    }
    options = options_of(
        {
            "dp_size": ranks,
            "engine_standby": ranks == 1 and rng.random() < 0.3,
            "max_engine_restarts": 1000,
            "watchdog_timeout": 5.0,
            "max_total_tokens": rng.choice([160, 224, 320]),
            "max_running_requests": rng.randrange(1, 5),
            "page_size": rng.choice([1, 4, 8]),
            "schedule_policy": rng.choice(["fcfs", "lpm"]),
            "chunked_prefill_size": rng.choice([-1, 16, 64]),
            "enable_mixed_chunk": rng.random() < 0.3,
            "random_seed": 0,
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config": json.dumps(storage),
            "hicache_write_policy": rng.choice(
                ["write_through", "write_through", "write_through_selective", "write_back"]
            ),
            "hicache_storage_prefetch_policy": rng.choice(
                ["timeout", "best_effort", "wait_complete"]
            ),
        }
    )
    setting = Setting.drawn(options, rng, [0, 1])
    return Plan(
        seed,
        setting,
        list(_draw_orders(rng, ranks)),
        num_faults=rng.choice([2, 4, 8]),
        with_engine_faults=rng.random() < 0.2,
        num_operators=rng.randrange(5),
    )


def _draw_orders(rng: random.Random, ranks: int) -> list[Order]:
    """Prompts with beginnings in common, more of them than a pool holds; some go on where another one
    ends, or will end."""
    beginnings = [tuple(letters(rng, rng.randrange(24, 80))) for _ in range(4)]
    tails = [tuple(letters(rng, rng.randrange(1, 12))) for _ in range(3)]
    orders: list[Order] = []
    for number, order in enumerate(draw_orders(rng, NUM_ORDERS, seconds=BUSY_S, ranks=ranks)):
        prompt, at, tail = rng.choice(beginnings), order.at, rng.choice(tails)
        namespace = rng.choice(["", "", "", "somebody's"])
        if orders and rng.random() < 0.3:
            before = rng.choice(orders)
            prompt = _with_outputs(before, rng.randrange(2, 20))
            at = max(0.0, before.at + rng.uniform(-0.1, 0.4))
            namespace = before.options.namespace
        orders.append(
            replace(
                order,
                rid=f"r{number:02}",  # an abort names the beginning of rids
                at=at,
                prompt=(prompt + tail)[:MOST_PROMPT],
                options=msgspec.structs.replace(order.options, namespace=namespace),
                is_aborted_after=rng.uniform(0, 0.6) if rng.random() < 0.15 else None,
            )
        )
    return orders


def _with_outputs(order: Order, count: int) -> tuple[int, ...]:
    """The prompt of an order with the outputs of its first sequence, as far as nothing ends it."""
    seed = order.sampling.sampling_seed
    assert seed is not None
    ids = list(order.prompt)
    for _ in range(count):
        ids.append(token_after(np.array(ids, np.int32), seed))
    return tuple(ids)


class TierRun(Run):
    """A life of a server with cache tiers."""

    def __init__(self, plan: Plan, storage: SharedStorage, *, is_disturbed: bool = True) -> None:
        super().__init__(plan, is_disturbed=is_disturbed, storage=storage)
        self.storage = storage

    def _events(self) -> list[Coroutine[Any, Any, None]]:
        rng, storage = self.rng, self.storage
        faults: list[Callable[[], None]] = [
            self._kill,
            self._crash,
            self._step_fault,
            self._next_start,
            self._stop,
            self._slow,
            self._trouble,
            self._trouble,
            self._trouble,
            self._doom,
            self._doom,
            storage.damage,
            storage.lose,
            self._double,
        ]
        if self.plan.with_engine_faults:
            faults += [self._message_fault, self._close_link]
        operators = [self._pause, self._load, self._load, self._flush, self._flush_at_rest]
        operators += [self._release, self._change]
        events = [
            self._later(rng.uniform(0, BUSY_S), rng.choice(faults))
            for _ in range(self.plan.num_faults)
        ]
        return events + [
            self._operate(rng.uniform(0, BUSY_S), rng.choice(operators))
            for _ in range(self.plan.num_operators)
        ]

    async def _undisturbed(self) -> None:
        """Leave blocks of both weights behind."""
        await self._load_weights(WEIGHTS[1])
        await super()._undisturbed()
        await self._load_weights(WEIGHTS[0])
        await asyncio.sleep(1.0)  # until it knows them
        for order in self.rng.sample(self.plan.orders, NUM_ORDERS // 2):
            await self.clients.ask(
                replace(
                    order,
                    rid=f"{order.rid} again",
                    leaves_after=None,
                    is_aborted_after=None,
                    poison=None,
                )
            )

    # ------------------------------------------------------------------ what happens

    def _trouble(self) -> None:
        """The storage fails, is slow or does not answer for a while."""
        trouble = self.rng.choice(TROUBLES)
        self.world.note("storage", trouble)
        self.storage.begin(trouble)
        self.world.loop.call_later(self.rng.choice([0.2, 1.0, 4.0, 30.0]), self._recover)

    def _recover(self) -> None:
        self.world.note("storage", "recovers")
        self.storage.recover()

    def _doom(self) -> None:
        """An engine is killed in the middle of a job."""
        self.storage.doomed = self.rng.choice(["lookup", "load", "save", "save"])

    def _double(self) -> None:
        self.storage.doubles += 5

    async def _load(self) -> None:
        await self._load_weights(self.rng.choice(WEIGHTS))

    async def _flush_at_rest(self) -> None:
        """Flush the cache as a trainer does: nothing runs, and nothing computed before is used
        again."""
        orders = self.service.engine.orders
        async with self.loading:
            await orders.pause(PauseMode.RETRACT)
            try:
                self.seen["flushes at rest"] += 1
                await self.service.engine.orders.flush()
            finally:
                await orders.resume()

    async def _release(self) -> None:
        orders, parts = self.service.engine.orders, [MemoryPart.KV_CACHE]
        if self.rng.random() < 0.5:
            parts.append(MemoryPart.WEIGHTS)
        async with self.loading:
            await orders.pause(PauseMode.RETRACT)
            try:
                self.seen["releases"] += 1
                self.world.note("operator", f"releases {parts}")
                await orders.release(parts)
                await asyncio.sleep(self.rng.uniform(0, 1))
            finally:
                await self._restore(parts)
                await orders.resume()

    # ------------------------------------------------------------------ the end

    async def _check_rest(self) -> None:
        self.storage.doomed = None
        self._recover()
        async with asyncio.timeout(PATIENCE_S):
            while any(
                isinstance(each.tiers, SimulatedTiers) and each.tiers.is_busy and not each.is_hung
                for each in self.world.living()
            ):
                await asyncio.sleep(0.5)
        for engine in self.world.living():
            if engine.loop is not None and (tiers := engine.scheduler.state.tiers) is not None:
                self.storage.seen["tiers off"] += bool(tiers.off)
                self.storage.seen["stores off"] += any(
                    tier.off
                    for tier in engine.tiers.real.tiers  # type: ignore[union-attr]
                )
        await super()._check_rest()


def simulate_tiers(seed: int) -> Report:
    """Run a seed and judge it; ``Report.wrong`` is empty if all went well."""
    plan = tier_plan_of(seed)
    expected = alone(plan)
    storage = SharedStorage(random.Random(f"storage {seed}"))
    first = TierRun(plan, storage, is_disturbed=False).go()
    wrong = [f"in the first life: {each}" for each in first.wrong]
    wrong += [
        f"{rid} in the first life: {outcome}"
        for rid, outcome in first.outcomes.items()
        if outcome.answers != expected[rid.removesuffix(" again")]
    ]
    storage.seen.clear()
    report = judge(TierRun(plan, storage), expected)
    report.wrong[:0] = wrong
    tiers = plan.setting.options.tiers
    report.seen[tiers.hicache_write_policy] += 1
    report.seen[tiers.hicache_storage_prefetch_policy] += 1
    report.seen.update(storage.seen)
    return report
