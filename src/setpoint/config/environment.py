"""The environment variables that are honoured, under SGLang's names, declared once. Reads a
mapping, never ``os.environ``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from setpoint.config.groups.declare import EnvVar, Scalar, declared
from setpoint.core.errors import ConfigError


class EnvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the honoured variables; the defaults are SGLang 0.5.23's."""

    init_new_token_ratio: Annotated[
        float,
        EnvVar(
            "SGLANG_INIT_NEW_TOKEN_RATIO",
            "Share of its output limit a running request is first expected to use.",
        ),
    ] = 0.7
    min_new_token_ratio_factor: Annotated[
        float,
        EnvVar(
            "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
            "Lowest value of that share, as a factor of its first value.",
        ),
    ] = 0.14
    new_token_ratio_decay_steps: Annotated[
        int,
        EnvVar(
            "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
            "Decode steps without retraction until that lowest value is reached.",
        ),
    ] = 600
    retract_decode_steps: Annotated[
        int,
        EnvVar(
            "SGLANG_RETRACT_DECODE_STEPS",
            "Output tokens per kept request that a retraction makes room for.",
        ),
    ] = 20
    clip_max_new_tokens: Annotated[
        int,
        EnvVar(
            "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
            "Maximum output tokens reserved for one request at admission.",
        ),
    ] = 4096
    in_batch_check_threshold: Annotated[
        int,
        EnvVar(
            "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD",
            "Requests with at most this many cached tokens are compared with others that wait; -1"
            " turns it off.",
        ),
    ] = 32
    in_batch_deprioritize_threshold: Annotated[
        int,
        EnvVar(
            "IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD",
            "If two waiting requests share at least this many tokens, one waits for the other.",
        ),
    ] = 32
    req_waiting_timeout_s: Annotated[
        float,
        EnvVar(
            "SGLANG_REQ_WAITING_TIMEOUT",
            "Seconds a request may wait in the queue before it gets 503; 0 or less means no limit.",
        ),
    ] = -1.0
    req_running_timeout_s: Annotated[
        float,
        EnvVar(
            "SGLANG_REQ_RUNNING_TIMEOUT",
            "Seconds a request may run before it gets 503; 0 or less means no limit.",
        ),
    ] = -1.0
    test_retract: Annotated[
        bool, EnvVar("SGLANG_TEST_RETRACT", "Retract running requests regularly, for tests.")
    ] = False
    test_retract_interval: Annotated[
        int, EnvVar("SGLANG_TEST_RETRACT_INTERVAL", "Steps between those retractions.")
    ] = 3
    health_check_timeout_s: Annotated[
        float,
        EnvVar(
            "SGLANG_HEALTH_CHECK_TIMEOUT",
            "Seconds /health_generate waits for a token before it answers 503.",
        ),
    ] = 20.0
    health_endpoint_generation: Annotated[
        bool,
        EnvVar(
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
            "/health also generates a token, instead of only checking the processes.",
        ),
    ] = True
    log_ms: Annotated[
        bool, EnvVar("SGLANG_LOG_MS", "Show milliseconds in the time stamps of the log.")
    ] = False
    allow_longer_context: Annotated[
        bool,
        EnvVar(
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
            "Let --context-length exceed what the model was made for.",
        ),
    ] = False
    torch_profiler_dir: Annotated[
        str,
        EnvVar(
            "SGLANG_TORCH_PROFILER_DIR",
            "Folder for profiles; output_dir may name it or a folder below it.",
        ),
    ] = "/tmp"


ENV_FIELDS = declared(EnvSettings, EnvVar)
_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "y": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "n": False,
    "off": False,
}


def read_environment(environ: Mapping[str, str]) -> EnvSettings:
    """The values of the honoured variables in ``environ``. Raises ConfigError for a value of the
    wrong type."""
    values: dict[str, Any] = {}
    for field in ENV_FIELDS:
        text = environ.get(field.about.name, "").strip()
        if text:
            values[field.name] = _parse(field.about.name, field.kind, text)
    return EnvSettings(**values)


def unread_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """SGLANG_* variables that are set but not honoured here; the log names them, so that none is
    ignored in silence."""
    honoured = {field.about.name for field in ENV_FIELDS}
    return tuple(
        sorted(name for name in environ if name.startswith("SGLANG_") and name not in honoured)
    )


def _parse(name: str, kind: type, text: str) -> Scalar:
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ConfigError(f"environment variable {name} must be true or false, got {text!r}.")
        return _WORDS[text.lower()]
    try:
        value = int(text) if kind is int else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(
            f"environment variable {name} must be {'an integer' if kind is int else 'a number'},"
            f" got {text!r}."
        )
    return value
