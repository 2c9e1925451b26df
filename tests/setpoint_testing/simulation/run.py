"""One simulated run: a server, its clients, and what goes wrong; and the same requests alone on a
server where nothing does."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from setpoint.core.control import PauseMode
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.operations import MemoryPart
from setpoint.frontend.checkpoint_names import Checkpoint
from setpoint.frontend.jobs import ClientGoneError
from setpoint.frontend.service import Service
from setpoint.ipc.suspects import MOST_CRASHES, MOST_KILLS
from setpoint_testing.simulation.clients import Answer, Clients, Order, Outcome, draw_orders
from setpoint_testing.simulation.engine import (
    CRASHED,
    KILLED,
    QUEUE_FULL,
    MessageFault,
    SimulatedEngine,
    Start,
    StartKind,
    StepFault,
    is_at_rest,
)
from setpoint_testing.simulation.tiers import SharedStorage
from setpoint_testing.simulation.world import Setting, World, noted_logs, options_of

NUM_ORDERS = 7
BUSY_S = 1.5
"""How long clients come and faults happen, in virtual seconds."""
PATIENCE_S = 5000.0
"""Virtual seconds after which a request counts as lost: more than an engine may take to start."""
REST_S = 10
"""Virtual seconds without a change of an engine's state after which the server is at rest: more than
the watchdog needs to notice an engine that hangs."""
LATE_S = 3.0
"""An engine may have ended so long before the frontend knows it."""

MESSAGE_FAULTS: tuple[MessageFault, ...] = ("doubled", "cut", "garbled", "foreign")
STEP_FAULTS: tuple[StepFault, ...] = (
    "kill before",
    "kill after",
    "crash before",
    "crash after",
    "hang",
    "fail",
)


START_KINDS: tuple[StartKind, ...] = ("ready", "refuses", "crashes", "is killed", "hangs")


@dataclass
class Report:
    world: World
    outcomes: dict[str, Outcome]
    wrong: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


@dataclass
class Plan:
    """Everything that is drawn before a run begins."""

    seed: int
    setting: Setting
    orders: list[Order]
    num_faults: int
    with_engine_faults: bool
    """Whether engines may also say what they must not."""
    num_operators: int
    step_fault: tuple[int, StepFault] | None = None
    """What becomes of which step of the first engine."""


def plan_of(seed: int) -> Plan:
    rng = random.Random(f"plan {seed}")
    ranks = rng.choice([1, 1, 2, 2, 3])
    options = options_of(
        {
            "dp_size": ranks,
            "engine_standby": ranks == 1 and rng.random() < 0.4,
            "max_engine_restarts": 1000 if rng.random() < 0.85 else rng.randrange(3),
            "load_balance_method": rng.choice(
                ["auto", "round_robin", "total_requests", "total_tokens"]
            ),
            "watchdog_timeout": 5.0,
            "max_total_tokens": rng.choice([192, 256, 400]),
            "max_running_requests": rng.randrange(1, 7),
            "page_size": rng.choice([1, 4, 16]),
            "schedule_policy": rng.choice(["fcfs", "lpm", "lof"]),
            "chunked_prefill_size": rng.choice([-1, 16, 64]),
            "max_queued_requests": rng.choice([None, None, 2]),
            "stream_interval": rng.choice([1, 1, 3]),
            "random_seed": 0,
        }
    )
    setting = Setting.drawn(options, rng, [0, 0, 1])
    orders = list(draw_orders(rng, NUM_ORDERS, seconds=BUSY_S, ranks=ranks))
    return Plan(
        seed,
        setting,
        orders,
        num_faults=rng.choice([1, 2, 4, 8]),
        with_engine_faults=rng.random() < 0.5,
        num_operators=rng.randrange(5),
    )


def fixed_plan(ranks: int) -> Plan:
    """Mixed requests that come almost at once, and nothing that goes wrong."""
    rng = random.Random("fixed")
    options = options_of(
        {
            "dp_size": ranks,
            "max_engine_restarts": 1000,
            "max_total_tokens": 192,
            "max_running_requests": 4,
            "chunked_prefill_size": 64,
            "random_seed": 0,
        }
    )
    orders = [
        replace(order, poison=None, leaves_after=None, is_aborted_after=None)
        for order in draw_orders(rng, 8, seconds=0.1, ranks=ranks)
    ]
    return Plan(0, Setting(options), orders, 0, False, 0)


class Run:
    """A world with its clients, faults and operators."""

    def __init__(
        self, plan: Plan, *, is_disturbed: bool = True, storage: SharedStorage | None = None
    ) -> None:
        """storage: what cache tiers share; without it, there are none, whatever the options say."""
        self.plan = plan
        setting = plan.setting
        if not is_disturbed:
            quiet = setting.options.replace(
                dp_size=1, engine_standby=False, max_queued_requests=None
            )
            setting = replace(setting, options=quiet)
        self.world = World(f"world {plan.seed}", setting, storage)
        self.rng = self.world.rng
        self.is_disturbed = is_disturbed
        self.seen: Counter[str] = Counter()
        self.loading = asyncio.Lock()
        self.clients: Clients
        self.service: Service

    def go(self) -> Report:
        world = self.world
        with noted_logs(world):
            world.loop.run_until_complete(self._go())
        wrong = world.wrong + world.loop.failures
        left = [repr(task) for task in asyncio.all_tasks(world.loop)]
        wrong += [f"a task is left: {each}" for each in left]
        wrong += [f"engine {each.pid} is left" for each in world.living()]
        world.loop.close()
        return Report(world, self.clients.outcomes, wrong, self.seen)

    async def _go(self) -> None:
        world = self.world
        async with world.new_session() as session:
            self.service = service = await session.service()
            self.clients = Clients(world.loop, service, self.rng)
            if self.is_disturbed:
                await self._disturbed()
            else:
                await self._undisturbed()
            if not session.over.done():
                await self._check_rest()
            self._check_books()

    async def _undisturbed(self) -> None:
        for order in self.plan.orders:
            await self.clients.ask(
                replace(order, leaves_after=None, is_aborted_after=None, poison=None)
            )

    async def _disturbed(self) -> None:
        world, loop = self.world, self.world.loop
        for order in self.plan.orders:
            if order.poison is not None:
                index, position, code = order.poison
                seed = order.sampling.sampling_seed
                assert seed is not None
                world.poison.deaths[seed + index, position] = code
        world.step_faults = self._planned_fault
        tasks = [loop.create_task(self._come(order)) for order in self.plan.orders]
        others = [loop.create_task(each) for each in self._events()]
        done, late = await asyncio.wait(tasks + others, timeout=PATIENCE_S)
        if late:
            world.wrong.append(f"{len(late)} clients or operators wait for ever")
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, *others, return_exceptions=True)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                world.wrong.append(f"it raised {error!r}")

    def _planned_fault(self, engine: SimulatedEngine) -> StepFault | None:
        if self.plan.step_fault is None or engine is not self.world.engines[0]:
            return None
        number, fault = self.plan.step_fault
        return fault if engine.num_steps == number else None

    async def _come(self, order: Order) -> None:
        await asyncio.sleep(order.at)
        self.world.note(order.rid, "comes")
        await self.clients.ask(order)
        outcome = self.clients.outcomes[order.rid]
        ends = [each.finish or "-" for each in outcome.answers]
        self.world.note(order.rid, f"ends: {outcome.error or ends}")

    # ------------------------------------------------------------------ what happens

    def _events(self) -> list[Coroutine[Any, Any, None]]:
        rng = self.rng
        faults: list[Callable[[], None]] = [
            self._kill,
            self._crash,
            self._stop,
            self._step_fault,
            self._step_fault,
            self._next_start,
            self._leap,
            self._slow,
        ]
        if self.plan.with_engine_faults:
            faults += [self._message_fault, self._message_fault, self._close_link]
        events = [
            self._later(rng.uniform(0, BUSY_S), rng.choice(faults))
            for _ in range(self.plan.num_faults)
        ]
        operators = [
            self._pause,
            self._change,
            self._load,
            self._replace,
            self._ask_states,
            self._probe,
            self._flush,
        ]
        return events + [
            self._operate(rng.uniform(0, BUSY_S), rng.choice(operators))
            for _ in range(self.plan.num_operators)
        ]

    async def _later(self, seconds: float, act: Callable[[], None]) -> None:
        await asyncio.sleep(seconds)
        act()

    async def _operate(self, seconds: float, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.sleep(seconds)
        try:
            await act()
        except (EngineDeadError, RequestError) as error:
            self.world.note("operator", f"is refused: {error}")
            self.seen["refused operators"] += 1

    def _some(self, kind: str) -> SimulatedEngine | None:
        living = [each for each in self.world.living() if each.loop is not None]
        if not living:
            return None
        self.seen[kind] += 1
        return self.rng.choice(living)

    def _kill(self) -> None:
        if (engine := self._some("killed")) is not None:
            engine.die(KILLED)

    def _crash(self) -> None:
        if (engine := self._some("crashed")) is not None:
            engine.die(CRASHED)

    def _stop(self) -> None:
        if (engine := self._some("stopped")) is not None:
            engine.stop(True)
            self.world.loop.call_later(self.rng.choice([0.2, 3.0, 20.0]), engine.stop, False)

    def _step_fault(self) -> None:
        kind = self.rng.choice(STEP_FAULTS)
        if (engine := self._some(kind)) is not None:
            engine.step_fault = kind

    def _message_fault(self) -> None:
        kind = self.rng.choice(MESSAGE_FAULTS)
        if (engine := self._some(kind)) is not None:
            engine.next_message_fault = kind

    def _close_link(self) -> None:
        if (engine := self._some("closed link")) is not None:
            engine.close_link()

    def _next_start(self) -> None:
        """The next engine does not start as it should; the one before ends now."""
        rng, world = self.rng, self.world
        kind = rng.choice(START_KINDS)
        starts = [Start(kind, rng.choice([0.0, 0.5, 5.0]))]
        self.seen[f"start {kind}"] += 1
        world.starts = lambda rank: starts.pop() if starts else Start("ready", rng.uniform(0, 2))
        self._kill()

    def _leap(self) -> None:
        self.seen["machine paused"] += 1
        self.world.note("machine", "is paused for 30 s")
        self.world.loop.leap(30.0)

    def _slow(self) -> None:
        """For a while every step and message takes long."""
        self.seen["slow"] += 1
        setting, before = self.world.setting, self.world.setting.slow_s
        setting.slow_s = 2.0
        self.world.loop.call_later(4.0, setattr, setting, "slow_s", before)

    # ------------------------------------------------------------------ what operators do

    async def _pause(self) -> None:
        mode = self.rng.choice(list(PauseMode))
        ranks = self.rng.choice([None, [self._some_rank()]])
        self.seen[f"pause {mode}"] += 1
        self.world.note("operator", f"pauses {ranks or 'all'} ({mode})")
        try:
            await self.service.engine.orders.pause(mode, ranks)
        finally:
            await asyncio.sleep(self.rng.uniform(0, 2))
            self.world.note("operator", f"resumes {ranks or 'all'}")
            await self.service.engine.orders.resume(ranks)

    def _some_rank(self) -> int:
        return self.rng.randrange(len(self.service.engine.lines))

    async def _change(self) -> None:
        values: dict[str, Any] = self.rng.choice(
            [
                {"schedule_policy": self.rng.choice(["fcfs", "lpm", "lof"])},
                {"stream_interval": self.rng.choice([1, 2, 4])},
                {"max_running_requests": self.rng.choice([1, 2])},
                {"chunked_prefill_size": self.rng.choice([8, 16])},
            ]
        )
        self.seen["changes"] += 1
        self.world.note("operator", f"sets {values}")
        await self.service.live.change(values, by="simulation")
        self.world.note("operator", f"has set {values}")

    async def _load(self) -> None:
        await self._load_weights(f"weights {self.rng.randrange(9)}")

    async def _load_weights(self, folder: str) -> None:
        """Load weights as a trainer does that lets requests go on."""
        orders = self.service.engine.orders
        self.seen["loads"] += 1
        self.world.note("operator", f"loads {folder}")
        async with self.loading:
            await orders.pause(PauseMode.RETRACT)
            try:
                checkpoint = Checkpoint(folder, "dummy")
                await self.service.weights.load(checkpoint, flush_cache=True, aborts=False)
                self.world.note("operator", f"has loaded {folder}")
            finally:
                await orders.resume()

    async def _restore(self, parts: list[MemoryPart]) -> None:
        """Until no engine lacks them: one may have ended meanwhile, and the next one's start may hang
        until the server ends it, more than once."""
        for _ in range(2000):
            try:
                await self.service.engine.orders.restore(parts)
            except (EngineDeadError, RequestError) as error:
                self.world.note("operator", f"cannot restore: {error}")
                await asyncio.sleep(1.0)
            else:
                self.world.note("operator", f"has restored {parts}")
                return

    async def _replace(self) -> None:
        """A rank is taken out of service, and wanted again."""
        rank = self._some_rank()
        self.world.note("operator", f"takes engine {rank} out of service")
        self.world.session.scale_down([rank])
        self.seen["scale_down"] += 1
        await asyncio.sleep(self.rng.uniform(0, 3))
        self.world.note("operator", f"wants engine {rank} again")
        self.world.session.retry([rank])

    async def _ask_states(self) -> None:
        self.seen["asked for states"] += 1
        await self.service.info.states()
        await self.service.engine.list_requests(timeout_s=1.0)

    async def _probe(self) -> None:
        self.seen["probes"] += 1
        began = self.world.loop.now()
        is_healthy = await self.service.health.is_healthy()
        took = self.world.loop.now() - began
        self.world.note("probe", f"{'healthy' if is_healthy else 'not healthy'} after {took:.3f} s")

    async def _flush(self) -> None:
        self.seen["flushes"] += 1
        await self.service.engine.orders.flush()

    # ------------------------------------------------------------------ what must hold at the end

    async def _check_rest(self) -> None:
        """Everything that the server promises once nothing goes on any more."""
        world, service, session = self.world, self.service, self.world.session
        client = service.engine
        for engine in world.living():  # whose next step or message was to come to harm
            engine.step_fault = engine.next_message_fault = None
        seconds_at_rest = 0
        async with asyncio.timeout(PATIENCE_S):
            # A death may not have been noticed yet, and its engine will then start again.
            while not session.over.done() and seconds_at_rest < REST_S:
                states = {each.state for each in client.standings()}
                is_wanted = any(line.life.is_wanted for line in client.lines)
                rests = states <= {"ready", "ended"} and not is_wanted
                seconds_at_rest = seconds_at_rest + 1 if rests else 0
                await asyncio.sleep(1.0)
        wanted = service.live.options.propose({}).settings
        for line in client.lines:
            if not line.life.is_ready:
                continue
            state = await line.get_state()
            if state.settings != wanted:
                world.wrong.append(f"engine {line.rank} works under {state.settings}, not {wanted}")
            if state.paused is not None:
                world.wrong.append(f"engine {line.rank} is paused")
        for engine in world.living():
            if engine.loop is not None and not engine.is_hung:
                world.wrong += [f"engine {engine.pid}: {each}" for each in is_at_rest(engine)]
        for standing in client.standings():
            if standing.state == "ready" and (standing.idle_s or standing.is_missed):
                world.wrong.append(f"/ready says that {standing}")
            if standing.state == "ended" and not standing.is_missed:
                world.wrong.append(f"/ready does not say that {standing}")
        checkpoint = service.weights.checkpoint
        weights = session.engine.served.job().folder if checkpoint is None else checkpoint.folder
        for engine in world.serving():
            if engine.operator.weights != weights:
                world.wrong.append(
                    f"engine {engine.pid} has {engine.operator.weights!r}, not {weights!r}"
                )

    def _check_books(self) -> None:
        client, wrong = self.service.engine, self.world.wrong
        if client.num_open or client.num_waiting or client._sent or client._numbers:
            wrong.append(f"{client.num_open} requests are open, {client.num_waiting} wait")
        for line, load in client._loads.items():
            if load.num_requests or load.num_tokens or load._coming:
                wrong.append(f"the load of engine {line.rank} is not zero: {load}")
        for line in client.lines:
            if line._calls or line._waiters:
                wrong.append(f"engine {line.rank} owes {list(line._calls)}, {line._waiters}")
        if client._suspects.waiting or any(client._suspects._groups.values()):
            wrong.append("suspects are left")


def simulate(seed: int) -> Report:
    """Run a seed and judge it; ``Report.wrong`` is empty if all went well."""
    plan = plan_of(seed)
    return judged(plan, alone(plan))


def alone(plan: Plan) -> dict[str, list[Answer]]:
    """What each order gets if it is alone on a server where nothing goes wrong."""
    report = Run(plan, is_disturbed=False).go()
    assert not report.wrong, report.wrong
    for outcome in report.outcomes.values():
        assert outcome.is_whole, outcome
    return {rid: outcome.answers for rid, outcome in report.outcomes.items()}


def judged(plan: Plan, expected: dict[str, list[Answer]]) -> Report:
    """Run a plan and compare what each client got."""
    return judge(Run(plan), expected)


def judge(run: Run, expected: dict[str, list[Answer]]) -> Report:
    report = run.go()
    paused_away = run.seen["pause abort"] > 0
    for rid, outcome in report.outcomes.items():
        report.seen[_end_of(outcome)] += 1
        whole = expected[rid]
        if outcome.is_whole and outcome.answers == whole:
            continue
        why = _excuse(report, outcome, whole, paused_away)
        if why:
            report.wrong.append(f"{rid}: {why}")
    return report


def _end_of(outcome: Outcome) -> str:
    if outcome.error is not None:
        return "blamed" if "not tried again" in str(outcome.error) else type(outcome.error).__name__
    return "whole" if outcome.is_whole else "cut"


def _excuse(report: Report, outcome: Outcome, whole: list[Answer], paused_away: bool) -> str:
    """Why an answer may not differ from an undisturbed one; "" if it may."""
    order, error = outcome.order, outcome.error
    for index, (answer, expected) in enumerate(zip(outcome.answers, whole, strict=False)):
        if not answer.continues_as(expected):
            return f"sequence {index} is {answer}, but alone it is {expected}"
    if isinstance(error, ClientGoneError) and order.leaves_after is not None:
        return ""
    if isinstance(error, RequestError) and "not tried again" in str(error):
        return "" if _may_be_blamed(report, outcome) else f"is blamed: {error}"
    if isinstance(error, EngineDeadError):
        has_limit = report.world.setting.options.parallel.max_engine_restarts < 1000
        return "" if has_limit else f"is lost: {error}"
    if isinstance(error, RequestError) and error.message == QUEUE_FULL:
        has_limit = report.world.setting.options.scheduling.max_queued_requests is not None
        return "" if has_limit else "is refused"
    may_abort = order.is_aborted_after is not None or paused_away
    if error is None and may_abort:
        differing = [
            answer
            for answer, expected in zip(outcome.answers, whole, strict=True)
            if answer != expected and not answer.finish.startswith("abort")
        ]
        return f"ends otherwise: {differing}" if differing else ""
    return f"ends with {error!r} {outcome.answers}, alone with {whole}"


def _may_be_blamed(report: Report, outcome: Outcome) -> bool:
    since = [code for at, code in report.world.deaths if at >= outcome.last_at - LATE_S]
    is_guilty = outcome.order.poison is not None
    return is_guilty or len(since) >= (
        MOST_KILLS if since and since[-1] == KILLED else MOST_CRASHES
    )
