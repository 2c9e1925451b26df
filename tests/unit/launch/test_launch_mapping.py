"""Options and environment become the scheduler's numbers: every one reaches its place."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint.config.environment import read_environment
from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.config.pool import resolve_pool
from setpoint.config.resolve import resolve
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.settings import CadenceSettings, DelaySettings, PrioritySettings, Settings
from setpoint.launch.settings import live_settings, scheduler_config
from setpoint.planning.memory import GIB
from setpoint.scheduler.scheduler_config import SchedulerConfig
from setpoint_testing.harness import Harness
from setpoint_testing.specs import tiny_spec

SPEC = tiny_spec(vocab_size=300, num_parameters=100_000, eos_token_ids=(2,))


def resolved(environ: dict[str, str] | None = None, **options: Any) -> ResolvedConfig:
    hardware = Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB)
    return resolve(
        Options.of(random_seed=7, **options), hardware, SPEC, env=read_environment(environ or {})
    )


def fixed(environ: dict[str, str] | None = None) -> SchedulerConfig:
    config = resolved(environ)
    return scheduler_config(config, resolve_pool(config, 10_000), SPEC)


def settled(**options: Any) -> Settings:
    config = resolved(**options)
    return live_settings(config, resolve_pool(config, 10_000))


def test_defaults_change_nothing() -> None:
    config = settled()
    assert (config.policy, config.priority, config.refuse_priority) == ("fcfs", None, False)
    assert (config.cadence, config.delay) == (
        CadenceSettings(decode_after_piece=1),
        DelaySettings(),
    )
    life = fixed()
    assert (life.seed, life.waiting_timeout_s, life.running_timeout_s) == (7, None, None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"enable_priority_scheduling": True}, PrioritySettings()),
        ({"schedule_policy": "priority"}, PrioritySettings()),
        (
            {
                "enable_priority_scheduling": True,
                "default_priority_value": -4,
                "schedule_low_priority_values_first": True,
                "disable_priority_preemption": True,
                "priority_scheduling_preemption_threshold": 3,
                "retraction_policy": "priority",
            },
            PrioritySettings(
                default=-4, low_first=True, preempt=False, threshold=3, retract_first=True
            ),
        ),
        ({"default_priority_value": 3}, None),
    ],
)
def test_priorities(options: dict[str, Any], expected: PrioritySettings | None) -> None:
    config = settled(**options)
    assert config.priority == expected
    assert config.policy == "fcfs"


def test_turns_and_delays() -> None:
    config = settled(
        prefill_decode_interval=4,
        prefill_decode_interval_min_bs=2,
        num_continuous_decode_steps=3,
        enable_prefill_delayer=True,
        prefill_delayer_max_delay_passes=9,
        prefill_delayer_max_delay_ms=250.0,
        prefill_delayer_token_usage_low_watermark=0.2,
        prefill_delayer_queue_min_ratio=0.5,
        min_free_slots_delay=3,
        abort_on_priority_when_disabled=True,
        schedule_policy="routing-key",
    )
    assert config.cadence == CadenceSettings(
        prefill_decode_interval=4, min_decoding=2, continuous_decode_steps=3
    )
    assert config.delay == DelaySettings(
        enabled=True,
        low_usage=0.2,
        queue_ratio=0.5,
        min_free_slots=3,
        max_passes=9,
        max_delay_s=0.25,
    )
    assert (config.policy, config.refuse_priority) == ("routing-key", True)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, "PDPDPDPDPDPDPDPD"),
        ({"prefill_decode_interval": 0}, "PPPPPPPPDDDDDDDD"),
        ({"prefill_decode_interval": 2}, "PDDPDDPDDPDDPDDPDDPDDPDD"),
        ({"enable_mixed_chunk": True}, "MMMMMMMMDDDDDDDD"),
    ],
)
def test_two_streams_beside_a_prompt_of_eight_chunks(options: dict[str, Any], steps: str) -> None:
    """Both have a token after every chunk by default on a CPU: prompt, decode and mixed steps from
    the moment when the prompt comes."""
    config = settled(chunked_prefill_size=64, **options)
    harness = Harness(
        num_pages=1000,
        chunked_prefill_size=config.chunked_prefill_size,
        cadence=config.cadence,
        mixed_chunk=config.mixed_chunk,
    )
    for number in range(2):
        harness.submit(f"stream{number}", [number, 1, 2], max_new_tokens=64)
    harness.turn(4)
    harness.submit("long", [3, *(index % 90 for index in range(8 * 61 - 1))], max_new_tokens=4)
    harness.recorder.records.clear()
    harness.turn(len(steps))
    kinds = {(True, False): "P", (False, True): "D", (True, True): "M"}
    assert (
        "".join(
            kinds[stats.num_prefill_rows > 0, stats.num_decode_rows > 0]
            for stats in harness.recorder.steps
        )
        == steps
    )
    harness.drain()


def test_time_limits_come_from_the_environment() -> None:
    config = fixed({"SGLANG_REQ_WAITING_TIMEOUT": "2.5", "SGLANG_REQ_RUNNING_TIMEOUT": "0"})
    assert (config.waiting_timeout_s, config.running_timeout_s) == (2.5, None)
