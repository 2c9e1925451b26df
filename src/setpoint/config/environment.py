"""Declares the environment variables that Setpoint honours, under SGLang's names. Reads a mapping,
never ``os.environ``."""

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
            "Share of its output limit that a request is expected to use when it starts.",
        ),
    ] = 0.7
    min_new_token_ratio_factor: Annotated[
        float,
        EnvVar(
            "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
            "Factor of the initial share that gives its lowest value.",
        ),
    ] = 0.14
    new_token_ratio_decay_steps: Annotated[
        int,
        EnvVar(
            "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
            "Decode steps without retraction in which the share falls to its lowest value.",
        ),
    ] = 600
    retract_decode_steps: Annotated[
        int,
        EnvVar(
            "SGLANG_RETRACT_DECODE_STEPS",
            "Output tokens for each remaining request for which a retraction makes room.",
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
            "A waiting request with at most this many cached tokens is compared with the others"
            " that wait; -1 turns the comparison off.",
        ),
    ] = 32
    in_batch_deprioritize_threshold: Annotated[
        int,
        EnvVar(
            "IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD",
            "If two waiting requests share at least this many prompt tokens, one waits until the"
            " other has computed them.",
        ),
    ] = 32
    req_waiting_timeout_s: Annotated[
        float,
        EnvVar(
            "SGLANG_REQ_WAITING_TIMEOUT",
            "Seconds that a request may wait in the queue before it is answered 503; 0 or less"
            " means no limit.",
        ),
    ] = -1.0
    req_running_timeout_s: Annotated[
        float,
        EnvVar(
            "SGLANG_REQ_RUNNING_TIMEOUT",
            "Seconds that a request may run before it is answered 503; 0 or less means no limit.",
        ),
    ] = -1.0
    test_retract: Annotated[
        bool, EnvVar("SGLANG_TEST_RETRACT", "Retract running requests regularly, for tests.")
    ] = False
    test_retract_interval: Annotated[
        int, EnvVar("SGLANG_TEST_RETRACT_INTERVAL", "Steps between those retractions.")
    ] = 3
    bootstrap_timeout_s: Annotated[
        float,
        EnvVar(
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
            "Seconds that a prefill server waits for a decode server to ask for a request, and to"
            " take it.",
        ),
    ] = 300.0
    disaggregation_waiting_timeout_s: Annotated[
        float,
        EnvVar(
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
            "Seconds that a decode server waits for a prompt's keys and values before it computes"
            " the prompt itself.",
        ),
    ] = 300.0
    header_overrides: Annotated[
        bool,
        EnvVar(
            "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES",
            "Let the headers x-override-bootstrap-host, -bootstrap-port, -bootstrap-room and"
            " -disagg-prefill-dp-rank replace the body's fields of these names.",
        ),
    ] = False
    health_check_timeout_s: Annotated[
        float,
        EnvVar(
            "SGLANG_HEALTH_CHECK_TIMEOUT",
            "Seconds that /health_generate waits for a token before it answers 503.",
        ),
    ] = 20.0
    health_endpoint_generation: Annotated[
        bool,
        EnvVar(
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
            "/health also generates a token, instead of only checking the processes.",
        ),
    ] = True
    threads_bind: Annotated[
        str,
        EnvVar(
            "SGLANG_CPU_OMP_THREADS_BIND",
            "CPUs of each rank, as lists that are separated by `|`, such as `0-15|16-31`: first"
            " the ranks of the first engine. Each CPU gets a thread. all: Setpoint places the ranks"
            " on NUMA nodes, if the machine has several.",
        ),
    ] = "all"
    log_ms: Annotated[
        bool, EnvVar("SGLANG_LOG_MS", "Show milliseconds in the time stamps of the log.")
    ] = False
    allow_longer_context: Annotated[
        bool,
        EnvVar(
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
            "Allow a --context-length above the model's own limit.",
        ),
    ] = False
    expert_distribution_recorder_dir: Annotated[
        str,
        EnvVar(
            "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",
            "Folder for the files of /dump_expert_distribution_record.",
        ),
    ] = "/tmp"
    torch_profiler_dir: Annotated[
        str,
        EnvVar(
            "SGLANG_TORCH_PROFILER_DIR",
            "Folder for profiles. A request's output_dir must be this folder or one below it.",
        ),
    ] = "/tmp"
    hicache_folder: Annotated[
        str,
        EnvVar(
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
            "Folder of --hicache-storage-backend file.",
        ),
    ] = "/tmp/hicache"


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
    """The SGLANG_* variables that are set but have no effect here. The log names them, so that none
    is ignored silently."""
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
