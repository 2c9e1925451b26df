"""The group of options "Memory and cache"."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option, Range
from setpoint.config.groups.values import json_object
from setpoint.core.errors import ConfigError

GROUP = "Memory and cache"


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about the memory for weights and KV pool, and about the prefix cache."""

    mem_fraction_static: Annotated[
        float | None,
        Option(
            GROUP,
            "Share of the available memory, between 0 and 1, that weights and KV pool may take"
            " together. Raise it if there is no room for the pool; lower it if memory runs out"
            " while serving.",
            metavar="SHARE",
            tunable=Range(0.5, 0.95),
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Option(
            GROUP,
            "Upper bound of the KV pool, in tokens.",
            low=1,
            human=True,
            tunable=Range(4096, 16777216, log=True),
        ),
    ] = None
    page_size: Annotated[
        int | None,
        Option(
            GROUP,
            "Tokens in a page of the KV pool; 1 on a CPU and 16 on a GPU, if not given.",
            low=1,
            tunable=(1, 16, 32, 64),
        ),
    ] = None
    disable_radix_cache: Annotated[
        bool,
        Option(
            GROUP,
            "Turn the prefix cache off: prefixes of finished requests are neither kept nor"
            " matched.",
        ),
    ] = False
    radix_eviction_policy: Annotated[
        str,
        Option(
            GROUP,
            "What the prefix cache evicts first: the least recently used prefixes (lru); the"
            " least often used (lfu); those used fewer than twice (slru); those of low-priority"
            " requests (priority); the ends of conversations whose next prefill stays within a"
            " token limit without them (tlru). Among equals, the least recently used goes first.",
            choices=("lru", "lfu", "slru", "priority", "tlru"),
            tunable=("lru", "lfu", "slru"),
        ),
    ] = "lru"
    radix_eviction_policy_config: Annotated[
        str,
        Option(
            GROUP,
            "JSON object with the policy's parameters. slru: protected_threshold (number of uses"
            " from which a prefix is protected; 2 if not given). tlru: threshold (prompt tokens"
            " that may be recomputed per turn) and next_prompt_estimate (tokens that a turn"
            " adds).",
            metavar="JSON",
        ),
    ] = "{}"


EVICTION_PARAMETERS: dict[str, dict[str, int]] = {
    "slru": {"protected_threshold": 1},
    "tlru": {"threshold": 0, "next_prompt_estimate": 0},
}
"""Eviction policy -> its parameters in ``--radix-eviction-policy-config``, each with its smallest
value."""


def eviction_parameters(options: MemoryOptions) -> dict[str, int]:
    """``--radix-eviction-policy-config`` as keyword arguments of the policy. Raises ConfigError for
    parameters that the policy does not have."""
    policy, flag = options.radix_eviction_policy, "--radix-eviction-policy-config"
    given = json_object(
        flag, options.radix_eviction_policy_config, example='{"protected_threshold": 2}'
    )
    known = EVICTION_PARAMETERS.get(policy, {})
    for name, value in given.items():
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "has no parameters"
            raise ConfigError(f"{flag}: --radix-eviction-policy {policy} {takes}; got {name!r}.")
        if type(value) is not int or value < known[name]:
            raise ConfigError(
                f"{flag}: {name} must be a whole number of at least {known[name]}, got"
                f" {json.dumps(value)}."
            )
    if policy == "tlru" and given.keys() != known.keys():
        raise ConfigError(
            f"--radix-eviction-policy tlru needs {flag} with the number of prompt tokens that may"
            " be recomputed per turn and the number that a turn adds, e.g."
            ' \'{"threshold": 4096, "next_prompt_estimate": 1024}\'.'
        )
    return given
