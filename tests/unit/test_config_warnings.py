"""What was given and cannot be met, or does nothing here, is a warning with its reason."""

from __future__ import annotations

import msgspec
import pytest
from resolving import decide, reason

from setpoint.config.options import Options


def test_a_wish_that_cannot_be_met_is_a_warning() -> None:
    config = decide(
        Options(
            disable_radix_cache=True,
            schedule_policy="lpm",
            enable_mixed_chunk=True,
            chunked_prefill_size=-1,
        )
    )
    assert config.options.schedule_policy == "fcfs"
    assert config.options.enable_mixed_chunk is False
    assert {decision.field for decision in config.decisions if decision.warn} == {
        "schedule_policy",
        "enable_mixed_chunk",
    }


def test_an_eviction_policy_that_does_nothing_is_a_warning() -> None:
    useless = Options(radix_eviction_policy="lfu", disable_radix_cache=True)
    assert reason(decide(useless), "radix_eviction_policy").warn
    equal = Options(radix_eviction_policy="priority")
    assert reason(decide(equal), "radix_eviction_policy").warn
    assert not reason(
        decide(msgspec.structs.replace(equal, schedule_policy="priority")), "radix_eviction_policy"
    ).warn
    for threshold, warn in ((1024, True), (1025, False)):
        parameters = f'{{"threshold": {threshold}, "next_prompt_estimate": 1024}}'
        config = decide(
            Options(radix_eviction_policy="tlru", radix_eviction_policy_config=parameters)
        )
        assert reason(config, "radix_eviction_policy").warn is warn


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "hrrn"])
def test_policies_that_read_the_cache_need_one(policy: str) -> None:
    decision = reason(
        decide(Options(disable_radix_cache=True, schedule_policy=policy)), "schedule_policy"
    )
    assert (decision.value, decision.warn) == ("fcfs", True)
    assert (
        decide(Options(disable_radix_cache=True, schedule_policy="lof")).options.schedule_policy
        == "lof"
    )


def test_the_priority_policy_is_fcfs_with_priorities() -> None:
    config = decide(Options(schedule_policy="priority", retraction_policy="priority"))
    assert (config.options.schedule_policy, config.options.enable_priority_scheduling) == (
        "fcfs",
        True,
    )
    assert "priority is fcfs" in reason(config, "schedule_policy").why
    assert not reason(config, "schedule_policy").warn


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (
            Options(
                default_priority_value=3,
                priority_scheduling_preemption_threshold=0,
                disable_priority_preemption=True,
            ),
            {
                "default_priority_value",
                "priority_scheduling_preemption_threshold",
                "disable_priority_preemption",
            },
        ),
        (Options(schedule_low_priority_values_first=True), {"schedule_low_priority_values_first"}),
        (Options(prefill_decode_interval_min_bs=4), {"prefill_decode_interval_min_bs"}),
        (Options(prefill_decode_interval_min_bs=4, prefill_decode_interval=2), set()),
        (
            Options(
                prefill_delayer_queue_min_ratio=0.2, prefill_delayer_token_usage_low_watermark=0.1
            ),
            {"prefill_delayer_queue_min_ratio", "prefill_delayer_token_usage_low_watermark"},
        ),
        (
            Options(abort_on_priority_when_disabled=True, enable_priority_scheduling=True),
            {"abort_on_priority_when_disabled"},
        ),
        (Options(abort_on_priority_when_disabled=True), set()),
        (
            Options(prefill_delayer_max_delay_passes=3, prefill_delayer_max_delay_ms=1.0),
            {"prefill_delayer_max_delay_passes", "prefill_delayer_max_delay_ms"},
        ),
        (Options(prefill_delayer_max_delay_passes=3, min_free_slots_delay=2), set()),
        (Options(default_priority_value=3, schedule_policy="priority"), set()),
    ],
)
def test_an_option_without_effect_is_a_warning(options: Options, fields: set[str]) -> None:
    assert {decision.field for decision in decide(options).decisions if decision.warn} == fields
