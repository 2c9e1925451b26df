"""A change of a running server's options: what it refuses, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint.config.environment import EnvSettings
from setpoint.config.hardware import Hardware
from setpoint.config.live_changes import ConfigInputs, Running, read_values
from setpoint.config.options import OPTION_FIELDS, Options
from setpoint.core.errors import ConfigError
from setpoint.launch.parent.live_config import LiveConfig
from setpoint.planning.memory import GIB
from setpoint_testing.specs import tiny_spec

POOL = 10_000


def running(**options: Any) -> Running:
    asked = ConfigInputs(
        options=Options.of(random_seed=7, **options),
        given=frozenset(options),
        hardware=Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB),
        model=tiny_spec(vocab_size=300, num_parameters=100_000, context_len=4096),
        found={},
        env=EnvSettings(),
        drawn_seed=0,
    )
    return Running.started(asked, asked.resolve(), POOL)


def changes(before: Running, **values: Any) -> dict[str, tuple[Any, Any]]:
    after = before.with_values(values)
    return {each.option: (each.old, each.new) for each in after.differences(before)}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"chunked_prefill_size": "1k"}, {"chunked_prefill_size": 1000}),
        ({"--chunked-prefill-size": 256}, {"chunked_prefill_size": 256}),
        ({"log_requests": "True"}, {"log_requests": True}),
        ({"log_requests": False}, {"log_requests": False}),
        ({"max_queued_requests": "none"}, {"max_queued_requests": None}),
        ({"max_queued_requests": None}, {"max_queued_requests": None}),
        ({"log_level": "none"}, {"log_level": None}),
        ({"stream_interval": None}, {"stream_interval": None}),
        ({"schedule_conservativeness": 1}, {"schedule_conservativeness": 1.0}),
        ({"schedule_conservativeness": "0.3"}, {"schedule_conservativeness": 0.3}),
    ],
)
def test_values_are_read_as_typed_or_as_json(given: dict[str, Any], read: dict[str, Any]) -> None:
    assert read_values(given) == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunked_prefil_size": 1}, "unknown option chunked_prefil_size. Did you mean chunked_"),
        ({"port": 1}, "port cannot change while the server runs; restart the server"),
        ({"model_path": "x"}, "model_path cannot change while the server runs"),
        ({"lora_paths": "x"}, "lora_paths is an option of SGLang that is not supported"),
        ({"log_requests": "maybe"}, "log_requests must be true or false, got 'maybe'"),
        ({"stream_interval": [1]}, "stream_interval must be a single value, got [1]"),
        ({"stream_interval": True}, "stream_interval must be a single value, got True"),
        ({"stream_interval": 1.5}, "stream_interval: '1.5' is not a whole number"),
        ({"chunked_prefil": 1}, "unknown option chunked_prefil. Did you mean chunked_prefill_size"),
        ({"log_req": True}, "unknown option log_req. Did you mean log_requests"),
        ({"max_running": 1}, "Did you mean max_running_requests?"),
        ({"model": "x"}, "unknown option model."),
        ({"chunked_prefill_size": -5}, "chunked_prefill_size must be at least -1, got -5"),
        ({"max_queued_requests": 0}, "max_queued_requests 0 would refuse every request"),
        ({"num_continuous_decode_steps": 1001}, "must be at most 1000"),
        ({"prefill_decode_interval": 1001}, "must be at most 1000"),
        ({"stream_interval": 0}, "stream_interval must be at least 1, got 0"),
        ({"schedule_policy": "best"}, "schedule_policy must be one of fcfs, lpm"),
        ({"schedule_conservativeness": "inf"}, "schedule_conservativeness must be a finite number"),
        (
            {"schedule_policy": "lpm", "enable_priority_scheduling": True},
            "enable_priority_scheduling=True orders the queue under schedule_policy fcfs or lof",
        ),
        ({"retraction_policy": "priority"}, "retraction_policy priority needs enable_priority"),
        (
            {"chunked_prefill_size": 100},
            "chunked_prefill_size 100 is not divisible by page_size 16",
        ),
        ({"chunked_prefill_size": 1024}, "memory was planned for 512. Restart"),
        ({"chunked_prefill_size": -1}, "memory was planned for 512. Restart"),
        ({"max_running_requests": 49}, "more than the 48 requests for which this engine has room"),
        (
            {"max_running_requests": None},
            "more than the 48 requests for which this engine has room",
        ),
        ({"--log-level": "debug", "log_level": "info"}, "log_level is given twice"),
    ],
)
def test_what_cannot_be_is_refused_as_at_a_start(given: dict[str, Any], message: str) -> None:
    live = LiveConfig(running(max_running_requests=48, page_size=16, context_length=2048))
    before = live.frontend
    with pytest.raises(ConfigError) as error:
        live.propose(given)
    assert message in str(error.value)
    assert live.frontend is before


def test_what_follows_from_an_option_changes_with_it() -> None:
    before = running()
    assert changes(before, enable_mixed_chunk=True) == {
        "enable_mixed_chunk": (False, True),
        "decode_after_piece": (1, 0),
    }
    assert changes(before, prefill_decode_interval=3) == {
        "prefill_decode_interval": (0, 3),
        "decode_after_piece": (1, 0),
    }
    assert changes(before, schedule_policy="priority") == {
        "enable_priority_scheduling": (False, True)
    }
    assert changes(before, log_level="debug") == {
        "log_level": ("info", "debug"),
        "log_level_http": ("info", "debug"),
    }


def test_an_option_that_is_taken_back_has_the_value_of_a_start() -> None:
    before = running()
    there = before.with_values({"prefill_decode_interval": 3, "max_running_requests": 5})
    assert there.live_options()["max_running_requests"] == 5
    back = there.with_values({"prefill_decode_interval": None, "max_running_requests": None})
    assert back.values() == before.values()
    assert back.decisions_since(before) == []


def test_an_option_with_a_default_can_be_taken_back() -> None:
    """Red before: "needs a value", although the help offers none for every option."""
    before = running(log_level="error")
    assert changes(before, log_level=None) == {
        "log_level": ("error", "info"),
        "log_level_http": ("error", "info"),
    }
    there = before.with_values({"stream_interval": 9, "log_requests": True})
    back = there.with_values({"stream_interval": None, "log_requests": None})
    assert back.values() == before.values()


def test_a_workload_gives_way_to_what_is_set_later() -> None:
    before = running(workload="offline")
    chosen = before.live_options()["schedule_conservativeness"]
    assert changes(before, schedule_conservativeness=0.9) == {
        "schedule_conservativeness": (chosen, 0.9)
    }


def test_what_is_not_live_stays_as_the_start_has_settled_it() -> None:
    before = running(chunked_prefill_size=1024)
    after = before.with_values({"chunked_prefill_size": 128, "schedule_policy": "lpm"})
    for field in OPTION_FIELDS:
        old, new = (each.config.options.get(field.name) for each in (before, after))
        assert old == new or field.about.live, field.name
    assert after.with_values({"chunked_prefill_size": 1024}).live_options() == {
        **before.live_options(),
        "schedule_policy": "lpm",
    }


def test_decisions_say_what_was_changed() -> None:
    before = running()
    after = before.with_values({"max_running_requests": 7})
    assert [(each.field, each.value, each.why) for each in after.decisions_since(before)] == [
        ("max_running_requests", 7, "given")
    ] * 2  # the option's, and the pool's, which takes its place


def test_what_has_no_effect_is_said() -> None:
    live = LiveConfig(running())
    proposal = live.propose({"prefill_decode_interval_min_bs": 3})
    assert proposal.warnings == [
        "prefill_decode_interval_min_bs=3 (given, without effect: needs prefill_decode_interval)"
    ]
    assert live.propose({"prefill_decode_interval_min_bs": 0}).options == []
