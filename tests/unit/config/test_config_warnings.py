"""What was given and cannot be met, or does nothing here, is a warning with its reason."""

from __future__ import annotations

import pytest
from resolving import decide, reason

from setpoint.config.options import Options


def test_a_wish_that_cannot_be_met_is_a_warning() -> None:
    config = decide(
        Options.of(
            disable_radix_cache=True,
            schedule_policy="lpm",
            enable_mixed_chunk=True,
            chunked_prefill_size=-1,
        )
    )
    assert config.options.scheduling.schedule_policy == "fcfs"
    assert config.options.scheduling.enable_mixed_chunk is False
    assert {decision.field for decision in config.decisions if decision.warn} == {
        "schedule_policy",
        "enable_mixed_chunk",
    }


def test_an_eviction_policy_that_does_nothing_is_a_warning() -> None:
    useless = Options.of(radix_eviction_policy="lfu", disable_radix_cache=True)
    assert reason(decide(useless), "radix_eviction_policy").warn
    equal = Options.of(radix_eviction_policy="priority")
    assert reason(decide(equal), "radix_eviction_policy").warn
    assert not reason(
        decide(equal.replace(schedule_policy="priority")), "radix_eviction_policy"
    ).warn
    for threshold, warn in ((1024, True), (1025, False)):
        parameters = f'{{"threshold": {threshold}, "next_prompt_estimate": 1024}}'
        config = decide(
            Options.of(radix_eviction_policy="tlru", radix_eviction_policy_config=parameters)
        )
        assert reason(config, "radix_eviction_policy").warn is warn


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "hrrn"])
def test_policies_that_read_the_cache_need_one(policy: str) -> None:
    decision = reason(
        decide(Options.of(disable_radix_cache=True, schedule_policy=policy)), "schedule_policy"
    )
    assert (decision.value, decision.warn) == ("fcfs", True)
    assert (
        decide(
            Options.of(disable_radix_cache=True, schedule_policy="lof")
        ).options.scheduling.schedule_policy
        == "lof"
    )


def test_the_priority_policy_is_fcfs_with_priorities() -> None:
    config = decide(Options.of(schedule_policy="priority", retraction_policy="priority"))
    assert (
        config.options.scheduling.schedule_policy,
        config.options.scheduling.enable_priority_scheduling,
    ) == (
        "fcfs",
        True,
    )
    assert "priority is fcfs" in reason(config, "schedule_policy").why
    assert not reason(config, "schedule_policy").warn


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (
            Options.of(
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
        (
            Options.of(schedule_low_priority_values_first=True),
            {"schedule_low_priority_values_first"},
        ),
        (Options.of(prefill_decode_interval_min_bs=4), {"prefill_decode_interval_min_bs"}),
        (Options.of(prefill_decode_interval_min_bs=4, prefill_decode_interval=2), set()),
        (
            Options.of(
                prefill_delayer_queue_min_ratio=0.2, prefill_delayer_token_usage_low_watermark=0.1
            ),
            {"prefill_delayer_queue_min_ratio", "prefill_delayer_token_usage_low_watermark"},
        ),
        (
            Options.of(abort_on_priority_when_disabled=True, enable_priority_scheduling=True),
            {"abort_on_priority_when_disabled"},
        ),
        (Options.of(abort_on_priority_when_disabled=True), set()),
        (
            Options.of(prefill_delayer_max_delay_passes=3, prefill_delayer_max_delay_ms=1.0),
            {"prefill_delayer_max_delay_passes", "prefill_delayer_max_delay_ms"},
        ),
        (Options.of(prefill_delayer_max_delay_passes=3, min_free_slots_delay=2), set()),
        (Options.of(default_priority_value=3, schedule_policy="priority"), set()),
    ],
)
def test_an_option_without_effect_is_a_warning(options: Options, fields: set[str]) -> None:
    assert {decision.field for decision in decide(options).decisions if decision.warn} == fields
