"""Checks of options that need neither hardware nor model. Every failure is one line that says what
to do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import msgspec

from setpoint.config.declare import Field, Option
from setpoint.config.metric_options import check_metrics
from setpoint.config.options import OPTION_FIELDS, Options
from setpoint.config.sglang_names import instead
from setpoint.config.sglang_values import is_known_value
from setpoint.core.errors import ConfigError, RequestError
from setpoint.core.jsonfile import parse_json
from setpoint.core.sampling import SamplingParams

LEAST_POOL_TOKENS = 8
"""Pool tokens that the shortest request needs: one prompt token, and the tokens that ``pool`` keeps
free after it."""
MAX_INT = (1 << 53) - 1
"""Largest value of a whole number without a bound of its own: the largest that every reader of JSON
represents exactly."""


def check_options(options: Options) -> None:
    """Raise ConfigError if an option is outside its declared values, or two options contradict each
    other."""
    if options.max_queued_requests == 0:
        raise ConfigError(
            "--max-queued-requests 0 would refuse every request, also on an idle server: a request"
            " joins the queue before it runs. Give 1 or more."
        )
    check_values(options, OPTION_FIELDS)
    fraction = options.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            f"--mem-fraction-static must be between 0 and 1, ends excluded, got {fraction}."
        )
    page, chunk, total = options.page_size, options.chunked_prefill_size, options.max_total_tokens
    if chunk is not None and chunk > 0 and chunk % page:
        raise ConfigError(
            f"--chunked-prefill-size {chunk} is not divisible by --page-size {page}; use a multiple"
            f" such as {-(-chunk // page) * page}."
        )
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
    if options.served_model_name is not None and ":" in options.served_model_name:
        raise ConfigError(
            f"--served-model-name {options.served_model_name!r} must not contain a colon: it"
            " separates adapter names."
        )
    _check_priorities(options)
    check_metrics(options)
    if options.schedule_policy == "shortest-prefill-first" and options.disable_radix_cache:
        raise ConfigError(
            "--schedule-policy shortest-prefill-first needs the prefix cache; drop"
            " --disable-radix-cache or use another policy."
        )
    model_overrides(options)
    chat_template_kwargs(options)
    preferred_sampling(options)
    eviction_parameters(options)


def check_values(values: msgspec.Struct, fields: Iterable[Field[Option]]) -> None:
    """Raise ConfigError if a value is outside what its option declares."""
    for field in fields:
        value = getattr(values, field.name)
        if value is not None:
            for each in value if field.is_list else (value,):
                _check_value(field, each)


def _check_priorities(options: Options) -> None:
    enabled = options.enable_priority_scheduling or options.schedule_policy == "priority"
    if enabled and options.schedule_policy not in ("fcfs", "lof", "priority"):
        raise ConfigError(
            "--enable-priority-scheduling orders the queue under --schedule-policy fcfs or lof,"
            f" not {options.schedule_policy}; drop one of the two."
        )
    if options.retraction_policy == "priority" and not enabled:
        raise ConfigError("--retraction-policy priority needs --enable-priority-scheduling.")


def model_overrides(options: Options) -> dict[str, Any]:
    """``--json-model-override-args`` as a dict. Raises ConfigError if it is not a JSON object."""
    return _json_object(
        "--json-model-override-args",
        options.json_model_override_args,
        example='{"rope_theta": 10000}',
    )


def chat_template_kwargs(options: Options) -> dict[str, Any]:
    """``--default-chat-template-kwargs`` as a dict. Raises ConfigError if it is not a JSON
    object."""
    return _json_object(
        "--default-chat-template-kwargs",
        options.default_chat_template_kwargs or "{}",
        example='{"enable_thinking": false}',
    )


def preferred_sampling(options: Options) -> dict[str, Any]:
    """``--preferred-sampling-params`` as a dict. Raises ConfigError for values that no request may
    have."""
    flag = "--preferred-sampling-params"
    given = _json_object(
        flag, options.preferred_sampling_params or "{}", example='{"temperature": 0.6}'
    )
    try:
        SamplingParams.parse(given)
    except RequestError as error:
        raise ConfigError(f"{flag}: {error}") from None
    return given


EVICTION_PARAMETERS: dict[str, dict[str, int]] = {
    "slru": {"protected_threshold": 1},
    "tlru": {"threshold": 0, "next_prompt_estimate": 0},
}
"""Eviction policy -> its parameters in ``--radix-eviction-policy-config``, each with its smallest
value."""


def eviction_parameters(options: Options) -> dict[str, int]:
    """``--radix-eviction-policy-config`` as keyword arguments of the policy. Raises ConfigError for
    parameters that the policy does not have."""
    policy, flag = options.radix_eviction_policy, "--radix-eviction-policy-config"
    given = _json_object(
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
            f"--radix-eviction-policy tlru needs {flag} with the prompt tokens that may be"
            ' recomputed per turn and those that a turn adds, e.g. \'{"threshold": 4096,'
            ' "next_prompt_estimate": 1024}\'.'
        )
    return given


def _json_object(flag: str, text: str, *, example: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be a JSON object, e.g. '{example}'.")
    return found


def _check_value(field: Field[Option], value: Any) -> None:
    about = field.about
    if about.choices and value not in about.choices:
        allowed = ", ".join(map(str, about.choices))
        near = get_close_matches(str(value), map(str, about.choices), n=1)
        nearest = f" The nearest is {near[0]}." if near else ""
        if is_known_value(field.name, value):
            raise ConfigError(
                f"{field.flag} {value} is not supported by this version of Setpoint yet; supported:"
                f" {allowed}.{nearest}{instead(field.flag)}"
            )
        raise ConfigError(f"{field.flag} must be one of {allowed}; got {value!r}.{nearest}")
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
