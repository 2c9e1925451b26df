"""Settles what follows from other options: which have no effect, which replace each other."""

from __future__ import annotations

from collections.abc import Iterator, Set

from setpoint.config import sglang_names
from setpoint.config.check import eviction_parameters
from setpoint.config.decisions import Book, Decision
from setpoint.config.options import OPTION_FIELDS, Options
from setpoint.core.errors import ConfigError

_NEEDS = {
    "schedule_low_priority_values_first": ("enable_priority_scheduling",),
    "default_priority_value": ("enable_priority_scheduling",),
    "priority_scheduling_preemption_threshold": ("enable_priority_scheduling",),
    "disable_priority_preemption": ("enable_priority_scheduling",),
    "prefill_decode_interval_min_bs": ("prefill_decode_interval",),
    "prefill_delayer_token_usage_low_watermark": ("enable_prefill_delayer",),
    "prefill_delayer_queue_min_ratio": ("enable_prefill_delayer",),
    "prefill_delayer_max_delay_passes": ("enable_prefill_delayer", "min_free_slots_delay"),
    "prefill_delayer_max_delay_ms": ("enable_prefill_delayer", "min_free_slots_delay"),
    "torch_compile_max_bs": ("enable_torch_compile",),
}
"""Options that have no effect unless one of those named is on."""


def settle_rules(book: Book, device: str, chunk: int) -> None:
    """Settle all options of this module. Raises ConfigError for an option that this version cannot
    honour."""
    _scheduling(book, chunk)
    _eviction(book)
    _without_effect(book, device)


def _scheduling(book: Book, chunk: int) -> None:
    options = book.options
    policy = options.schedule_policy
    if options.disable_radix_cache and policy in ("lpm", "dfs-weight", "hrrn"):
        book.put(
            "schedule_policy",
            "fcfs",
            f"{policy} sorts by cached prefixes, and --disable-radix-cache keeps none",
            warn=True,
        )
    if policy == "priority":
        book.put("schedule_policy", "fcfs", "priority is fcfs with priority scheduling")
        book.put("enable_priority_scheduling", True, "--schedule-policy priority")
    for name, owners in _NEEDS.items():
        if book.changed(name) and not any(map(book.get, owners)):
            flags = " or ".join("--" + owner.replace("_", "-") for owner in owners)
            book.put(
                name, getattr(options, name), f"given, without effect: needs {flags}", warn=True
            )
    if book.get("enable_priority_scheduling") and options.abort_on_priority_when_disabled:
        book.put(
            "abort_on_priority_when_disabled",
            True,
            "given, without effect: priority scheduling is on",
            warn=True,
        )
    if options.enable_mixed_chunk and chunk <= 0:
        book.put(
            "enable_mixed_chunk",
            False,
            "there are no chunks to mix with: --chunked-prefill-size turns them off",
            warn=True,
        )


def _eviction(book: Book) -> None:
    policy, parameters = book.options.radix_eviction_policy, eviction_parameters(book.options)
    if policy != "lru" and book.options.disable_radix_cache:
        book.put(
            "radix_eviction_policy",
            policy,
            "given, without effect: --disable-radix-cache keeps nothing to evict",
            warn=True,
        )
    elif policy == "priority" and not book.get("enable_priority_scheduling"):
        why = (
            "given, but all requests are equal without --enable-priority-scheduling: lru, and"
            " output before prompts"
        )
        book.put("radix_eviction_policy", policy, why, warn=True)
    elif policy == "tlru" and parameters["threshold"] <= parameters["next_prompt_estimate"]:
        why = (
            "given, but acts as lru: the next prompt alone is expected to use up the threshold, so"
            " no cached token is spare"
        )
        book.put("radix_eviction_policy", policy, why, warn=True)


def _without_effect(book: Book, device: str) -> None:
    if book.options.enable_hierarchical_cache and device != "cpu":
        raise ConfigError(
            "--enable-hierarchical-cache is not supported on a GPU by this version of Setpoint yet;"
            " leave it out: what does not fit the KV pool is computed again."
        )
    for field in OPTION_FIELDS:
        if field.about.no_effect and book.changed(field.name):
            book.put(
                field.name,
                book.get(field.name),
                f"given, without effect: {field.about.no_effect}",
                warn=True,
            )


def about_sglang_alone(given: Set[str]) -> Iterator[Decision]:
    """A decision about the given options that only SGLang has: they ask for SGLang's own defaults
    (``commandline``)."""
    for name in sorted(given):
        default = sglang_names.default(name)
        if default is not None and not hasattr(Options, name):
            yield Decision(
                name,
                default,
                "given; SGLang's default, and this version does nothing else",
                told=True,
            )
