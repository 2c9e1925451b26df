"""``--workload``: each profile's values and reasons, on a GPU and on a small CPU machine; explicit
options win, contradictions give way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.decisions import Decision
from setpoint.config.hardware import Hardware
from setpoint.config.options import OPTION_FIELDS, server_args
from setpoint.config.pool import resolve_pool
from setpoint.config.resolve import resolve
from setpoint.config.resolved import ResolvedConfig
from setpoint.config.workload import PROFILES
from setpoint.planning.memory import CPU_MEM_FRACTION, GIB
from setpoint_testing.specs import tiny_spec

SPEC = tiny_spec(vocab_size=1000, context_len=8192)
CPU = Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB)
GPU = Hardware(device="cuda", num_cores=16, available_bytes=100 * GIB, gpu_bytes=80 * GIB)
SMALL_GPU = replace(GPU, gpu_bytes=24 * GIB)


def decide(*argv: str, hardware: Hardware = GPU) -> ResolvedConfig:
    line = parse(SERVE, list(argv))
    return resolve(line.options, hardware, SPEC, given=line.given)


def reason(config: ResolvedConfig, field: str) -> Decision:
    (decision,) = (decision for decision in config.decisions if decision.field == field)
    return decision


VALUES: list[tuple[str, Hardware, dict[str, Any]]] = [
    ("online", GPU, {"max_running_requests": 128, "schedule_conservativeness": 1.2}),
    ("online", CPU, {"max_running_requests": 32, "schedule_conservativeness": 1.2}),
    ("online", replace(CPU, num_cores=64), {"max_running_requests": 128}),
    (
        "offline",
        GPU,
        {
            "mem_fraction_static": 0.9,
            "max_running_requests": 4096,
            "schedule_conservativeness": 0.3,
            "chunked_prefill_size": 16384,
        },
    ),
    ("offline", SMALL_GPU, {"mem_fraction_static": 0.71, "chunked_prefill_size": 4096}),
    (
        "offline",
        replace(GPU, gpu_bytes=None),
        {"mem_fraction_static": 0.9, "chunked_prefill_size": 4096},
    ),
    (
        "offline",
        CPU,
        {
            "mem_fraction_static": CPU_MEM_FRACTION,
            "max_running_requests": 256,
            "schedule_conservativeness": 0.3,
            "chunked_prefill_size": 512,
        },
    ),
    (
        "long-context",
        GPU,
        {"page_size": 64, "schedule_policy": "lpm", "chunked_prefill_size": 16384},
    ),
    ("long-context", CPU, {"page_size": 64, "schedule_policy": "lpm", "chunked_prefill_size": 512}),
    ("multi-turn", GPU, {"page_size": 1, "disable_radix_cache": False}),
    ("multi-turn", CPU, {"page_size": 1, "disable_radix_cache": False}),
]


@pytest.mark.parametrize(("profile", "hardware", "expected"), VALUES)
def test_values_and_reasons(profile: str, hardware: Hardware, expected: dict[str, Any]) -> None:
    config = decide("--workload", profile, hardware=hardware)
    for name, value in expected.items():
        assert config.options.get(name) == value, name
        decision = reason(config, name)
        assert f"--workload {profile}: " in decision.why
        assert not decision.warn
    assert server_args(config.options)["workload"] == profile


def test_every_profile_is_a_choice_and_every_recommendation_gets_its_decision() -> None:
    (field,) = (field for field in OPTION_FIELDS if field.name == "workload")
    assert field.about.choices == tuple(PROFILES)
    for profile, advice in PROFILES.items():
        config = decide("--workload", profile)
        names = [decision.field for decision in config.decisions]
        assert len(names) == len(set(names))
        for one in advice:
            name = getattr(one, "option", None) or one.name
            assert f"--workload {profile}" in reason(config, name).why


@pytest.mark.parametrize(
    ("profile", "flag", "value"),
    [
        ("online", "max_running_requests", 4),
        ("online", "schedule_conservativeness", 1.0),
        ("offline", "mem_fraction_static", 0.5),
        ("offline", "chunked_prefill_size", 512),
        ("offline", "chunked_prefill_size", -1),
        ("long-context", "page_size", 1),
        ("long-context", "schedule_policy", "fcfs"),
        ("multi-turn", "page_size", 16),
    ],
)
def test_an_explicit_option_wins_even_where_it_is_the_default(
    profile: str, flag: str, value: Any
) -> None:
    config = decide("--workload", profile, f"--{flag.replace('_', '-')}={value}")
    assert config.options.get(flag) == value
    decision = reason(config, flag)
    assert f"given; --workload {profile} would set" in decision.why
    assert not decision.warn


def test_multi_turn_without_a_prefix_cache_is_a_warning() -> None:
    config = decide("--workload", "multi-turn", "--disable-radix-cache")
    assert config.options.memory.disable_radix_cache
    assert reason(config, "disable_radix_cache").warn


@pytest.mark.parametrize(
    ("argv", "flag", "kept", "words"),
    [
        (["--chunked-prefill-size", "1000"], "page_size", 8, "not divisible by --page-size 64"),
        (["--max-total-tokens", "32"], "page_size", 16, "less than one page of 64 tokens"),
        (["--page-size", "48"], "chunked_prefill_size", 8160, "not divisible by --page-size 48"),
        (
            ["--enable-priority-scheduling"],
            "schedule_policy",
            "fcfs",
            "--enable-priority-scheduling",
        ),
    ],
)
def test_a_value_that_contradicts_given_options_gives_way_with_a_warning(
    argv: list[str], flag: str, kept: Any, words: str
) -> None:
    config = decide("--workload", "long-context", *argv)
    assert config.options.get(flag) == kept
    decision = reason(config, flag)
    assert decision.warn
    assert words in decision.why


def test_the_pool_keeps_the_profiles_reason() -> None:
    config = decide("--workload", "online", hardware=CPU)
    decisions = resolve_pool(config, 10_000).decisions
    (running,) = (decision for decision in decisions if decision.field == "max_running_requests")
    assert (running.value, "--workload online" in running.why) == (32, True)


def test_without_a_workload_nothing_changes() -> None:
    config = decide()
    assert config.options.scheduling.workload is None
    assert not any("--workload" in decision.why for decision in config.decisions)


@pytest.mark.parametrize("profile", PROFILES)
def test_resolving_twice_changes_nothing(profile: str) -> None:
    once = decide("--workload", profile, hardware=CPU).options
    assert resolve(once, CPU, SPEC).options == once
    assert msgspec.json.decode(msgspec.json.encode(once), type=type(once)) == once
