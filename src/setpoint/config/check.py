"""Checks the options, as far as that needs neither hardware nor model. Every failure is one line
that says what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import msgspec

from setpoint.config.disaggregation import check_disaggregation
from setpoint.config.dp_attention import check_dp_attention
from setpoint.config.groups.answers import preferred_sampling
from setpoint.config.groups.chat_formats import NONE
from setpoint.config.groups.declare import Field, Option, flag_of
from setpoint.config.groups.events import FLAG, publisher_config
from setpoint.config.groups.execution import check_spacing
from setpoint.config.groups.graphs import check_graphs
from setpoint.config.groups.memory import MemoryOptions, eviction_parameters
from setpoint.config.groups.metrics import check_metrics
from setpoint.config.groups.model import chat_template_kwargs, model_overrides
from setpoint.config.groups.scheduling import SchedulingOptions
from setpoint.config.groups.server import ServerOptions
from setpoint.config.groups.tiers import check_tiers
from setpoint.config.groups.traces import otlp_url
from setpoint.config.nodes import check_nodes
from setpoint.config.options import GROUPS, Options
from setpoint.config.sglang import instead, is_known_value
from setpoint.core.constraint import KINDS
from setpoint.core.errors import ConfigError

LEAST_POOL_TOKENS = 8
"""Pool tokens that the shortest request needs: one prompt token, and the tokens that ``pool`` keeps
free after it."""
MAX_INT = (1 << 53) - 1
"""Largest value of an integer option that declares no upper bound: the largest integer that every
JSON reader represents exactly."""


TEXT_OPTIONS = (
    *("chat_template", "default_chat_template_kwargs"),
    *("tool_call_parser", "reasoning_parser"),
)
"""Options that have no meaning on a server without a tokenizer."""


def check_options(options: Options) -> None:
    """Raise ConfigError if an option is outside its declared values, or two options contradict each
    other."""
    scheduling, memory = options.scheduling, options.memory
    if scheduling.max_queued_requests == 0:
        raise ConfigError(
            "--max-queued-requests 0 would refuse every request, even on an idle server, because"
            " each request joins the queue before it runs. Give 1 or more."
        )
    check_spacing(options.execution)
    check_graphs(options.graphs)
    check_dp_attention(options)
    check_nodes(options)
    check_disaggregation(options)
    _check_keys(options.server)
    for group, fields in GROUPS.items():
        check_values(getattr(options, group), fields)
    _check_pool(memory, scheduling.chunked_prefill_size)
    if options.model.served_model_name is not None and ":" in options.model.served_model_name:
        raise ConfigError(
            f"--served-model-name {options.model.served_model_name!r} must not contain a colon: it"
            " separates adapter names."
        )
    _check_priorities(scheduling)
    check_metrics(options.metrics)
    if options.traces.enable_trace:
        otlp_url(options.traces.otlp_traces_endpoint)
    _check_events(options)
    if scheduling.schedule_policy == "shortest-prefill-first" and memory.disable_radix_cache:
        raise ConfigError(
            "--schedule-policy shortest-prefill-first needs the prefix cache; drop"
            " --disable-radix-cache or use another policy."
        )
    _check_ids_only(options)
    model_overrides(options.model)
    chat_template_kwargs(options.model)
    preferred_sampling(options.answers)
    _check_cache(options)


def _check_pool(memory: MemoryOptions, chunk: int | None) -> None:
    """chunk: --chunked-prefill-size."""
    fraction = memory.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            f"--mem-fraction-static must be between 0 and 1, ends excluded, got {fraction}."
        )
    page, total = memory.page_size, memory.max_total_tokens
    if page is not None and chunk is not None and chunk > 0 and chunk % page:
        raise ConfigError(
            f"--chunked-prefill-size {chunk} is not divisible by --page-size {page}; use a multiple"
            f" such as {-(-chunk // page) * page}."
        )
    page = page or 1
    if total is not None and total < page:
        raise ConfigError(
            f"--max-total-tokens {total} is less than one page of {page} tokens; raise it or lower"
            " --page-size."
        )
    if total is not None and total // page * page < LEAST_POOL_TOKENS:
        raise ConfigError(
            f"--max-total-tokens {total} holds no request: a prompt of one token needs"
            f" {LEAST_POOL_TOKENS}; raise it."
        )


def _check_cache(options: Options) -> None:
    eviction_parameters(options.memory)
    check_tiers(options.tiers, has_cache=not options.memory.disable_radix_cache)


def check_values(values: msgspec.Struct, fields: Iterable[Field[Option]]) -> None:
    """Raise ConfigError if a value is outside what its option declares."""
    for field in fields:
        value = getattr(values, field.name)
        if value is not None:
            for each in value if field.is_list else (value,):
                _check_value(field, each)


def _check_keys(options: ServerOptions) -> None:
    """Raise ConfigError for a key that protects nothing or that no client can send. The message
    does not tell the key."""
    given = [("--api-key", options.api_key), ("--admin-api-key", options.admin_api_key)]
    given += [("--extra-api-keys", key) for key in options.extra_api_keys]
    for flag, key in given:
        if key == "":
            raise ConfigError(
                f"{flag} has an empty key, which anybody could send. Give a key, or leave the"
                " option out."
            )
        if key is not None and (key != key.strip() or not key.isprintable()):
            raise ConfigError(
                f"{flag} has a key that no HTTP header can carry: it begins or ends with a blank,"
                " or has a line break or another control character. Give one without them."
            )
    for flag, key in given:
        if flag != "--admin-api-key" and key is not None and key == options.admin_api_key:
            raise ConfigError(
                f"{flag} has the key of --admin-api-key, so a client could use the routes for"
                " operators. Give the client another key."
            )


def _check_events(options: Options) -> None:
    """Raise ConfigError if KV events cannot be published as configured."""
    config = publisher_config(options.events, num_ranks=options.parallel.dp_size)
    if config is not None and options.memory.disable_radix_cache:
        raise ConfigError(
            f"{FLAG} publishes what the prefix cache holds, and --disable-radix-cache turns that"
            " cache off; drop one of the two."
        )


def _check_ids_only(options: Options) -> None:
    """Raise ConfigError if --skip-tokenizer-init is combined with an option about text."""
    if not options.model.skip_tokenizer_init:
        return
    unset = Options()
    for name in TEXT_OPTIONS:
        if options.get(name) not in (unset.get(name), NONE):
            flag = flag_of(name)
            raise ConfigError(
                f"{flag} concerns text, and with --skip-tokenizer-init the server handles none;"
                " drop one of the two."
            )
    preferred = preferred_sampling(options.answers)
    if text := preferred.keys() & {"stop", "stop_regex", *KINDS}:
        raise ConfigError(
            f"--preferred-sampling-params: {min(text)} needs a tokenizer, and"
            " --skip-tokenizer-init loads none; drop one of the two."
        )


def check_has_text(options: Options, command: str) -> None:
    """Raise ConfigError if a command that reads and writes text was given --skip-tokenizer-init."""
    if options.model.skip_tokenizer_init:
        raise ConfigError(
            f"{command} reads and writes text, and with --skip-tokenizer-init there is no"
            " tokenizer; drop the flag. It is for 'setpoint serve' and the offline Engine."
        )


def _check_priorities(scheduling: SchedulingOptions) -> None:
    enabled = scheduling.enable_priority_scheduling or scheduling.schedule_policy == "priority"
    if enabled and scheduling.schedule_policy not in ("fcfs", "lof", "priority"):
        raise ConfigError(
            "--enable-priority-scheduling orders the queue under --schedule-policy fcfs or lof,"
            f" not {scheduling.schedule_policy}; drop one of the two."
        )
    if scheduling.retraction_policy == "priority" and not enabled:
        raise ConfigError("--retraction-policy priority needs --enable-priority-scheduling.")


def _check_value(field: Field[Option], value: Any) -> None:
    about = field.about
    if about.choices and value not in about.choices:
        allowed = ", ".join(map(str, about.choices))
        near = get_close_matches(str(value), map(str, about.choices), n=1)
        nearest = f" The nearest is {near[0]}." if near else ""
        if is_known_value(field.name, value):
            raise ConfigError(
                f"{field.flag} {value} is not supported by this version of Setpoint yet; supported:"
                f" {allowed}.{nearest}{instead(field.flag, value)}"
            )
        raise ConfigError(f"{field.flag} must be one of {allowed}; got {value!r}.{nearest}")
    if value == "" and about.metavar in ("FILE", "FOLDER"):
        raise ConfigError(
            f"{field.flag} is empty: name a {about.metavar.lower()}, or leave it out."
        )
    if field.kind is float and not (math.isfinite(value) or (about.infinite and value == math.inf)):
        raise ConfigError(f"{field.flag} must be a finite number, got {value}.")
    if about.low is not None and value < about.low:
        raise ConfigError(f"{field.flag} must be at least {about.low:g}, got {value}.")
    high = MAX_INT if about.high is None and field.kind is int else about.high
    if high is not None and value > high:
        raise ConfigError(
            f"{field.flag} must be at most {high if field.kind is int else f'{high:g}'}, got"
            f" {value}."
        )
    if field.kind is int and value < -MAX_INT:
        raise ConfigError(f"{field.flag} must be at least {-MAX_INT}, got {value}.")
