"""``--radix-eviction-policy`` and its JSON: what the policy gets, and one clear error for
everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.groups.memory import eviction_parameters
from setpoint.config.options import OPTION_FIELDS
from setpoint.core.errors import ConfigError
from setpoint.scheduler.cache.evict import POLICIES
from setpoint.scheduler.cache.manager import KVCache

CONFIG = "--radix-eviction-policy-config"
TLRU = '{"threshold": 4096, "next_prompt_estimate": 1024}'


def parameters(policy: str, *config: str) -> dict[str, int]:
    return eviction_parameters(
        parse(SERVE, ["--radix-eviction-policy", policy, *config]).options.memory
    )


def test_choices_are_the_policies() -> None:
    (field,) = (field for field in OPTION_FIELDS if field.name == "radix_eviction_policy")
    assert field.about.choices == tuple(POLICIES)


@pytest.mark.parametrize(
    ("policy", "config", "expected"),
    [
        ("lru", (), {}),
        ("lfu", (CONFIG, "{}"), {}),
        ("slru", (), {}),
        ("slru", (CONFIG, '{"protected_threshold": 3}'), {"protected_threshold": 3}),
        ("tlru", (CONFIG, TLRU), {"threshold": 4096, "next_prompt_estimate": 1024}),
    ],
)
def test_parameters_reach_the_policy(
    policy: str, config: tuple[str, ...], expected: dict[str, int]
) -> None:
    assert parameters(policy, *config) == expected
    KVCache(num_pages=1, page_size=1, eviction_policy=policy, eviction_parameters=expected)


@pytest.mark.parametrize(
    ("policy", "config", "words"),
    [
        ("slru", "{protected: 2}", "not valid JSON"),
        ("slru", "2", "must be a JSON object"),
        ("lru", '{"protected_threshold": 2}', "lru has no parameters; got 'protected_threshold'"),
        ("slru", '{"threshold": 2}', "slru takes protected_threshold; got 'threshold'"),
        ("slru", '{"protected_threshold": 0}', "at least 1, got 0"),
        ("slru", '{"protected_threshold": "2"}', 'at least 1, got "2"'),
        ("slru", '{"protected_threshold": true}', "at least 1, got true"),
        ("tlru", '{"threshold": 4096.5, "next_prompt_estimate": 1}', "at least 0, got 4096.5"),
        ("tlru", "{}", "tlru needs --radix-eviction-policy-config with"),
        ("tlru", '{"threshold": 4096}', "tlru needs --radix-eviction-policy-config with"),
    ],
)
def test_bad_config_is_one_clear_error(policy: str, config: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        parameters(policy, CONFIG, config)
    assert "\n" not in str(refused.value)


def test_a_yaml_file_may_hold_the_object_itself(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "radix-eviction-policy: slru\nradix-eviction-policy-config: {protected_threshold: 4}\n"
    )
    assert eviction_parameters(parse(SERVE, ["--config", str(file)]).options.memory) == {
        "protected_threshold": 4
    }
