"""Every live option, changed while requests run: answers stay what they are, and the change shows.

A row is run twice on the real options, loop and scheduler (the executor alone is scripted): once as
it began, once with one option changed in mid-run. ``pytest -s`` prints the table. What the log and
the web server do with theirs is tested on a real server (``tests/e2e/test_live_server.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from setpoint.config.check import MAX_INT
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.declare import Field, Option
from setpoint.config.groups.scheduling import MAX_DECODE_STEPS
from setpoint.config.hardware import Hardware
from setpoint.config.live_changes import LIVE, ConfigInputs, Running
from setpoint.config.options import Options
from setpoint.core.control import Change
from setpoint.core.errors import ConfigError
from setpoint.core.records import AdmissionRefusal, Preemption, SettingsChanged, StepDone
from setpoint.launch.parent.live_config import LiveConfig
from setpoint.launch.settings import live_settings
from setpoint.observe.figures import Figures
from setpoint.observe.logline import LogLines
from setpoint.observe.tee import Tee
from setpoint.planning.memory import GIB
from setpoint_testing.harness import Harness
from setpoint_testing.specs import tiny_spec

ON_A_SERVER = (
    "log_level",
    "log_level_http",
    "log_requests",
    "log_requests_level",
    "log_requests_format",
    "drain_timeout",
    "enable_request_time_stats_logging",
)
"""Live options of the server's process: ``tests/e2e/test_live_server.py``, ``test_draining_server.py``."""


class Server:
    """What a real one is made of, without sockets and model."""

    def __init__(self, *, num_pages: int, **options: Any) -> None:
        asked = ConfigInputs(
            options=Options.of(random_seed=7, **options),
            given=frozenset(options),
            hardware=Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB),
            model=tiny_spec(vocab_size=97, num_parameters=100_000, context_len=1000),
            found={},
            env=EnvSettings(),
            drawn_seed=0,
        )
        running = Running.started(asked, asked.resolve(), num_pages)
        settings = live_settings(running.config, running.pool)
        self.live = LiveConfig(running)
        self.harness = Harness(
            num_pages=num_pages,
            num_slots=running.num_slots,
            **{name: getattr(settings, name) for name in settings.__struct_fields__},
        )

    def set(self, **values: Any) -> None:
        proposal = self.live.propose(values)
        assert proposal.options, "the row changes nothing"
        self.harness.wire.inbox.append(
            Change(0, proposal.settings, proposal.options, "test", "why not")
        )
        proposal.accept()


Load = Callable[[Harness], None]
Metric = Callable[[Harness, list[StepDone]], Any]


@dataclass(frozen=True)
class Row:
    """The load runs before and after the change; ``shows``: what is looked at in the steps after
    it, without the change and with it."""

    option: str
    value: Any
    what: str
    metric: Metric
    shows: tuple[Any, Any]
    load: Load
    start: dict[str, Any] = field(default_factory=dict)
    streams: int = 2
    stream: dict[str, Any] = field(default_factory=dict)
    num_pages: int = 900


def prompt(number: int, length: int) -> list[int]:
    return [(7 * number + 13 * index + 1) % 97 for index in range(length)]


def arrivals(*requests: dict[str, Any], length: int = 30) -> Load:
    """These requests at once, named a, b, …."""

    def load(harness: Harness) -> None:
        for number, options in enumerate(requests):
            ids = prompt(number + 50, options.pop("length", length) if options else length)
            harness.submit("abcdefgh"[number], ids, **{"max_new_tokens": 8, **options})

    return load


def fresh(*requests: dict[str, Any], **more: Any) -> Load:
    return lambda harness: arrivals(*(dict(each) for each in requests), **more)(harness)


def first_admitted(harness: Harness, steps: list[StepDone]) -> str:
    """The one of a, b, … that got its slot first."""
    names = {harness.seq_id(rid): rid for rid in harness.outcomes if len(rid) == 1}
    return next(
        names[admit.seq_id]
        for plan in harness.plans
        for admit in plan.admits
        if admit.seq_id in names
    )


def kinds(harness: Harness, steps: list[StepDone]) -> str:
    return "".join("P" if step.num_prefill_rows else "D" for step in steps[:6])


def refusals(reason: AdmissionRefusal) -> Metric:
    return lambda harness, steps: sum(reason in step.refusals for step in steps)


def most(name: str) -> Metric:
    return lambda harness, steps: max(getattr(step, name) for step in steps)


def refused(harness: Harness, steps: list[StepDone]) -> int:
    ends = [outcome.finish for outcome in harness.outcomes.values()]
    return sum(end is not None and end.status_code == 503 for end in ends)


def retracted(harness: Harness, steps: list[StepDone]) -> str:
    return " ".join(rid for rid, seen in harness.outcomes.items() if seen.num_retractions)


def preemptions(harness: Harness, steps: list[StepDone]) -> int:
    return len(harness.recorder.of(Preemption))


def largest_event(harness: Harness, steps: list[StepDone]) -> int:
    """Tokens of the stream per event, from the change on, nearly."""
    seen = harness.outcomes["stream0"]
    return round(len(seen.ids) / seen.num_events)


def decode_lines(harness: Harness, steps: list[StepDone]) -> int:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger, level = logging.getLogger("setpoint.observe.logline"), logging.getLogger().level
    logger.addHandler(handler)
    try:
        figures = Figures(decode_log_interval=40)
        reader = Tee(figures, LogLines(figures, device="cpu"))
        for record in harness.recorder.records:
            reader.on(record)
    finally:
        logger.removeHandler(handler)
        logging.getLogger().setLevel(level)
    return sum(line.startswith("Decode batch") for line in lines)


def later(*, gap: int, count: int = 3) -> Load:
    """Requests that come one by one."""

    def load(harness: Harness) -> None:
        for number in range(count):
            harness.submit("abcdefgh"[number], prompt(60 + number, 20), max_new_tokens=8)
            harness.turn(gap)

    return load


ONE_BY_ONE = {"prefill_max_requests": 1}
PRIORITY = {"enable_priority_scheduling": True}
QUIET = PRIORITY | {"disable_priority_preemption": True}
DELAYER = {"enable_prefill_delayer": True, "max_running_requests": 3}
TWO: Load = fresh({}, {})
FOUR: Load = fresh({}, {}, {}, {})
ROWS = [
    Row(
        "schedule_policy", "lof", "admitted first", first_admitted, ("a", "b"),
        fresh({"max_new_tokens": 4}, {"max_new_tokens": 40}), {"max_running_requests": 3},
    ),
    Row(
        "enable_priority_scheduling", True, "admitted first", first_admitted, ("a", "b"),
        fresh({"priority": 0}, {"priority": 5}), {"max_running_requests": 3},
    ),
    Row(
        "schedule_low_priority_values_first", True, "admitted first", first_admitted, ("b", "a"),
        fresh({"priority": 0}, {"priority": 5}), QUIET | {"max_running_requests": 3},
    ),
    Row(
        "default_priority_value", 7, "admitted first", first_admitted, ("b", "a"),
        fresh({}, {"priority": 5}), QUIET | {"max_running_requests": 3},
    ),
    Row(
        "priority_scheduling_preemption_threshold", 0, "preemptions", preemptions, (0, 1),
        fresh({"priority": 5}), PRIORITY | {"max_running_requests": 2}, stream={"priority": 0},
    ),
    Row(
        "disable_priority_preemption", True, "preemptions", preemptions, (1, 0),
        fresh({"priority": 20}), PRIORITY | {"max_running_requests": 2}, stream={"priority": 0},
    ),
    Row(
        "abort_on_priority_when_disabled", True, "answered 503", refused, (0, 2),
        fresh({"priority": 1}, {}, {"priority": 1}),
    ),
    Row(
        "retraction_policy", "priority", "retracted", retracted, ("a", "stream1"),
        fresh({"priority": 9, "max_new_tokens": 60}),
        QUIET | {"schedule_conservativeness": 0.01}, stream={"priority": 0}, num_pages=200,
    ),
    Row(
        "prefill_decode_interval", 2, "steps", kinds, ("PPPPDD", "PDDPDD"), FOUR, ONE_BY_ONE,
    ),
    Row(
        "prefill_decode_interval_min_bs", 9, "steps", kinds, ("PDDPDD", "PPPPDD"), FOUR,
        ONE_BY_ONE | {"prefill_decode_interval": 2},
    ),
    Row(
        "num_continuous_decode_steps", 4, "steps that wait for decode",
        refusals(AdmissionRefusal.DECODE_TURN), (0, 5), later(gap=3),
    ),
    Row(
        "enable_prefill_delayer", True, "steps that delay admission", refusals(AdmissionRefusal.DELAYED),
        (0, 30), fresh({}), {"max_running_requests": 3},
    ),
    Row(
        "prefill_delayer_max_delay_passes", 3, "steps that delay admission",
        refusals(AdmissionRefusal.DELAYED), (30, 3), fresh({}), DELAYER,
    ),
    Row(
        "prefill_delayer_max_delay_ms", 10, "steps that delay admission",
        refusals(AdmissionRefusal.DELAYED), (30, 4), fresh({}), DELAYER,
    ),
    Row(
        "prefill_delayer_token_usage_low_watermark", 0.9, "steps that delay admission",
        refusals(AdmissionRefusal.DELAYED), (30, 0), fresh({}), DELAYER,
    ),
    Row(
        "prefill_delayer_queue_min_ratio", 1.0, "steps that delay admission",
        refusals(AdmissionRefusal.DELAYED), (0, 30), fresh({}), DELAYER | {"max_running_requests": 8},
    ),
    Row(
        "min_free_slots_delay", 4, "steps that delay admission", refusals(AdmissionRefusal.DELAYED),
        (0, 30), fresh({}), {"max_running_requests": 8}, streams=7,
    ),
    Row(
        "schedule_conservativeness", 0.1, "share of the outputs reserved for",
        lambda harness, steps: round(steps[0].new_token_ratio, 2), (0.69, 0.07), TWO,
    ),
    Row(
        "max_running_requests", 3, "most that run", most("num_running"), (6, 3), FOUR,
        {"max_running_requests": 8},
    ),
    Row(
        "max_queued_requests", 1, "answered 503", refused, (0, 3), FOUR,
        {"max_running_requests": 2},
    ),
    Row(
        "chunked_prefill_size", 32, "most prompt tokens of a step", most("num_new_tokens"),
        (200, 32), fresh({}, length=200),
    ),
    Row(
        "max_prefill_tokens", 50, "most prompts of a step", most("num_prefill_rows"), (4, 2), FOUR,
    ),
    Row(
        "prefill_max_requests", 1, "most prompts of a step", most("num_prefill_rows"), (4, 1),
        FOUR,
    ),
    Row(
        "enable_mixed_chunk", True, "steps with prompts and outputs",
        lambda harness, steps: sum(
            step.num_prefill_rows > 0 and step.num_decode_rows > 0 for step in steps
        ),
        (0, 1), TWO,
    ),
    Row("stream_interval", 10, "tokens of an event", largest_event, (1, 5), TWO),
    Row("decode_log_interval", 5, "lines of the log", decode_lines, (1, 10), TWO),
]  # fmt: skip


def run(row: Row, *, changed: bool) -> tuple[Harness, list[StepDone]]:
    """All that the row asks for; the steps after the change (or after where it would be)."""
    server = Server(num_pages=row.num_pages, **row.start)
    harness = server.harness
    for number in range(row.streams):
        harness.submit(f"stream{number}", prompt(number, 12), max_new_tokens=60, **row.stream)
    harness.turn(6)
    if changed:
        server.set(**{row.option: row.value})
    num_before = len(harness.recorder.steps)
    row.load(harness)
    harness.drain()
    return harness, harness.recorder.steps[num_before:]


@pytest.fixture(scope="module", autouse=True)
def table() -> None:
    print(f"\n{'option':<44} {'old -> new':<24} {'shows':<36} without -> with")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.option))
def test_a_change_under_load_shows_and_changes_no_answer(row: Row) -> None:
    plain, plain_steps = run(row, changed=False)
    changed, steps = run(row, changed=True)
    (record,) = changed.recorder.of(SettingsChanged)
    (mine,) = (each for each in record.options if each.option == row.option)
    assert (record.by, record.why) == ("test", "why not")
    values = f"{_text(mine.old)} -> {_text(mine.new)}"
    found = row.metric(plain, plain_steps), row.metric(changed, steps)
    print(f"{row.option:<44} {values:<24} {row.what:<36} {found[0]} -> {found[1]}")
    assert found == row.shows
    for rid, outcome in plain.outcomes.items():
        other = changed.outcomes[rid]
        assert outcome.finish is not None
        assert other.finish is not None
        if other.finish.type == "abort":
            assert row.option in ("abort_on_priority_when_disabled", "max_queued_requests")
        else:
            assert (other.ids, other.finish) == (outcome.ids, outcome.finish), rid


def _text(value: Any) -> str:
    return "none" if value is None else str(value).lower()


def test_every_live_option_has_a_row() -> None:
    assert sorted([row.option for row in ROWS] + list(ON_A_SERVER)) == sorted(
        each.name for each in LIVE
    )


def test_several_options_change_between_the_same_two_steps() -> None:
    server = Server(num_pages=900)
    server.harness.submit("a", prompt(1, 12), max_new_tokens=30)
    server.harness.turn(3)
    server.set(chunked_prefill_size=16, stream_interval=3, schedule_policy="lpm")
    server.harness.turn()
    state = server.harness.scheduler.state
    assert (state.settings.chunked_prefill_size, state.settings.policy) == (16, "lpm")
    assert state.settings.stream_interval == 3
    (record,) = server.harness.recorder.of(SettingsChanged)
    assert record.settings == state.settings
    assert [str(change) for change in record.options] == [
        "stream_interval 1 -> 3",
        "schedule_policy fcfs -> lpm",
        "chunked_prefill_size 512 -> 16",
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=SettingsChanged) == record
    server.harness.drain()


def extremes(option: Field[Option]) -> list[Any]:
    """The ends of what an option takes, and what lies just outside of them."""
    about = option.about
    if option.kind is bool:
        return [False, True]
    if about.choices:
        return list(about.choices)
    low = -1 if about.low is None else about.low
    high = MAX_INT if about.high is None else about.high
    return [option.kind(value) for value in (low - 1, low, high, high + 1)]


@pytest.mark.cases(12)
@pytest.mark.parametrize("option", LIVE, ids=lambda option: str(option.name))
def test_no_value_of_a_live_option_stops_the_service(option: Field[Option]) -> None:
    """Every end of every option's range is refused, or requests are still served: one that finds
    the server idle, and one that comes while it decodes. Red before: max_queued_requests=0, and
    intervals of decode steps that kept the queue waiting until nothing ran any more."""
    for value in extremes(option):
        server = Server(num_pages=3000)
        harness = server.harness
        try:
            proposal = server.live.propose({option.name: value})
        except ConfigError:
            continue
        harness.wire.inbox.append(Change(0, proposal.settings, proposal.options, "test", ""))
        harness.turn()
        harness.submit("long", prompt(1, 12), max_new_tokens=2000)
        harness.turn(20)
        assert harness.running() == ["long"], (
            f"{option.name}={value}: nothing runs on an idle server"
        )
        harness.submit("second", prompt(2, 12), max_new_tokens=1)
        # One at a time, as asked for: the second then waits for the end of the first.
        alone = proposal.settings.max_running_requests == 1
        for _ in range(2100 if alone else MAX_DECODE_STEPS + 100):
            harness.turn()
            if harness.outcomes["second"].finish is not None:
                break
        second = harness.outcomes["second"].finish
        assert second is not None, f"{option.name}={value}: the second waits"
        assert second.type == "length", f"{option.name}={value}: {second.message}"
